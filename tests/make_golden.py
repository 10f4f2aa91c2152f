"""Writes tests/golden/<kind>.safetensors: what transformers computes for each toy target, in fp32. Run where transformers is installed:

    python tests/make_golden.py        (made with torch 2.13.0, transformers 5.15.0)

test_target.py holds target.py to these files without transformers, and calls reference() again where it is installed.
"""
import os
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import toys

GOLDEN = Path(__file__).parent / "golden"
PROMPT = "The user said: 7 is it"
TAPS = (0, 2, 5, 7)  # first and last layer among them
N_GREEDY = 32


def load_transformers(directory, dtype=torch.float32):
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers import AutoModelForCausalLM
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa", output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def transformers_forward(model, ids):
    """ids (1, T) -> logits (T, V), raw residual streams after each layer (L, T, H), the normed last one (T, H)"""
    streams = []
    hooks = [layer.register_forward_hook(lambda module, args, out: streams.append(out[0] if isinstance(out, tuple) else out)) for layer in model.model.layers]
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    for i, stream in enumerate(streams[:-1]):  # the last of hidden_states is past the final norm, the others are the same as ours
        assert torch.equal(stream, out.hidden_states[i + 1])
    return out.logits[0], torch.cat(streams), out.hidden_states[-1][0]


def reference(directory):
    from transformers import AutoTokenizer
    model, tokenizer = load_transformers(directory), AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False).input_ids
    logits, streams, normed = transformers_forward(model, prompt)
    # generate's own greedy search, its stop tokens switched off so that every kind yields N_GREEDY tokens
    model.generation_config.eos_token_id = None
    greedy = model.generate(prompt, max_new_tokens=N_GREEDY, do_sample=False)[0, prompt.shape[1]:]
    assert len(greedy) == N_GREEDY
    text = tokenizer.decode(greedy).encode()
    return dict(prompt=prompt[0], logits=logits, normed=normed, greedy=greedy, text=torch.tensor(list(text), dtype=torch.uint8),
                **{f"tap{i}": streams[i] for i in TAPS})


if __name__ == "__main__":
    from safetensors.torch import save_file
    GOLDEN.mkdir(exist_ok=True)
    for kind in toys.KINDS:
        with tempfile.TemporaryDirectory() as directory:
            tensors = reference(toys.write_target(directory, kind))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, GOLDEN / f"{kind}.safetensors")
        print(f"{kind}: {len(tensors['prompt'])} prompt tokens, greedy {bytes(tensors['text'].tolist()).decode()!r}")
