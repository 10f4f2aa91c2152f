"""A training run: its options, its directory, its log and figures, stopping and going on. What it trains, and how, is in train.py, which calls `main`.

    DIR/model.safetensors, config.json    the drafter, in the released layout
    DIR/state.pt                          all that --resume needs
    DIR/log.jsonl, figure.png, run.json   a record each step; loss, tau and accuracy drawn; command, versions and options
"""
import argparse
import contextlib
import hashlib
import json
import os
import platform
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import data
from checkpoint import InputError, Parser, command_line
from draft import DraftConfig, Drafter, default_target_layer_ids
from sets import read_prompts, user
from speculate import TINY, load, say
from train import default_gamma, fit, groups_of_blocks, make_optimisers, ranks, real_tau, total, visible


# ---------------------------------------------------------------------------------------------------------------------
# What a run needs

def eval_prompts(args, target, tokenizer, rows):
    """What tau is measured on: the first eval_each prompts of every task in --eval-prompts, or without it those of the last eval_each rows, a tenth of all
    at most -> [(task, ids)], and the rows that are left to train on."""
    limit, answer = target.config.max_position_embeddings, 256                 # tokens, as train.real_tau has it
    if args.eval_prompts is None:
        each = min(args.eval_each, len(rows) // 10)
        rows, held = rows[:len(rows) - each], rows[len(rows) - each:]
        return [(row.task or "held out", row.ids[:row.prompt_length].tolist()) for row in held if row.prompt_length + answer <= limit], rows
    found = []
    for task, prompts in read_prompts(args.eval_prompts).items():
        for number, history, texts in prompts[:args.eval_each]:
            found.append((task, tokenizer.chat([*history, user(texts[0])])))
            if (length := len(found[-1][1])) + answer > limit:
                raise InputError(f"{args.eval_prompts}, line {number}: {length} tokens, and {answer} of an answer, do not fit the target's {limit}")
    return found, rows


def new_drafter(target, args, tokenizer):
    """A drafter with fresh weights, of the target's own width, heads, rope and eps; or, with --init, one that is there."""
    if args.init is not None:
        drafter = Drafter.load(args.init, target.device)
        for name, has in (("layers", drafter.config.layer.num_hidden_layers), ("taps", list(drafter.config.target_layer_ids)),
                          ("block_size", drafter.config.block_size), ("mask_token_id", drafter.config.mask_token_id)):
            if getattr(args, name) not in (None, has):
                raise InputError(f"--{name.replace('_', '-')} is {getattr(args, name)}, but the drafter of --init has {has}")
        return drafter
    L = target.config.num_hidden_layers
    layer = replace(target.config, model_type="qwen3", num_hidden_layers=args.layers or 5, qkv_bias=False, o_bias=False, qk_norm=True,
                    tie_word_embeddings=False)
    mask = tokenizer.size if args.mask_token_id is None else args.mask_token_id
    if mask >= target.config.vocab_size:
        raise InputError(f"--mask-token-id: the target's embedding has no unused row behind its {tokenizer.size} tokens; name a reserved special token")
    config = DraftConfig(layer, args.block_size or 16, mask, tuple(args.taps or default_target_layer_ids(L)), L)
    DraftConfig.from_dict(config.to_dict(), "the options")                     # the same checks that a loaded one passes
    torch.manual_seed(args.seed)
    return Drafter(config).initialise().to(target.device)


def ready(drafter, target, longest):
    """Check a drafter, wherever it comes from, and make it one to train, on conversations of up to `longest` tokens."""
    drafter.name = "being trained"
    drafter.check_fits(target, target.stop_ids)
    B, limit = drafter.config.block_size, target.config.max_position_embeddings
    if not 2 <= B <= limit:
        raise InputError(f"block_size is {B}, but a block needs an anchor and a draft, and room in the target's {limit} positions")
    drafter.config = replace(drafter.config, training_length=max(longest, drafter.config.training_length or 0))
    return drafter.requires_grad_().train()


def memory_needed(target, drafter, args, S):
    """Bytes of a training step, an estimate: 16 per drafter parameter (fp32 weights, gradients, AdamW's two moments), the frozen target, and what the
    forward keeps for the backward pass of a micro-batch of S tokens with N anchors each."""
    c, n, itemsize = drafter.config.layer, len(drafter.config.target_layer_ids), 4 if target.device.type == "cpu" else 2
    heads, kv, B = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, drafter.config.block_size
    Q, groups = args.anchors * B, 1 if target.device.type == "cuda" else groups_of_blocks(args.anchors, S, B)
    row = 6 * c.hidden_size + 5 * heads + 8 * kv + 4 * c.intermediate_size     # of a block's row in one layer
    context = (n + 2) * c.hidden_size + c.num_hidden_layers * (6 + 2 * groups) * kv      # of a token of the context
    kept = args.batch_size * itemsize * (Q * c.num_hidden_layers * row + S * context)
    dense = 0 if target.device.type == "cuda" else args.batch_size * Q * (S + Q // groups) * 5      # the mask, as bool and added to scores
    head = 7 * 4 * (2**27 if target.device.type == "cuda" else 9 * 10**6)
    return 16 * sum(p.numel() for p in drafter.parameters()) + sum(p.nbytes for p in target.parameters()) + kept + dense + head


def check_memory(target, drafter, args, S):
    """InputError when a step is sure not to fit. -> bytes needed"""
    needed = memory_needed(target, drafter, args, S)
    there = torch.cuda.mem_get_info(target.device)[1] if target.device.type == "cuda" else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise InputError(f"a step needs about {needed / 1e9:.1f} GB, {target.device} has {there / 1e9:.1f}: "
                         "a smaller --batch-size (with --accumulate), --anchors or --max-length helps")
    return needed


# ---------------------------------------------------------------------------------------------------------------------
# The directory

def save_state(path, step, drafter, optimisers, settings):
    """All that a resumed run needs, in one file, written aside, synced and renamed: a kill leaves the last whole one."""
    aside, state = path.with_suffix(".tmp"), {"step": step, "config": drafter.config.to_dict(), "drafter": drafter.state_dict(),
                                              "optimisers": [o.state_dict() for o in optimisers], "settings": settings}
    try:
        with open(aside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        aside.unlink(missing_ok=True)
        raise error.__context__ if isinstance(error.__context__, OSError) else error      # torch wraps what the disk says
    os.replace(aside, path)


def load_state(directory):
    """The state that a run left in its directory."""
    try:
        state = torch.load(directory / "state.pt", map_location="cpu")
        if not isinstance(state, dict) or state.keys() != {"step", "config", "drafter", "optimisers", "settings"}:
            raise ValueError("not a state of train.py")
        return state
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{directory}: no state.pt, so no run to go on with")
    except Exception as error:                             # torch has many words for a file that is none of its own
        why = str(error).split(". ")[0].splitlines()[0]    # its first sentence
        raise InputError(f"{directory / 'state.pt'}: not readable ({why})")


def read_log(path):
    """log.jsonl -> list of records; a last line that a kill cut off is passed over."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and "step" in record]


def open_log(path, records):
    """The log with these records, open for more."""
    write_aside(path, "".join(json.dumps(record) + "\n" for record in records))
    return open(path, "a", encoding="utf-8")


def write_aside(path, text):
    path.with_suffix(".tmp").write_text(text, encoding="utf-8")
    os.replace(path.with_suffix(".tmp"), path)


def check_out(directory):
    if directory.exists() and not directory.is_dir():
        raise InputError(f"--out {directory}: not a directory")
    if directory.exists() and any(directory.iterdir()):
        raise InputError(f"{directory} is not empty: --resume goes on with a run that it holds, or name another --out")


# ---------------------------------------------------------------------------------------------------------------------
# The run

def prepare(args, state):
    """Load and check everything -> target, drafter, tokenizer, rows, held-out prompts, settings. Nothing is written yet."""
    target, _, tokenizer = load(args.target, None, args.device)
    prompts, rows = eval_prompts(args, target, tokenizer, data.rows(args.data, target.config.vocab_size, args.max_length, target.name))
    longest = max(len(row.ids) for row in rows)
    if state:
        drafter = Drafter(DraftConfig.from_dict(state["config"], args.out / "state.pt")).to(target.device)
        drafter.load_state_dict(state["drafter"])
    else:
        drafter = new_drafter(target, args, tokenizer)
    c = ready(drafter, target, longest).config
    if any(c.mask_token_id in row.ids for row in rows):
        raise InputError(f"{args.data}: the mask id, {c.mask_token_id}, occurs in it; name another with --mask-token-id")
    (_, world), batches = ranks(), max(1, len(rows) // args.batch_size)
    args.gamma = args.gamma or default_gamma(c.block_size)                     # decay's; the other losses have none
    args.steps = args.steps or max(1, args.epochs * batches // (args.accumulate * world))
    needed = check_memory(target, drafter, args, longest)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in ("out", "resume", "show_mask")}
    settings |= {"world": world, "data_sha256": hashlib.sha256(Path(args.data).read_bytes()).hexdigest(),
                 "eval_prompts_sha256": hashlib.sha256(repr(prompts).encode()).hexdigest()}
    if state and settings != state["settings"]:
        changed = ", ".join(sorted(name for name in settings | state["settings"] if settings.get(name) != state["settings"].get(name)))
        raise InputError(f"{args.out}: no longer the run that it holds: {changed} changed")
    each, parameters = args.batch_size * args.accumulate * world, sum(p.numel() for p in drafter.parameters())
    inform(f"{len(rows):,} conversations, {each} a step, {args.steps:,} steps, {args.steps * each / len(rows):.1f} epochs; a drafter of "
           f"{parameters / 1e6:.2f}M parameters, blocks of {c.block_size}, taps {list(c.target_layer_ids)}, mask id {c.mask_token_id}")
    loss = f"{args.loss}, gamma {args.gamma:g}" if args.loss == "decay" else args.loss
    inform(f"{args.optimizer} at lr {args.lr:g}, loss {loss}, about {needed / 1e9:.1f} GB on {target.device.type}; {args.out}")
    return target, drafter, tokenizer, rows, prompts, settings


def run(args, state=None):
    """One whole run: fit, measure, log, save. -> whether it came to its end; Ctrl-C and SIGTERM end it after the step under way."""
    rank, stopping = ranks()[0], []                        # a signal puts its number there, and so makes it true
    target, drafter, tokenizer, rows, prompts, settings = prepare(args, state)
    optimisers, step = make_optimisers(drafter, args.optimizer, args.lr), 0
    if state:
        step = state["step"]
        for optimiser, saved in zip(optimisers, state["optimisers"]):
            optimiser.load_state_dict(saved)
    elif rank == 0:
        check_out(args.out)
        args.out.mkdir(parents=True, exist_ok=True)
        versions = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.platform(), "device": str(target.device)}
        write_aside(args.out / "run.json", json.dumps({"command": shlex.join(sys.argv), "versions": versions, "settings": settings}, indent=1) + "\n")
        save_state(args.out / "state.pt", step, drafter, optimisers, settings)      # from here on, whatever happens, --resume goes on
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os._exit(130) if stopping else stopping.append(number))       # the second time at once

    def due(step):
        return step % args.eval_every == 0 or step == args.steps

    def measure(record):
        """Put the real tau into a record, unless a signal comes meanwhile: then it would be of some prompts only."""
        taus = real_tau(target, drafter, prompts, tokenizer.size, stop=stopping)
        if not stopping:
            record["tau"] = taus
            tqdm.write(f"step {record['step']}: loss {record['loss']:.3f}, simulated tau {record['simulated_tau']:.2f}, real tau {taus}", file=sys.stderr)

    record = {}
    if rank == 0:
        records = [r for r in read_log(args.out / "log.jsonl") if r["step"] <= step]      # a killed run may have logged later ones than its state has
        record = records[-1] if records else {}
        if record and due(step) and "tau" not in record:   # a signal came in the middle of this measurement
            measure(record)
        log = open_log(args.out / "log.jsonl", records)
    with tqdm(total=args.steps, initial=step, unit="step", mininterval=2, disable=rank > 0) as bar:
        for record in fit(target, drafter, optimisers, rows, args, step):
            step = record["step"]
            bar.set_postfix_str(f"loss {record['loss']:.3f}, simulated tau {record['simulated_tau']:.2f}, "
                                f"{record['tokens'] / record['seconds']:,.0f} tokens/s", refresh=False)
            bar.update()
            stop = total(torch.tensor(float(bool(stopping)), device=target.device)).item() > 0               # all ranks together
            if rank == 0:
                if due(step) and not stop:
                    measure(record)
                log.write(json.dumps(record) + "\n")
                log.flush()
                if due(step) or stop or stopping:
                    save_state(args.out / "state.pt", step, drafter, optimisers, settings)
                    drafter.save(args.out)
            if stop:
                break
    if rank == 0:
        draw_log(args.out)
        ended, out = step == args.steps and not stopping, shlex.quote(str(args.out))
        if not ended:
            say(f"stopped after step {step} of {args.steps}; python train.py --resume {out} goes on")
        target_option = "" if args.target == str(TINY / "target") else f"--target {shlex.quote(args.target)} "
        say(f"{args.out}: the drafter so far, log.jsonl and figure.png; try python speculate.py {target_option}--draft {out} --prompt ...")
        if ended and not target_option and record.get("tau") and (TINY / "drafter" / "config.json").exists():
            shipped = real_tau(target, Drafter.load(TINY / "drafter"), prompts, tokenizer.size, stop=stopping)
            for task, tau in record["tau"].items() if not stopping else ():
                say(f"tau on held-out prompts, {task}: {tau:.2f}, the shipped drafter's {shipped[task]:.2f} ({tau / shipped[task]:.0%})")
    return step == args.steps and not stopping


def inform(text):
    """Say it once, whatever the number of ranks."""
    if ranks()[0] == 0:
        say(text)


# ---------------------------------------------------------------------------------------------------------------------
# Figures

def draw_log(directory):
    """figure.png: loss, tau and accuracy by slot, from log.jsonl."""
    from matplotlib.figure import Figure
    records = read_log(directory / "log.jsonl")
    if not records:
        return
    figure = Figure(figsize=(13, 4), layout="constrained")
    loss, tau, slots = figure.subplots(1, 3)
    steps = [r["step"] for r in records]
    loss.plot(steps, [r["loss"] for r in records], lw=0.8)
    loss.set(title="loss", xlabel="step", yscale="log")
    tau.plot(steps, [r["simulated_tau"] for r in records], lw=0.8, color="0.7", label="simulated, in training")
    measured = [r for r in records if r.get("tau")]
    for task in measured[-1]["tau"] if measured else ():
        points = [(r["step"], r["tau"][task]) for r in measured if task in r["tau"]]
        tau.plot(*zip(*points), "o-", label=f"real loop, {task}".replace("$", r"\$"))
    tau.set(title="tau", xlabel="step")
    tau.legend()
    for share in (0.25, 0.5, 1.0):
        r = records[max(0, round(share * len(records)) - 1)]
        slots.plot(range(1, len(r["accuracy"]) + 1), r["accuracy"], ".-", label=f"step {r['step']}")
    slots.set(title="share of drafts that are right", xlabel="slot", xticks=range(1, len(records[-1]["accuracy"]) + 1, 2), ylim=(0, 1))
    slots.legend()
    save_figure(figure, directory / "figure.png")


def save_figure(figure, path):
    if path.exists() and not path.is_file() or not path.name:
        raise InputError(f"{path}: not a file to write a picture to")
    aside = path.with_name(path.name + ".tmp")
    try:
        figure.savefig(aside, format="png", dpi=110)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror})")
    os.replace(aside, path)


def draw_mask(path, anchors=(2, 4, 9), S=12, B=4):
    """A picture of `visible`: rows are the blocks' slots, columns the context's tokens and then the blocks' slots; an anchor's own token is marked."""
    from matplotlib.figure import Figure
    mask = visible(torch.tensor([anchors]), S, B)[0, 0]
    Q = len(mask)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.imshow(mask.numpy(), cmap="Blues", vmin=0, vmax=1.4)
    axes.plot([a for a in anchors for _ in range(B)], range(Q), "rx", ms=5, label="the block's anchor: from here on, its context is hidden")
    axes.set_xticks(range(S + Q), [*range(S), *(f"{a}+{k}" if k else f"{a}" for a in anchors for k in range(B))], rotation=90, fontsize=8)
    axes.set_yticks(range(Q), [f"block {j}, slot {k}: {'MASK' if k else f'token {a}'}" for j, a in enumerate(anchors) for k in range(B)], fontsize=8)
    for edge in range(B, Q, B):
        axes.axhline(edge - 0.5, color="0.6", lw=0.8)
    axes.axvline(S - 0.5, color="k", lw=2)
    axes.set(title=f"context: features of tokens 0 to {S - 1}   |   keys of the blocks themselves, at their positions", ylabel="queries")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False)
    save_figure(figure, path)


# ---------------------------------------------------------------------------------------------------------------------
# Command line

# What stands where the user says nothing: the paper's numbers, and for the embedded target those that won on it (python -m paper.ablations).
PAPER = {"layers": 5, "anchors": 512, "max_length": 3072, "loss": "decay", "optimizer": "adamw", "epochs": 6, "batch_size": 2, "accumulate": 16, "eval_every": 200}
EMBEDDED = PAPER | {"layers": 3, "anchors": 24, "loss": "dpace", "optimizer": "muon", "epochs": None, "steps": 1800, "batch_size": 8, "accumulate": 1,
                    "eval_every": 600}
LR = {"adamw": 6e-4, "muon": 0.02}


def parse_args(argv=None):
    parser = Parser(description="Train a drafter on a target's own responses. Without arguments: one for the embedded target, in twelve minutes on two cores.")
    model = parser.add_argument_group("model")
    model.add_argument("--target", help="checkpoint directory or hub id (default: the embedded target)")
    model.add_argument("--init", help="start from this drafter, a directory or hub id")
    model.add_argument("--layers", type=int, help="default: 5; for the embedded target 3")
    model.add_argument("--taps", type=int, nargs="+", help="target layers to tap (default: five, spread as the released drafters')")
    model.add_argument("--block-size", type=int, help="default: 16")
    model.add_argument("--mask-token-id", type=int, help="default: the first embedding row behind the tokenizer's ids")
    group = parser.add_argument_group("data")
    group.add_argument("--data", type=Path, help="responses that data.py wrote (default, for the embedded target alone: made now, from tiny/train.jsonl)")
    group.add_argument("--max-length", type=int, help="tokens of a conversation, longer ones are cut (default: 3072)")
    group.add_argument("--anchors", type=int, help="blocks of a sequence in a step (default: 512; for the embedded target 24)")
    group.add_argument("--eval-prompts", type=Path, help="a file of prompts for the real tau (default: those of the last rows of --data, which are then not "
                       "trained on; for the embedded target tiny/heldout.jsonl)")
    group.add_argument("--eval-each", type=int, default=8, help="how many of each task, or of the last rows (default: 8)")
    loss = parser.add_argument_group("loss")
    loss.add_argument("--loss", choices=["decay", "uniform", "dpace"], help="default: decay; for the embedded target dpace")
    loss.add_argument("--gamma", type=float, help="of decay (default: 7, 5, 4 for block sizes 16, 10, 8, else half the block)")
    optimiser = parser.add_argument_group("optimiser")
    optimiser.add_argument("--optimizer", choices=["adamw", "muon"], help="default: adamw; for the embedded target muon, on the matrices")
    optimiser.add_argument("--lr", type=float, help="peak (default: 6e-4 for adamw, 0.02 for muon)")
    run = parser.add_argument_group("run")
    run.add_argument("--out", type=Path, help="new directory (default: runs/DATE-TIME)")
    run.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in DIR, with its own options")
    run.add_argument("--epochs", type=int, help="default: 6; for the embedded target steps, in place of them")
    run.add_argument("--steps", type=int, help="in place of epochs (default for the embedded target: 1800)")
    run.add_argument("--batch-size", type=int, help="conversations in a micro-batch, on each rank (default: 2; for the embedded target 8)")
    run.add_argument("--accumulate", type=int, help="micro-batches a step (default: 16; for the embedded target 1)")
    run.add_argument("--eval-every", type=int, help="steps between measurements of tau, each with a save (default: 200; for the embedded target 600)")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--device", help="cpu, cuda, mps (default: cuda if there, mps for targets over 100M parameters, else cpu)")
    run.add_argument("--compile", action="store_true", help="torch.compile the drafter")
    parser.add_argument("--show-mask", type=Path, metavar="FILE.png", help="draw the block mask of a small example, and leave")
    args = parser.parse_args(argv)
    alone = [name for name in ("resume", "show_mask") if getattr(args, name) is not None]
    if alone and any(value != parser.get_default(name) for name, value in vars(args).items() if name != alone[0]):
        raise InputError(f"--{alone[0].replace('_', '-')} stands alone: the run's other options are those that it was begun with")
    return args


def fill_in(args):
    """Put the defaults where nothing was said, and check the numbers."""
    if args.data is None and args.target is not None:
        raise InputError("--target needs --data: its own responses, which data.py regenerate makes")
    if args.steps and args.epochs:
        raise InputError("--steps and --epochs: one of the two")
    defaults = EMBEDDED | {"eval_prompts": TINY / "heldout.jsonl"} if args.target is None else PAPER
    for name, value in defaults.items():
        said = args.epochs or args.steps if name in ("epochs", "steps") else args.init if name == "layers" else None
        if getattr(args, name) is None and said is None:
            setattr(args, name, value)
    if args.gamma is not None and args.loss != "decay":
        raise InputError(f"--gamma is of --loss decay, and changes nothing with {args.loss}")
    args.target = str(TINY / "target") if args.target is None else args.target
    args.lr = LR[args.optimizer] if args.lr is None else args.lr
    args.out = args.out or Path("runs", time.strftime("%Y%m%d-%H%M%S"))
    least = {"layers": 1, "block_size": 2, "max_length": 2, "anchors": 1, "eval_each": 0, "epochs": 1, "steps": 1, "batch_size": 1, "accumulate": 1,
             "eval_every": 1, "lr": 1e-9, "gamma": 1e-9, "seed": -2**63}
    for name, bound in least.items():
        value = getattr(args, name)
        most = 1000 if name == "layers" else 2**31 - 1
        if value is not None and not bound <= value <= most:
            raise InputError(f"--{name.replace('_', '-')} is {value}, but a number from {bound:g} to {most} is needed")
    return args


def own_responses(device="cpu"):
    """The embedded target's answers to tiny/train.jsonl: made once for these very weights, kept in runs/. `device`: where ranks wait for each other."""
    weights = hashlib.sha256((TINY / "target" / "model.safetensors").read_bytes()).hexdigest()
    path = Path("runs", f"tiny-responses-{weights[:8]}.jsonl")
    if ranks()[0] == 0:
        path.parent.mkdir(exist_ok=True)
        say(f"{path}: the target's own responses; those that are not there yet are made now, all of them in two or three minutes")
        if data.main(["regenerate", "--prompts", str(TINY / "train.jsonl"), "--out", str(path), "--batch-size", "256", "--max-new-tokens", "320"]):
            raise KeyboardInterrupt
    total(torch.zeros(1, device=device))                   # the other ranks wait here
    return path


def start(argv=None):
    """The command -> its exit code."""
    args, state = parse_args(argv), None
    if args.show_mask:
        draw_mask(args.show_mask)
        say(f"{args.show_mask} is written")
        return 0
    if args.resume:
        state = load_state(args.resume)
        own = {name: value for name, value in state["settings"].items() if name in vars(args)}
        args = argparse.Namespace(**vars(args) | own | {"out": args.resume})
    else:
        args = fill_in(args)
        check_out(args.out)
    if ranks()[1] > 1:
        cuda = torch.cuda.is_available() and args.device != "cpu"
        dist.init_process_group("nccl" if cuda else "gloo")
        if cuda:
            args.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(args.device)
    args.data = args.data or own_responses(args.device or "cpu")
    ended = run(args, state)
    if ranks()[1] > 1:
        dist.destroy_process_group()                       # else its threads may end the process by an abort
    return 0 if ended else 130


def main():
    command_line(start)
