"""Make the embedded target from nothing: a BPE tokenizer, then a 16-layer, 128-wide Qwen3 taught the three languages of tasks.py.

    python -m tiny.pretrain                     about an hour on 2 cores; Ctrl-C stops it, the same command goes on
    python -m tiny.pretrain --steps 20 --out runs/toy    a try

Deep and narrow on purpose: a forward of 16 rows then costs little more than one of a single row, as on a large model whose weights are the cost.
The result is an ordinary checkpoint directory. It needs `pip install tokenizers` beside requirements.txt.
"""
import io
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from tqdm import tqdm

from checkpoint import InputError, Parser, command_line
from model import Config
from target import Target
from tiny.tasks import TASKS, examples

HERE = Path(__file__).parent
WEIGHTS = {"arithmetic": 0.5, "code": 0.25, "story": 0.25}
PROMPT_WEIGHT, COPY_WEIGHT, DIGIT_WEIGHT = 0.3, 5.0, 4.0
VOCAB_ROWS, SPECIALS = 2048, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Qwen's own split: words with the sign before them, single digits, punctuation, white space.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def main(argv=None):
    args = parse_args(argv)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        pretrain(args)
    except OSError as error:
        raise InputError(f"{args.out}: not writable ({error.strerror})")


def pretrain(args):
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer(args.out)
    target = Target(Config.from_dict(config_json(tokenizer)))
    initialise(target)
    optimisers = make_optimisers(target, args.lr, args.embedding_lr)
    settings = {name: getattr(args, name) for name in ("seed", "steps", "tokens", "lr", "embedding_lr")}
    state_file = args.out / "state.pt"
    first = restore(state_file, target, optimisers, settings)
    forward = torch.compile(target, dynamic=True) if args.compile else target
    batches, digits = stream(tokenizer, args.seed, args.tokens, first), torch.tensor([tokenizer.token_to_id(d) for d in "0123456789"])
    stopped = watch_signals()
    bar = tqdm(zip(range(first, args.steps), batches), initial=first, total=args.steps, unit="step", mininterval=5)
    for step, batch in bar:
        began = time.perf_counter()
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * schedule(step, args.steps)
        loss = train_step(forward, batch if step < 3 * args.steps // 4 else stress_digits(batch, digits), optimisers)
        bar.set_postfix_str(f"loss {loss:.4f}, {batch[0].numel() / (time.perf_counter() - began):,.0f} tokens/s")
        last = step == args.steps - 1
        if step % 50 == 49 or last or stopped:
            save_state(state_file, target, optimisers, step + 1, settings)
        if stopped and not last:
            bar.close()
            say(f"stopped after step {step + 1} of {args.steps}; the same command goes on from there")
            sys.exit(130)
        if step % 50 == 49 or last:
            say(f"step {step + 1} loss {loss:.4f} held-out {heldout_losses(target, tokenizer)}")
    save_checkpoint(target, tokenizer, args.out)
    say(f"{args.out}: written")


def watch_signals():
    """-> a list that is empty until Ctrl-C or SIGTERM: to be looked at between two steps, since a step is taken whole or not at all."""
    stopped = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))
    return stopped


def say(text):
    tqdm.write(text, file=sys.stderr)


def parse_args(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "target", help="checkpoint directory (default: tiny/target)")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--tokens", type=int, default=6144, help="tokens a step, padding included")
    parser.add_argument("--lr", type=float, default=0.02, help="peak learning rate of Muon, for the matrices")
    parser.add_argument("--embedding-lr", type=float, default=0.004, help="peak learning rate of AdamW, for embedding and norms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile: some 30 %% faster, needs a C++ compiler")
    args = parser.parse_args(argv)
    for name, least in (("steps", 1), ("tokens", 1), ("lr", 1e-9), ("embedding_lr", 1e-9)):
        value = getattr(args, name)
        if not least <= value < 2**31:
            raise InputError(f"--{name.replace('_', '-')} is {value}, but a number from {least:g} up is needed")
    if not -2**63 <= args.seed < 2**63:
        raise InputError(f"--seed is {args.seed}, but it has to fit 64 bits")
    if args.compile and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise InputError("--compile needs a C++ compiler: g++, or the one that CXX names")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer

def make_tokenizer(out):
    """A byte-level BPE trained on generated text, written to tokenizer.json; read back from there when it exists."""
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise InputError("the package tokenizers, which requirements.txt does not list, is needed here: pip install tokenizers")
    file = out / "tokenizer.json"
    if file.exists():
        return read_tokenizer(Tokenizer, file)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    # At most VOCAB_ROWS - 16 entries: the rows behind them stay unused, and the first of them is the drafter's mask.
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_ROWS - 16 - len(SPECIALS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=8,
                                  show_progress=False)
    texts = (text for e in itertools.islice(examples("train", 0), 30000) for text in (e["prompt"], e["response"]))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    write_whole(file, tokenizer.to_str(pretty=True).encode())
    return tokenizer


def read_tokenizer(Tokenizer, file):
    """InputError for a file that is broken, or not one of those that make_tokenizer writes."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:          # the package has no class of its own for it
        raise InputError(f"{file}: not readable as a tokenizer ({error})")
    if tokenizer.token_to_id("<|im_end|>") is None or tokenizer.get_vocab_size() > VOCAB_ROWS - 16:
        raise InputError(f"{file}: has {tokenizer.get_vocab_size()} tokens, but at most {VOCAB_ROWS - 16} are needed, <|im_end|> among them")
    return tokenizer


def config_json(tokenizer):
    eos = tokenizer.token_to_id("<|im_end|>")
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB_ROWS, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False, "attention_dropout": 0.0,
        "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False, "bos_token_id": None, "eos_token_id": eos,
        "initializer_range": 0.02, "torch_dtype": "bfloat16"}


# ---------------------------------------------------------------------------------------------------------------------
# Data

def tokens_of(tokenizer, example):
    """-> ids of one conversation and the length of its prompt."""
    prompt = tokenizer.encode(f"<|im_start|>user\n{example['prompt']}<|im_end|>\n<|im_start|>assistant\n").ids
    return prompt + tokenizer.encode(example["response"] + "<|im_end|>").ids, len(prompt)


def batches_of(tokenizer, stream_of_examples, tokens, count):
    """Batches of about `tokens` tokens, rows of like length together -> list of ids (batch, T), labels (batch, T), weights (batch, T).

    The weights help the model to learn copying, the slowest of its skills: prompt tokens count a little, as names and things come up again and again in
    a prompt, and response tokens that stand in the prompt but in few others (the people, the things, a letter) count COPY_WEIGHT times.
    """
    rows = sorted((tokens_of(tokenizer, e) for e in itertools.islice(stream_of_examples, count)), key=lambda row: len(row[0]))
    in_prompts = Counter(token for row, prompt in rows for token in set(row[:prompt]))
    batches = []
    while rows:
        size = next((n for n in range(len(rows), 0, -1) if n * len(rows[-1][0]) <= tokens), 1)
        batch, rows = rows[-size:], rows[:-size]
        T = -(-len(batch[-1][0]) // 16) * 16
        ids, weights = torch.zeros(size, T, dtype=torch.long), torch.zeros(size, T)
        for i, (row, prompt) in enumerate(batch):
            ids[i, :len(row)] = torch.tensor(row)
            weights[i, :prompt - 1] = PROMPT_WEIGHT
            copied = [token in row[:prompt] and in_prompts[token] < 0.15 * count for token in row[prompt:]]
            weights[i, prompt - 1:len(row) - 1] = torch.where(torch.tensor(copied), COPY_WEIGHT, 1.0)
        batches.append((ids, ids.roll(-1, 1), weights))
    return batches


def stream(tokenizer, seed, tokens, skip):
    """Training batches without end; `skip` of them are passed over, so that a resumed run sees what an unbroken one would."""
    for chunk in itertools.count():
        source = examples("train", f"{seed}.{chunk}", TASKS, [WEIGHTS[t] for t in TASKS])
        batches = batches_of(tokenizer, source, tokens, 640)
        random.Random(f"{seed}.{chunk}").shuffle(batches)
        yield from batches[skip:]
        skip = max(0, skip - len(batches))


# ---------------------------------------------------------------------------------------------------------------------
# Training

def initialise(target):
    for name, p in target.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(p)                      # each layer starts as the identity
        elif p.dim() == 2:
            # Embeddings far apart and of the residual stream's own size: words that come up in the same places must stay tellable, to be copied.
            torch.nn.init.normal_(p, 0, 1.0 if "embed" in name else 0.02 if "lm_head" in name else 0.5 / math.sqrt(p.shape[1]))


def make_optimisers(target, lr, embedding_lr):
    table = dict(target.named_parameters())
    matrices = [p for name, p in table.items() if name.startswith("layers.") and p.dim() == 2]
    others = [p for name, p in table.items() if not (name.startswith("layers.") and p.dim() == 2)]
    optimisers = [torch.optim.Muon(matrices, lr=lr, momentum=0.95, weight_decay=0.1),
                  torch.optim.AdamW(others, lr=embedding_lr, betas=(0.9, 0.95), weight_decay=0.0)]
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["peak"] = group["lr"]
    return optimisers


def schedule(step, steps):
    """The learning rate falls twice: in the first three quarters a short warm-up, a plateau and a straight line to zero; then from 0.4 to zero again."""
    first = 3 * steps // 4
    if step < first:
        return min((step + 1) / 40, 1.0, (first - step) / (0.6 * first))
    return 0.4 * (steps - step) / (steps - first)


def stress_digits(batch, digits):
    """The last quarter is for arithmetic, once copying is learnt: the responses' digits count DIGIT_WEIGHT times."""
    ids, labels, weights = batch
    return ids, labels, torch.where(torch.isin(labels, digits) & (weights == 1), DIGIT_WEIGHT, weights)


def train_step(forward, batch, optimisers):
    ids, labels, weights = batch
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = forward(ids)
    used = weights > 0
    losses = F.cross_entropy(logits[used].float(), labels[used], reduction="none")
    loss = (losses * weights[used]).sum() / weights.sum()
    loss.backward()
    for optimiser in optimisers:
        torch.nn.utils.clip_grad_norm_([p for g in optimiser.param_groups for p in g["params"]], 1.0)
        optimiser.step()
        optimiser.zero_grad()
    return loss.item()


@torch.no_grad()
def heldout_losses(target, tokenizer):
    """Cross-entropy a response token on 24 held-out examples of each task."""
    losses = {}
    for task in TASKS:
        [(ids, labels, weights)] = batches_of(tokenizer, examples("heldout", 0, (task,)), 10**9, 24)
        response = weights >= 1
        losses[task] = round(F.cross_entropy(target(ids)[0][response], labels[response]).item(), 4)
    return losses


# ---------------------------------------------------------------------------------------------------------------------
# Files

def write_whole(file, content):
    """Write bytes aside, have them on the disk, then rename: a kill leaves the last whole file."""
    aside = file.with_name(file.name + ".tmp")
    with open(aside, "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(aside, file)


def save_state(file, target, optimisers, step, settings):
    content = io.BytesIO()
    torch.save({"step": step, "model": target.state_dict(), "optimisers": [o.state_dict() for o in optimisers], "settings": settings}, content)
    write_whole(file, content.getvalue())


def restore(file, target, optimisers, settings):
    """-> the step to go on with; 0 without a saved state. InputError where that is broken or another run's; an old one does not say whose it is."""
    if not file.exists():
        return 0
    try:
        state = torch.load(file)
        saved = state.get("settings", settings)
        others = [name for name in settings if saved[name] != settings[name]]
        if not others:
            target.load_state_dict(state["model"])
            for optimiser, moments in zip(optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(moments)
            return int(state["step"])
    except Exception as error:          # torch has a dozen kinds of them for what is no state of this model
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{file}: not readable as a state of this training ({reason[:200]}); without the file, the training starts anew")
    name = others[0]
    raise InputError(f"{file}: of a run with --{name.replace('_', '-')} {saved[name]}, but now it is {settings[name]}; choose another --out")


def save_checkpoint(target, tokenizer, out):
    """config.json, generation_config.json, tokenizer_config.json and model.safetensors in bf16, beside the tokenizer.json that is there."""
    def write(name, value):
        write_whole(out / name, json.dumps(value, indent=1).encode() + b"\n")

    config = config_json(tokenizer)
    write("config.json", config)
    write("generation_config.json", {"eos_token_id": config["eos_token_id"]})
    write("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                                    "chat_template": TEMPLATE})
    weights = {name if name.startswith("lm_head") else f"model.{name}": p.to(torch.bfloat16) for name, p in target.state_dict().items()}
    write_whole(out / "model.safetensors", save(weights, metadata={"format": "pt"}))


if __name__ == "__main__":
    command_line(main)
