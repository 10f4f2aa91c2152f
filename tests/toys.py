"""Tiny random checkpoints in the real Hugging Face layout, for tests: made by torch alone, the same from the same seed.

    write_target(dir, "qwen3-tied")             a target: one of KINDS; shards=2 splits its tensors over two files
    write_drafter(dir, target_dir)              a drafter for it, in the layout of the released z-lab checkpoints

Any key of config.json can be overridden by name (num_hidden_layers=4, rope_parameters={...}); the tensors follow. DROP as a value leaves the key out.
"""
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

DROP = object()

# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer: 256 bytes, a few merges, four special tokens. Qwen's pre-tokenizer.

MERGES = ["Ġ t", "h e", "Ġt he", "Ġ a", "i n", "e r", "o n", "r e", "Ġ s", "a t", "o u", "e n", "in g", "Ġ w", "o r", "Ġ c", "i s", "i t", "a n", "Ġa n",
          "Ġan d", "l l", "e s", "Ġ f", "Ġ m", "Ġ Ġ", "ĠĠ ĠĠ", "Ċ Ċ", "a s", "l e", "u s", "us er"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved|>"]
QWEN_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}%s{% endif %}")
NO_THINKING = "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"


def byte_letters():
    """GPT-2's printable stand-in for each byte, in its order of ids."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(rest))]


VOCAB = byte_letters() + [m.replace(" ", "") for m in MERGES]
SPECIAL_IDS = {token: len(VOCAB) + i for i, token in enumerate(SPECIAL)}
N_TOKENS = len(VOCAB) + len(SPECIAL)


def write_tokenizer(dir, thinking):
    added = [dict(id=i, content=token, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True) for token, i in SPECIAL_IDS.items()]
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    split = dict(type="Split", pattern={"Regex": QWEN_SPLIT}, behavior="Isolated", invert=False)
    model = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False, byte_fallback=False,
                 ignore_merges=False, vocab={token: i for i, token in enumerate(VOCAB)}, merges=[m.split() for m in MERGES])
    write_json(dir / "tokenizer.json", dict(
        version="1.0", truncation=None, padding=None, added_tokens=added, normalizer={"type": "NFC"},
        pre_tokenizer=dict(type="Sequence", pretokenizers=[split, byte_level]), post_processor=byte_level, decoder=byte_level, model=model))
    write_json(dir / "tokenizer_config.json", dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token=None,
        model_max_length=4096, clean_up_tokenization_spaces=False, chat_template=CHATML.replace("%s", NO_THINKING if thinking else "")))


# ---------------------------------------------------------------------------------------------------------------------
# Targets

COMMON = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, vocab_size=N_TOKENS, hidden_act="silu",
    rms_norm_eps=1e-6, max_position_embeddings=40960, attention_dropout=0.0, initializer_range=0.02, bos_token_id=SPECIAL_IDS["<|endoftext|>"],
    eos_token_id=SPECIAL_IDS["<|im_end|>"], torch_dtype="float32", use_cache=True)
QWEN3 = dict(COMMON, architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False, head_dim=16, rope_theta=1000000, rope_scaling=None,
             sliding_window=None, use_sliding_window=False, max_window_layers=8, tie_word_embeddings=False)
KINDS = {
    "qwen3-tied": dict(QWEN3, tie_word_embeddings=True, head_dim=32),  # heads wider than hidden / heads, like Qwen3-0.6B and 4B
    "qwen3-untied": dict(QWEN3, hidden_size=48, head_dim=12),
    "qwen3-padded": dict(QWEN3, vocab_size=N_TOKENS + 20),  # more embedding rows than the tokenizer has tokens
    # Qwen2.5 states neither head_dim nor its q/k/v bias, and a sliding window that is switched off
    "qwen2": dict(COMMON, architectures=["Qwen2ForCausalLM"], model_type="qwen2", rope_theta=1000000.0, sliding_window=32768, use_sliding_window=False,
                  max_window_layers=8, tie_word_embeddings=False),
    # Llama 3.1; the original context of 64 puts head_dim 16 in all three bands of the scaling
    "llama": dict(COMMON, architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, mlp_bias=False, rms_norm_eps=1e-5,
                  max_position_embeddings=512, rope_theta=10000.0, tie_word_embeddings=False, pretraining_tp=1,
                  rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)),
}


def write_target(dir, kind, seed=0, shards=1, padding_scale=0.01, **overrides):
    """padding_scale: size of the rows past the tokenizer; above 1 they win the argmax now and then."""
    dir, config = Path(dir), with_overrides(KINDS[kind], overrides)
    rand = Random(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    embed = rand.normal(vocab, hidden, std=0.2)
    embed[N_TOKENS:] *= padding_scale
    tensors = {"model.embed_tokens.weight": embed}
    for i in range(config["num_hidden_layers"]):
        layer = decoder_layer(rand, config)
        tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    tensors["model.norm.weight"] = rand.norm(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = rand.linear(vocab, hidden)
        tensors["lm_head.weight"][N_TOKENS:] *= padding_scale

    dir.mkdir(parents=True, exist_ok=True)
    write_json(dir / "config.json", config)
    write_json(dir / "generation_config.json", dict(
        bos_token_id=SPECIAL_IDS["<|endoftext|>"], eos_token_id=[SPECIAL_IDS["<|im_end|>"], SPECIAL_IDS["<|endoftext|>"]],
        pad_token_id=SPECIAL_IDS["<|endoftext|>"]))
    write_tokenizer(dir, thinking=config["model_type"] == "qwen3")
    write_tensors(dir, tensors, shards)
    return dir


# ---------------------------------------------------------------------------------------------------------------------
# Drafters

def write_drafter(dir, target_dir, seed=0, block_size=16, layers=2, taps=5, parrot=None, **overrides):
    """Random: it proposes, and is nearly always refused. mask_token_id and target_layer_ids are overridden like the rest, though they are nested.

    parrot=token: a drafter that mostly proposes that token, so that a target which repeats it accepts now and then: choose one from its greedy text.
    """
    dir, target = Path(dir), json.loads((Path(target_dir) / "config.json").read_text())
    hidden, depth = target["hidden_size"], target["num_hidden_layers"]
    layer_ids = [round(1 + i * (depth - 4) / (taps - 1)) for i in range(taps)] if taps > 1 else [depth // 2]
    mask_id = N_TOKENS if target["vocab_size"] > N_TOKENS else SPECIAL_IDS["<|reserved|>"]  # the first unused row, or a token that never occurs
    config = dict(
        architectures=["DFlashDraftModel"], attention_bias=False, attention_dropout=0.0, auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        block_size=block_size, bos_token_id=target["bos_token_id"], dtype="float32", eos_token_id=target["eos_token_id"],
        dflash_config=dict(mask_token_id=overrides.pop("mask_token_id", mask_id), target_layer_ids=overrides.pop("target_layer_ids", layer_ids)),
        head_dim=target.get("head_dim") or hidden // target["num_attention_heads"], hidden_act="silu", hidden_size=hidden, initializer_range=0.02,
        intermediate_size=target["intermediate_size"], layer_types=["full_attention"] * layers,
        max_position_embeddings=target["max_position_embeddings"], max_window_layers=layers, model_type="qwen3",
        num_attention_heads=target["num_attention_heads"], num_hidden_layers=layers, num_key_value_heads=target["num_key_value_heads"],
        num_target_layers=depth, rms_norm_eps=target["rms_norm_eps"], rope_scaling=None, rope_theta=target["rope_theta"], sliding_window=None,
        tie_word_embeddings=False, use_cache=True, use_sliding_window=False, vocab_size=target["vocab_size"])
    config = with_overrides(config, overrides)
    config["dflash_config"] = {key: value for key, value in config["dflash_config"].items() if value is not DROP}

    rand, hidden = Random(seed + 1000), config["hidden_size"]
    tensors = {"fc.weight": rand.linear(hidden, hidden * len(layer_ids)), "hidden_norm.weight": rand.norm(hidden)}
    for i in range(layers):
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in decoder_layer(rand, config).items()}
    tensors["norm.weight"] = rand.norm(hidden)
    if parrot is not None:  # small layers leave the stream near the mask's embedding, and the last norm's weight turns that into the token's head row
        weights = load_file(Path(target_dir) / "model.safetensors")
        embed = weights["model.embed_tokens.weight"].float()
        mask = embed[config["dflash_config"]["mask_token_id"]]
        size = mask.square().mean().sqrt()
        for name in tensors:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] *= 0.04 * size
        unit, row = mask / size, weights.get("lm_head.weight", embed)[parrot].float()
        tensors["norm.weight"] = row * unit / (unit.square() + 0.05)
    dir.mkdir(parents=True, exist_ok=True)
    write_json(dir / "config.json", config)
    write_tensors(dir, tensors)
    return dir


# ---------------------------------------------------------------------------------------------------------------------
# What both are made of

class Random:
    """Sizes found by trying: large enough that greedy text wanders, small enough that fp32's rounding stays near 1e-5 in logits and streams."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape, std=1.0):
        return torch.randn(*shape, generator=self.generator) * std

    def linear(self, rows, columns, gain=1.2):
        return self.normal(rows, columns, std=gain / columns**0.5)

    def norm(self, size):
        return 1 + self.normal(size, std=0.2)


def decoder_layer(rand, config):
    kind, bias = config["model_type"], config.get("attention_bias", False)  # attention_bias is in no released model, but a key that must be honoured
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    tensors = {"input_layernorm.weight": rand.norm(hidden), "post_attention_layernorm.weight": rand.norm(hidden)}
    for name, rows in dict(q=heads * head_dim, k=kv_heads * head_dim, v=kv_heads * head_dim).items():
        tensors[f"self_attn.{name}_proj.weight"] = rand.linear(rows, hidden)
        if bias or kind == "qwen2":
            tensors[f"self_attn.{name}_proj.bias"] = rand.normal(rows, std=0.25)
    tensors["self_attn.o_proj.weight"] = rand.linear(hidden, heads * head_dim)
    if bias and kind != "qwen2":
        tensors["self_attn.o_proj.bias"] = rand.normal(hidden, std=0.25)
    if kind == "qwen3":
        tensors["self_attn.q_norm.weight"], tensors["self_attn.k_norm.weight"] = rand.norm(head_dim), rand.norm(head_dim)
    for name in ("gate", "up"):
        tensors[f"mlp.{name}_proj.weight"] = rand.linear(inner, hidden)
    tensors["mlp.down_proj.weight"] = rand.linear(hidden, inner)
    return tensors


def with_overrides(config, overrides):
    return {key: value for key, value in (config | overrides).items() if value is not DROP}


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


def write_tensors(dir, tensors, shards=1):
    if shards == 1:
        save_file(tensors, dir / "model.safetensors", metadata={"format": "pt"})
        return
    names, where = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, dir / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(dir / "model.safetensors.index.json", dict(metadata=dict(total_size=size), weight_map=dict(sorted(where.items()))))
