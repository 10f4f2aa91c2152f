"""Train a drafter for a frozen target on the target's own responses (DFlash, arXiv 2602.06036, section 4).

    python train.py                                                  the embedded target, twelve minutes on two cores
    python train.py --target ID --data responses.jsonl --out DIR     responses come from data.py; the paper's recipe
    torchrun --nproc_per_node=N train.py ...                         on several GPUs

One step: the target reads whole conversations and leaves its features; anchors are drawn among the response tokens; from each anchor starts a block
[anchor, MASK * (B - 1)] and all blocks of a sequence are filled in ONE forward over a mask that shows each block just what it will see when it is used:
the features before its anchor, and itself. The loss is cross-entropy, weighted so that early slots count more: a wrong slot makes all behind it worthless.

    S tokens of a sequence    N anchors of a sequence    B block size    Q = N * B rows of all blocks    g = B - 1 drafts
"""
import contextlib
import copy
import functools
import itertools
import math
import os
import random
import time
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from checkpoint import InputError
from speculate import Stats, generate


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

    def to(self, device):
        return Batch(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))


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


def visible(anchors, S, B):
    """The step's mask: on CUDA FlexAttention's BlockMask, which skips what no block sees; elsewhere the same rule, dense, (batch, 1, Q, S + Q) bool."""
    (batch, N), mask_mod = anchors.shape, block_mask(anchors, S, B)
    if anchors.is_cuda:
        return compiled_block_mask()(mask_mod, batch, None, N * B, S + N * B, device=anchors.device)
    return create_mask(mask_mod, batch, 1, N * B, S + N * B, device=anchors.device)


def groups_of_blocks(N, S, B):
    """Into how many equal groups a sequence's N blocks are split where the mask is dense, each then a row of the batch.

    Small groups save a block's scores against the blocks of others, all hidden from it (FlexAttention skips them by itself); but each needs a copy of the
    context's keys and values. So, of N's divisors, the one that brings a group's rows nearest to half the S tokens: of a prime N, mostly one group.
    """
    divisors = [n for i in range(1, math.isqrt(N) + 1) if N % i == 0 for n in (i, N // i)]
    return N // min(divisors, key=lambda blocks: abs(math.log(2 * blocks * B / S)))


@functools.cache
def compiled_block_mask():
    """Uncompiled, create_block_mask makes the dense mask first: gigabytes."""
    return torch.compile(create_block_mask, fullgraph=True, dynamic=False)


# ---------------------------------------------------------------------------------------------------------------------
# Loss and metrics

def default_gamma(B):
    """The paper's decay for its three block sizes; in between and beyond, half the block."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(B, max(1.0, B / 2))


def slot_weights(kind, gamma, label_probs, valid):
    """Weights of slots 1 .. g, from the probability each gives its label: label_probs, valid (..., g) -> (..., g), no gradient.

    uniform: 1. decay: exp(-(k - 1) / gamma) (paper, section 4). dpace: what slot j is worth in expected accepted length (D-PACE, arXiv 2605.18810).
    That length is the sum over m of the product of q_i, i <= m, the chance that slot m is reached and right; those terms that hold q_j are its derivative
    by log q_j: w_j = the sum over m >= j. The q are first smoothed halfway to 1, so that one slot that is still all wrong does not silence those behind it.
    """
    if kind == "uniform":
        return torch.ones_like(label_probs)
    if kind == "decay":
        slots = torch.arange(label_probs.shape[-1], device=label_probs.device)
        return torch.exp(-slots / gamma).expand_as(label_probs)
    right = (valid * (0.5 + 0.5 * label_probs.detach())).cumprod(-1)           # no slot behind the response's end is ever right
    return right.flip(-1).cumsum(-1).flip(-1)


def label_losses(hidden, head_weight, labels, chunk=None):
    """Cross-entropy of each row, hidden (R, H), labels (R) -> losses (R), and whether the label was the argmax (R).

    The head runs in chunks of rows that are computed again in the backward pass: the logits of all rows are never in memory at once. By default a chunk
    has 9 million logits, on CUDA 128 million: 36 and 512 MB in fp32, of which the backward pass takes some seven.
    """
    # Not less: pieces below 32 MB glibc's malloc takes from its heap, where they leave holes, and memory grew sevenfold.
    chunk = chunk or max(1, (2**27 if hidden.is_cuda else 9 * 10**6) // len(head_weight))

    def piece(rows, wanted):
        logits = F.linear(rows, head_weight).float()
        return F.cross_entropy(logits, wanted, reduction="none"), logits.detach().argmax(-1) == wanted

    pieces = [checkpoint(piece, rows, wanted, use_reentrant=False) for rows, wanted in zip(hidden.split(chunk), labels.split(chunk))]
    return torch.cat([loss for loss, _ in pieces]), torch.cat([hit for _, hit in pieces])


def correct_prefixes(correct, valid):
    """correct, valid (blocks, g) -> summed length of the blocks' correct beginnings, number of blocks with any label. Simulated tau is 1 + their ratio."""
    return (correct & valid).long().cumprod(-1).sum(), valid.any(-1).sum()


def block_loss(target, drafter, batch, kind, gamma, forward=None):
    """One forward of all blocks -> sum of w * CE (with gradient), sum of w, correct (batch, N, g). `forward`: the drafter, wrapped or compiled."""
    device, valid, B, S = batch.ids.device, batch.valid, drafter.config.block_size, batch.ids.shape[1]
    with torch.no_grad():
        _, features = target(batch.ids, taps=drafter.config.target_layer_ids, taps_only=True)
        groups = 1 if batch.ids.is_cuda else groups_of_blocks(batch.anchors.shape[1], S, B)
        # Blocks do not see each other, so a sequence's N may stand in several rows of the batch: (batch, N) anchors become (batch * groups, N / groups),
        # (batch, Q) ids and positions (batch * groups, Q / groups). The drafter gives each of them its sequence's features.
        anchors, block_ids, positions = (x.view(len(batch.ids) * groups, -1) for x in (batch.anchors, batch.block_ids, batch.positions))
        blocks = target.embed(block_ids)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
        hidden = (forward or drafter)(blocks, features, positions, visible(anchors, S, B))
        slots = hidden.view(*batch.anchors.shape, B, -1)[:, :, 1:]             # of all groups again: (batch, N, g, H)
        losses, hits = label_losses(slots[valid], target.head_weight, batch.labels[valid])
    label_probs = torch.zeros(valid.shape, device=device).masked_scatter(valid, (-losses.detach()).exp())
    weights = slot_weights(kind, gamma, label_probs, valid)[valid]
    return (weights * losses).sum(), weights.sum(), torch.zeros_like(valid).masked_scatter(valid, hits)


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
    """The epoch's batches, each a list of row numbers: shuffled, rows of like length together so that little is padded. A last one that is not full is
    left out (the next epoch shuffles anew), unless there is no other."""
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


def schedule(rows, batch_size, seed):
    """-> (epoch, row numbers) without end, epoch after epoch."""
    for epoch in itertools.count():
        for numbers in plan(rows, batch_size, seed, epoch):
            yield epoch, numbers


def ranks():
    """This process's rank and how many there are; torchrun says so."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def total(numbers):
    """A tensor's sum over all ranks."""
    if ranks()[1] > 1:
        dist.all_reduce(numbers)
    return numbers


def train_step(target, drafter, optimisers, micro_batches, factor, kind, gamma, forward=None):
    """One optimiser step over several micro-batches, on each rank its own -> {loss, simulated_tau, accuracy (g), grad_norm}, over all of them."""
    # All that is counted goes into one vector, for one all-reduce and one host sync: loss, weight, prefixes, blocks, then right and labelled by slot.
    sums = 0.0
    for i, batch in enumerate(micro_batches, 1):
        alone = forward.no_sync if hasattr(forward, "no_sync") and i < len(micro_batches) else contextlib.nullcontext
        with alone():                                      # DistributedDataParallel adds the ranks' gradients up once, after the last
            loss, weight, correct = block_loss(target, drafter, batch, kind, gamma, forward)
            loss.backward()
        correct, valid = correct.flatten(0, 1), batch.valid.flatten(0, 1)
        sums = sums + torch.cat((torch.stack((loss.detach(), weight, *correct_prefixes(correct, valid))), correct.sum(0), valid.sum(0))).double()
    loss, weight, prefixes, blocks, *slots = total(sums).tolist()
    # DistributedDataParallel left the ranks' mean of the summed gradients: the sum over ranks, by the weight of all, is that mean by weight / ranks.
    norm = optimiser_step(drafter, optimisers, weight / ranks()[1], factor)
    g = len(slots) // 2
    return {"loss": loss / max(weight, 1e-9), "simulated_tau": 1 + prefixes / max(blocks, 1), "grad_norm": norm,
            "accuracy": [round(right / max(labelled, 1), 4) for right, labelled in zip(slots[:g], slots[g:])]}


def fit(target, drafter, optimisers, rows, options, first=0):
    """Train on `rows` (data.Row), from step `first` to options.steps, yielding each step's record as train_step has it, and lr, tokens and seconds.

    options: steps, batch_size (of a micro-batch), accumulate, anchors, seed, loss, gamma, and compile.
    """
    (rank, world), device, forward = ranks(), target.device, drafter
    if world > 1:
        forward = DistributedDataParallel(drafter, gradient_as_bucket_view=True)          # else gradients are held twice
    if options.compile:
        forward = torch.compile(forward)
    # Micro-batches are numbered through the whole run; this rank takes each world-th, from where the last run stopped.
    mine = itertools.islice(schedule(rows, options.batch_size, options.seed), first * options.accumulate * world + rank, None, world)

    def batch_of(epoch, numbers):
        chosen = [rows[k] for k in numbers]
        anchors = [draw_anchors(anchor_candidates(r.ids, r.prompt_length), options.anchors, options.seed, epoch, k) for r, k in zip(chosen, numbers)]
        multiple = 512 if device.type == "cuda" else 16                        # few shapes, few compilations
        return make_batch(chosen, anchors, options.anchors, drafter.config.block_size, drafter.config.mask_token_id, multiple).to(device)

    for step in range(first, options.steps):
        began = time.perf_counter()
        batches = [batch_of(*next(mine)) for _ in range(options.accumulate)]
        factor = lr_factor(step, options.steps)
        record = train_step(target, drafter, optimisers, batches, factor, options.loss, options.gamma, forward)
        if not math.isfinite(record["loss"] + record["grad_norm"]):
            raise InputError(f"step {step + 1}: the loss is {record['loss']}, its gradient's norm {record['grad_norm']}; a smaller --lr may help")
        yield {"step": step + 1} | record | {"lr": factor * options.lr, "tokens": world * sum(b.ids.numel() for b in batches),
                                             "seconds": time.perf_counter() - began}


def real_tau(target, drafter, prompts, vocab, max_new_tokens=256, stop=()):
    """tau by the real loop, greedy, of prompts [(task, ids)]: the mean over responses of each task -> {task: tau}. The truth: its anchors sit right
    behind rejections.

    It is measured on a copy in the dtype that is served. Once `stop` holds anything, it ends early, with what there is.
    """
    served, taus = copy.deepcopy(drafter).to(target.dtype).eval(), {}
    for task, ids in tqdm(prompts, desc="tau", unit="prompt", leave=False, mininterval=1, disable=len(prompts) < 2):
        stats = Stats()
        for cycle in generate(target, served, ids, max_new_tokens, target.stop_ids, vocab=vocab):
            stats.add(cycle)
            if stop:
                break
        if stop:
            break
        if stats.cycles:
            taus.setdefault(task, []).append(stats.tau)
    return {task: round(sum(values) / len(values), 3) for task, values in taus.items()}


if __name__ == "__main__":
    from run import main      # options, files, log, resuming: all that is not the method
    main()
