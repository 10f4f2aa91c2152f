"""Train a drafter for a frozen target on the target's own responses (DFlash, arXiv 2602.06036, section 4).

    python train.py --target ID --data responses.jsonl --out DIR       responses come from data.py

One step: the target reads whole conversations and leaves its features; anchors are drawn among the response tokens; from each anchor starts a block
[anchor, MASK * (B - 1)] and all blocks of a sequence are filled in ONE forward over a mask that shows each block just what it will see when it is used:
the features before its anchor, and itself. The loss is cross-entropy, weighted so that early slots count more: a wrong slot makes all behind it worthless.

    S tokens of a sequence    N anchors of a sequence    B block size    Q = N * B rows of all blocks    g = B - 1 drafts
"""
import argparse
import json
import math
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_mask
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import data
from draft import DraftConfig, Drafter, default_target_layer_ids
from model import InputError, Parser
from speculate import Stats, TINY, generate, load, say


# ---------------------------------------------------------------------------------------------------------------------
# Anchors and blocks

def anchor_candidates(ids, prompt_length):
    """Positions that may be anchors: response tokens followed by another one."""
    return range(prompt_length, len(ids) - 1)


def draw_anchors(candidates, N, seed, epoch, sample):
    """min(N, candidates) of them, without replacement, sorted; a function of (seed, epoch, sample) alone, so that a resumed run and every rank agree."""
    return sorted(random.Random(f"{seed} {epoch} {sample}").sample(candidates, min(N, len(candidates))))


@dataclass
class Batch:
    """Conversations padded to S, and N blocks in each. Invalid blocks have anchor 0 and no labels."""
    ids: torch.Tensor         # (batch, S)
    anchors: torch.Tensor     # (batch, N)
    block_ids: torch.Tensor   # (batch, Q)
    positions: torch.Tensor   # (batch, Q)
    labels: torch.Tensor      # (batch, N, g): the token that slot 1 .. g stands for
    valid: torch.Tensor       # (batch, N, g): whether that slot has a loss


def make_batch(rows, anchors, N, B, mask_token_id, multiple=16):
    """rows: conversations with .ids and .prompt_length; anchors: a sorted list for each. Slot k of a block at anchor a stands for token a + k."""
    S = -(-max(len(row.ids) for row in rows) // multiple) * multiple
    ids = torch.zeros(len(rows), S, dtype=torch.long)
    ends = torch.tensor([len(row.ids) for row in rows])                        # responses run to the end of their row
    starts, used = torch.zeros(len(rows), N, dtype=torch.long), torch.zeros(len(rows), N, dtype=torch.bool)
    for i, (row, chosen) in enumerate(zip(rows, anchors)):
        ids[i, :len(row.ids)] = torch.as_tensor(row.ids)
        starts[i, :len(chosen)] = torch.tensor(chosen, dtype=torch.long)
        used[i, :len(chosen)] = True
    positions = starts[..., None] + torch.arange(B)                            # (batch, N, B)
    tokens = ids.gather(1, positions.flatten(1).clamp(max=S - 1)).view_as(positions)
    block_ids = torch.full_like(positions, mask_token_id)
    block_ids[..., 0] = tokens[..., 0]
    valid = used[..., None] & (positions < ends[:, None, None])
    return Batch(ids, starts, block_ids.flatten(1), positions.flatten(1), tokens[..., 1:], valid[..., 1:])


def block_mask(anchors, S, B):
    """Which keys a row of a block sees: of the context, keys 0 .. S - 1, those strictly before its anchor; of the blocks behind, its own.

    (-> mask_mod for torch's flex_attention and create_mask. Rows come in multiples of 128 there, so the block index is clamped.)
    """
    N = anchors.shape[1]

    def mask_mod(b, h, row, key):
        block = row // B
        context = (key < S) & (key < anchors[b, block.clamp(max=N - 1)])
        own = (key >= S) & ((key - S) // B == block)
        return context | own

    return mask_mod


# ---------------------------------------------------------------------------------------------------------------------
# Loss and metrics

def default_gamma(B):
    """The paper's decay for its three block sizes; in between and beyond, half the block."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(B, max(1.0, B / 2))


def slot_weights(kind, gamma, label_probs):
    """Weights of slots 1 .. g, from the probability each gives its label: label_probs (..., g) -> (..., g), no gradient.

    uniform: 1. decay: exp(-(k - 1) / gamma) (paper, section 4). dpace: the gain in expected accepted length (D-PACE, arXiv 2605.18810): with
    probabilities smoothed halfway to 1, w_j = sum over m >= j of the product over i <= m.
    """
    if kind == "uniform":
        return torch.ones_like(label_probs)
    if kind == "decay":
        slots = torch.arange(label_probs.shape[-1], device=label_probs.device)
        return torch.exp(-slots / gamma).expand_as(label_probs)
    reached = (0.5 + 0.5 * label_probs.detach()).cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)


def label_losses(hidden, head_weight, labels, chunk=1024):
    """Cross-entropy of each row, hidden (R, H), labels (R) -> losses (R), and whether the label was the argmax (R).

    The head runs in chunks that are computed again in the backward pass: the logits of all rows are never in memory at once.
    """
    def piece(rows, wanted):
        logits = F.linear(rows, head_weight).float()
        return F.cross_entropy(logits, wanted, reduction="none"), logits.detach().argmax(-1) == wanted

    pieces = [checkpoint(piece, rows, wanted, use_reentrant=False) for rows, wanted in zip(hidden.split(chunk), labels.split(chunk))]
    if not pieces:
        return hidden.sum(-1), torch.zeros(0, dtype=torch.bool, device=hidden.device)
    return torch.cat([loss for loss, _ in pieces]), torch.cat([hit for _, hit in pieces])


def simulated_tau(correct, valid):
    """1 + the mean, over blocks with any label, of the correct prefix's length. correct, valid (batch, N, g)."""
    prefix = (correct & valid).long().cumprod(-1).sum(-1)
    return 1 + prefix[valid.any(-1)].float().mean().nan_to_num(0.0)


def block_loss(target, drafter, batch, kind, gamma):
    """One forward of all blocks -> sum of w * CE (with gradient), sum of w, correct (batch, N, g)."""
    with torch.no_grad():
        _, features = target(batch.ids, taps=drafter.config.target_layer_ids, last_only=True)
        blocks = target.embed(batch.block_ids)
    B, S, Q = drafter.config.block_size, batch.ids.shape[1], batch.block_ids.shape[1]
    mask = create_mask(block_mask(batch.anchors, S, B), len(batch.ids), 1, Q, S + Q, device=batch.ids.device)
    hidden = drafter(blocks, features, batch.positions, mask)
    slots = hidden.unflatten(1, (-1, B))[:, :, 1:]                             # (batch, N, g, H)
    losses, hits = label_losses(slots[batch.valid], target.head_weight, batch.labels[batch.valid])
    probs = torch.ones(batch.valid.shape, device=losses.device)
    probs[batch.valid] = (-losses.detach()).exp()
    weights = slot_weights(kind, gamma, probs)[batch.valid]
    correct = torch.zeros_like(batch.valid)
    correct[batch.valid] = hits
    return (weights * losses).sum(), weights.sum(), correct


# ---------------------------------------------------------------------------------------------------------------------
# Optimiser

def make_optimisers(drafter, kind, lr):
    """adamw: the paper's, on everything. muon: torch.optim.Muon on the matrices, AdamW on the norms."""
    matrices = [p for p in drafter.parameters() if p.dim() == 2]
    norms = [p for p in drafter.parameters() if p.dim() == 1]
    if kind == "adamw":
        optimisers = [torch.optim.AdamW(matrices + norms, lr=lr, weight_decay=0.0)]
    else:
        optimisers = [torch.optim.Muon(matrices, lr=lr, momentum=0.95, weight_decay=0.0), torch.optim.AdamW(norms, lr=lr / 5, weight_decay=0.0)]
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["peak"] = group["lr"]
    return optimisers


def lr_factor(step, steps, warmup=0.04):
    """Linear warm-up over the first 4 %, then a cosine down to zero."""
    ramp = max(1, round(warmup * steps))
    if step < ramp:
        return (step + 1) / ramp
    return 0.5 * (1 + math.cos(math.pi * (step - ramp) / max(1, steps - ramp)))


def optimiser_step(drafter, optimisers, total_weight, factor, clip=1.0):
    """Divide the summed gradients by the step's total weight, clip, step. -> the gradient norm before clipping."""
    for p in drafter.parameters():
        p.grad.div_(max(total_weight, 1e-9))
    norm = torch.nn.utils.clip_grad_norm_(drafter.parameters(), clip).item()
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["peak"] * factor
        optimiser.step()
        optimiser.zero_grad()
    return norm


# ---------------------------------------------------------------------------------------------------------------------
# The loop

def plan(rows, batch_size, seed, epoch):
    """The epoch's batches, each a list of row numbers: shuffled, rows of like length together so that little is padded."""
    order, rng = list(range(len(rows))), random.Random(f"{seed} {epoch}")
    rng.shuffle(order)
    window = 32 * batch_size
    batches = []
    for i in range(0, len(order), window):
        near = sorted(order[i:i + window], key=lambda k: len(rows[k].ids))
        batches += [near[j:j + batch_size] for j in range(0, len(near), batch_size)]
    batches = [b for b in batches if len(b) == batch_size] or batches
    rng.shuffle(batches)
    return batches


def schedule(rows, args, first):
    """-> (step, epoch, row numbers) from step `first` on, epoch after epoch."""
    step, epoch = 0, 0
    while True:
        for batch in plan(rows, args.batch_size, args.seed, epoch):
            if step >= first:
                yield step, epoch, batch
            step += 1
        epoch += 1


def train_step(target, drafter, optimisers, micro_batches, factor, kind, gamma):
    """One optimiser step over several micro-batches -> loss, simulated tau, per-slot accuracy, gradient norm."""
    total_loss = total_weight = 0.0
    corrects, valids = [], []
    for batch in micro_batches:
        loss, weight, correct = block_loss(target, drafter, batch, kind, gamma)
        loss.backward()
        total_loss, total_weight = total_loss + loss.item(), total_weight + weight.item()
        corrects.append(correct.flatten(0, 1))
        valids.append(batch.valid.flatten(0, 1))
    norm = optimiser_step(drafter, optimisers, total_weight, factor)
    correct, valid = torch.cat(corrects), torch.cat(valids)
    accuracy = (correct.sum(0) / valid.sum(0).clamp(min=1)).tolist()
    return total_loss / max(total_weight, 1e-9), simulated_tau(correct, valid).item(), accuracy, norm


def real_tau(target, drafter, tokenizer, prompts, max_new_tokens=256):
    """tau by the real loop, greedy: the mean over responses of each task -> {task: tau}. The truth: its anchors sit right behind rejections."""
    drafter.eval()
    taus = {}
    for task, prompt in prompts:
        stats = Stats()
        ids = tokenizer.chat([{"role": "user", "content": prompt}])
        for cycle in generate(target, drafter, ids, max_new_tokens, target.stop_ids, vocab=tokenizer.size):
            stats.add(cycle)
        if stats.cycles:
            taus.setdefault(task, []).append(stats.tau)
    drafter.train()
    return {task: round(sum(values) / len(values), 3) for task, values in taus.items()}


def read_prompts(path, each):
    """The first `each` prompts of every task of a JSONL file -> [(task, prompt)]."""
    found = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.setdefault(row.get("task", "prompts"), []).append(row["prompt"])
    return [(task, prompt) for task, prompts in found.items() for prompt in prompts[:each]]


def save_state(path, step, drafter, optimisers, settings):
    """All that a resumed run needs, in one file, written aside, synced and renamed: a kill leaves the last whole one."""
    aside = path.with_suffix(".tmp")
    with open(aside, "wb") as file:
        torch.save({"step": step, "drafter": drafter.state_dict(), "optimisers": [o.state_dict() for o in optimisers], "settings": settings}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def new_drafter(target, args, tokenizer):
    """A drafter of the target's own width, heads, rope and eps, with fresh weights."""
    L = target.config.num_hidden_layers
    layer = replace(target.config, model_type="qwen3", num_hidden_layers=args.layers, qkv_bias=False, o_bias=False, qk_norm=True,
                    tie_word_embeddings=False)
    mask = args.mask_token_id if args.mask_token_id is not None else tokenizer.size
    if mask >= target.config.vocab_size:
        raise InputError(f"the target's embedding has no unused row behind its {tokenizer.size} tokens: name a reserved special token with --mask-token-id")
    config = DraftConfig(layer, args.block_size, mask, tuple(args.taps or default_target_layer_ids(L)), L)
    DraftConfig.from_dict(config.to_dict(), "the options")                     # the same checks that a loaded one passes
    torch.manual_seed(args.seed)
    drafter = Drafter(config).initialise()
    drafter.name = "being trained"
    drafter.check_fits(target, target.stop_ids)
    return drafter.train()


def train(args):
    target, _, tokenizer = load(args.target, None, args.device, torch.float32)
    rows = data.rows(args.data, target.config.vocab_size, args.max_length, target.name)
    drafter = new_drafter(target, args, tokenizer).to(target.device)
    optimisers = make_optimisers(drafter, args.optimizer, args.lr)
    gamma, B = args.gamma or default_gamma(args.block_size), args.block_size
    prompts = read_prompts(args.eval_prompts, args.eval_each)
    args.out.mkdir(parents=True, exist_ok=True)
    state_file, settings = args.out / "state.pt", {k: str(v) for k, v in vars(args).items() if k != "out"}
    first = 0
    if state_file.exists():
        state = torch.load(state_file, map_location=target.device)
        if state["settings"] != settings:
            raise InputError(f"{state_file} holds another run: {[k for k in settings if settings[k] != state['settings'].get(k)]} differ")
        first = state["step"]
        drafter.load_state_dict(state["drafter"])
        for optimiser, saved in zip(optimisers, state["optimisers"]):
            optimiser.load_state_dict(saved)
    say(f"{len(rows)} conversations, {args.batch_size * args.accumulate} a step, {args.steps} steps; {sum(p.numel() for p in drafter.parameters()) / 1e6:.2f}M parameters, "
        f"{args.optimizer} at lr {args.lr:g}, loss {args.loss}, gamma {gamma:g}")

    def build(numbers, epoch):
        chosen = [rows[k] for k in numbers]
        anchors = [draw_anchors(anchor_candidates(r.ids, r.prompt_length), args.anchors, args.seed, epoch, k) for r, k in zip(chosen, numbers)]
        return make_batch(chosen, anchors, args.anchors, B, drafter.config.mask_token_id)

    wanted = {"stop": False}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: wanted.update(stop=True))
    log = open(args.out / "log.jsonl", "a")
    bar = tqdm(total=args.steps, initial=first, unit="step", mininterval=2)
    batches, began = schedule(rows, args, first * args.accumulate), time.time()
    step = first
    while step < args.steps and not wanted["stop"]:
        tick = time.time()
        micro = [build(numbers, epoch) for _, epoch, numbers in (next(batches) for _ in range(args.accumulate))]
        factor = lr_factor(step, args.steps)
        loss, sim, accuracy, norm = train_step(target, drafter, optimisers, micro, factor, args.loss, gamma)
        step += 1
        seen = sum(b.ids.numel() for b in micro) / (time.time() - tick)
        record = {"step": step, "loss": round(loss, 4), "simulated_tau": round(sim, 3), "lr": factor * args.lr, "grad_norm": round(norm, 4),
                  "tokens_per_second": round(seen), "seconds": round(time.time() - began, 1), "accuracy": [round(a, 3) for a in accuracy]}
        if step % args.eval_every == 0 or step == args.steps:
            record["tau"] = real_tau(target, drafter, tokenizer, prompts)
            save_state(state_file, step, drafter, optimisers, settings)
            tqdm.write(f"step {step}: loss {loss:.3f}, simulated tau {sim:.2f}, real tau {record['tau']}", file=sys.stderr)
        log.write(json.dumps(record) + "\n")
        log.flush()
        bar.update()
        bar.set_postfix_str(f"loss {loss:.3f} tau~{sim:.2f} {seen:,.0f} tok/s")
    bar.close()
    save_state(state_file, step, drafter, optimisers, settings)
    if step < args.steps:
        say(f"stopped at step {step} of {args.steps}; the same command goes on from there")
        sys.exit(130)
    drafter.save(args.out)
    say(f"{args.out}: drafter written")


def parse_args(argv=None):
    parser = Parser(description="Train a drafter on a target's own responses.")
    model = parser.add_argument_group("model")
    model.add_argument("--target", default=str(TINY / "target"), help="checkpoint directory or hub id (default: the embedded target)")
    model.add_argument("--layers", type=int, default=5)
    model.add_argument("--taps", type=int, nargs="+", help="target layers to tap (default: five, spread as the released drafters')")
    model.add_argument("--block-size", type=int, default=16)
    model.add_argument("--mask-token-id", type=int, help="default: the first embedding row behind the tokenizer's ids")
    group = parser.add_argument_group("data")
    group.add_argument("--data", type=Path, required=True, help="responses that data.py wrote")
    group.add_argument("--max-length", type=int, default=3072)
    group.add_argument("--anchors", type=int, default=512, help="blocks of a sequence in a step")
    group.add_argument("--eval-prompts", type=Path, default=TINY / "heldout.jsonl")
    group.add_argument("--eval-each", type=int, default=8, help="held-out prompts of each task for the real tau")
    loss = parser.add_argument_group("loss")
    loss.add_argument("--loss", choices=["decay", "uniform", "dpace"], default="decay")
    loss.add_argument("--gamma", type=float, help="default: 7, 5, 4 for block sizes 16, 10, 8, else half the block")
    optimiser = parser.add_argument_group("optimiser")
    optimiser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    optimiser.add_argument("--lr", type=float, help="default: 6e-4 for adamw, 0.02 for muon")
    run = parser.add_argument_group("run")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--steps", type=int, default=1000)
    run.add_argument("--batch-size", type=int, default=32)
    run.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    run.add_argument("--eval-every", type=int, default=100)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--device")
    args = parser.parse_args(argv)
    if args.lr is None:
        args.lr = {"adamw": 6e-4, "muon": 0.02}[args.optimizer]
    least = {"layers": 1, "block_size": 2, "max_length": 2, "anchors": 1, "eval_each": 0, "steps": 1, "batch_size": 1, "accumulate": 1, "eval_every": 1,
             "lr": 1e-9, "gamma": 1e-9}
    for name, bound in least.items():
        value = getattr(args, name)
        if value is not None and not bound <= value < 2**31:
            raise InputError(f"--{name.replace('_', '-')} is {value}, but {bound:g} or more is needed")
    return args


if __name__ == "__main__":
    try:
        train(parse_args())
    except InputError as error:
        say(f"error: {error}")
        sys.exit(2)
