"""Anchors, blocks, mask, loss and loop of train.py, each against an example by hand or a slow loop."""
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import model
import train
from draft import DraftConfig, Drafter
from model import Config
from target import Target

ROOT = Path(__file__).resolve().parents[1]
LAYER = dict(model_type="qwen3", vocab_size=50, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, hidden_act="silu",
             rms_norm_eps=1e-6, max_position_embeddings=256, rope_theta=1e4, tie_word_embeddings=True)


def toy_pair(B=4, seed=0):
    """A random 6-layer target and a 2-layer drafter, mask id 49."""
    torch.manual_seed(seed)
    target = Target(Config.from_dict(LAYER | {"num_hidden_layers": 6}))
    for p in target.parameters():
        torch.nn.init.normal_(p, 0, 0.2) if p.dim() == 2 else torch.nn.init.uniform_(p, 0.8, 1.2)
    drafter = Drafter(DraftConfig(Config.from_dict(LAYER | {"num_hidden_layers": 2}), B, 49, (1, 2, 4), 6)).initialise(0.1)
    return target.requires_grad_(False), drafter


def conversation(length, prompt_length, seed=0):
    return SimpleNamespace(ids=torch.randint(0, 48, (length,), generator=torch.Generator().manual_seed(seed)).tolist(), prompt_length=prompt_length)


def test_anchors():
    assert list(train.anchor_candidates([0] * 6, 3)) == [3, 4]
    drawn = train.draw_anchors(range(3, 50), 10, seed=1, epoch=2, sample=3)
    assert drawn == sorted(set(drawn)) and len(drawn) == 10 and drawn == train.draw_anchors(range(3, 50), 10, 1, 2, 3)
    assert drawn != train.draw_anchors(range(3, 50), 10, 1, 3, 3), "drawn anew each epoch"
    assert train.draw_anchors(range(3, 5), 10, 0, 0, 0) == [3, 4]


def test_blocks_by_hand():
    row = SimpleNamespace(ids=[10, 11, 12, 13, 14, 15], prompt_length=2)
    batch = train.make_batch([row], [[2, 4]], N=3, B=3, mask_token_id=49, multiple=4)
    assert batch.ids.tolist() == [[10, 11, 12, 13, 14, 15, 0, 0]]
    assert batch.block_ids.tolist() == [[12, 49, 49, 14, 49, 49, 10, 49, 49]]
    assert batch.positions.tolist() == [[2, 3, 4, 4, 5, 6, 0, 1, 2]]
    assert batch.valid.tolist() == [[[True, True], [True, False], [False, False]]]
    assert batch.labels[0, 0].tolist() == [13, 14] and batch.labels[0, 1, 0] == 15


@pytest.mark.parametrize("anchors, S, B", [([[2, 5, 7]], 12, 4), ([[3]], 9, 16), ([[1, 2, 3, 4], [6, 0, 0, 0]], 8, 3)])
def test_mask_element_by_element(anchors, S, B):
    anchors = torch.tensor(anchors)
    N = anchors.shape[1]
    mask = create_mask(train.block_mask(anchors, S, B), len(anchors), 1, N * B, S + N * B, device="cpu")
    for b, row, key in itertools.product(range(len(anchors)), range(N * B), range(S + N * B)):
        wanted = key < anchors[b, row // B] if key < S else (key - S) // B == row // B
        assert mask[b, 0, row, key] == wanted, (b, row, key)


def test_mask_rows_past_the_end_are_in_bounds():
    """FlexAttention rounds rows up to a multiple of 128."""
    mod = train.block_mask(torch.tensor([[3, 5]]), 8, 4)
    mask = create_mask(mod, 1, 1, 128, 16, device="cpu")[0, 0]
    assert not mask[8:, 8:].any(), "they belong to no block"


def test_training_forward_is_the_inference_path():
    target, drafter = toy_pair()
    row, B = conversation(30, 4), 4
    anchors = list(range(4, 29))
    batch = train.make_batch([row], [anchors], len(anchors), B, 49)
    with torch.no_grad():
        _, features = target(batch.ids, taps=(1, 2, 4))
        S, Q = batch.ids.shape[1], batch.block_ids.shape[1]
        mask = create_mask(train.block_mask(batch.anchors, S, B), 1, 1, Q, S + Q, device="cpu")
        together = drafter(target.embed(batch.block_ids), features, batch.positions, mask).unflatten(1, (-1, B))
        for j, a in enumerate(anchors):
            cache = drafter.new_cache(64)
            drafter.extend(cache, features[:, :a])
            alone = drafter.propose(cache, target.embed(torch.tensor([[row.ids[a]] + [49] * (B - 1)])))
            assert torch.allclose(together[:, j], alone, atol=1e-4)


def test_chunked_loss_and_gradient():
    torch.manual_seed(0)
    head, labels = torch.randn(50, 32), torch.randint(0, 50, (37,))
    full = torch.randn(37, 32, requires_grad=True)
    chunked = full.detach().clone().requires_grad_()
    wanted = F.cross_entropy(full @ head.T, labels, reduction="none")
    losses, hits = train.label_losses(chunked, head, labels, chunk=10)
    wanted.sum().backward()
    losses.sum().backward()
    assert torch.allclose(losses, wanted, atol=1e-5) and torch.allclose(full.grad, chunked.grad, atol=1e-5)
    assert hits.tolist() == ((full @ head.T).argmax(-1) == labels).tolist()


def test_slot_weights_by_hand():
    probs = torch.tensor([[0.0, 1.0, 0.5]])
    valid = torch.ones(1, 3, dtype=torch.bool)
    assert train.slot_weights("uniform", None, probs, valid).tolist() == [[1, 1, 1]]
    assert torch.allclose(train.slot_weights("decay", 2.0, probs, valid), torch.exp(-torch.tensor([[0.0, 0.5, 1.0]])))
    # smoothed 0.5, 1, 0.75; products 0.5, 0.5, 0.375
    assert torch.allclose(train.slot_weights("dpace", None, probs, valid), torch.tensor([[1.375, 0.875, 0.375]]))
    valid[0, 2] = False                                     # the response has ended: its last slots count for no one
    assert train.slot_weights("dpace", None, probs, valid).tolist() == [[1.0, 0.5, 0.0]]
    assert [train.default_gamma(B) for B in (16, 10, 8, 4, 2)] == [7, 5, 4, 2, 1]


def test_correct_prefixes_by_hand():
    correct = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    valid = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    assert [x.item() for x in train.correct_prefixes(correct, valid)] == [2 + 0 + 2, 3]


@pytest.mark.parametrize("response", [2, 3, 4, 5])
def test_short_responses_train(response):
    target, drafter = toy_pair()
    row = conversation(10 + response, 10)
    anchors = train.draw_anchors(train.anchor_candidates(row.ids, 10), 8, 0, 0, 0)
    loss, weight, _ = train.block_loss(target, drafter, train.make_batch([row], [anchors], 8, 4, 49), "decay", 2.0)
    loss.backward()
    assert weight > 0 and all(p.grad.isfinite().all() for p in drafter.parameters())


def test_accumulated_equals_one_batch():
    rows, anchors = [conversation(30, 4, s) for s in range(8)], [[5, 9, 20], [8], [10, 11], [6], [7, 9], [12], [15, 25], [28]]
    after = []
    for size in (8, 2):
        target, drafter = toy_pair()
        micro = [train.make_batch(rows[i:i + size], anchors[i:i + size], 3, 4, 49) for i in range(0, 8, size)]
        train.train_step(target, drafter, train.make_optimisers(drafter, "adamw", 6e-4), micro, 1.0, "decay", 2.0)
        after.append(torch.cat([p.detach().flatten() for p in drafter.parameters()]))
    assert (after[0] - after[1]).abs().max() < 1e-6


def test_groups_of_blocks_by_hand():
    """A group's rows come near half the sequence's tokens; a prime number of blocks stays one group, or is split into blocks, whichever is nearer."""
    asked = (24, 160, 16), (1, 8, 16), (3, 10, 4), (7, 100, 16), (512, 3072, 16), (1009, 1500, 4), (2 * 509, 3072, 16)
    assert [train.groups_of_blocks(*of) for of in asked] == [4, 1, 3, 1, 4, 1, 2]


def test_blocks_in_groups_are_the_blocks_of_one_row(monkeypatch):
    """Loss, metrics and gradients, with a sequence of few anchors and so groups of nothing but padding."""
    batch, seen = train.make_batch([conversation(30, 4), conversation(17, 4, 1)], [[5, 9, 11, 12, 20, 25], [6]], 6, 4, 49), []
    for groups in (1, 2, 3, 6):
        target, drafter = toy_pair()
        monkeypatch.setattr(train, "groups_of_blocks", lambda *of: groups)
        loss, weight, correct = train.block_loss(target, drafter, batch, "dpace", None)
        loss.backward()
        seen.append((loss.item(), weight.item(), correct, torch.cat([p.grad.flatten() for p in drafter.parameters()])))
    for loss, weight, correct, gradient in seen[1:]:
        assert loss == pytest.approx(seen[0][0], rel=1e-5) and weight == pytest.approx(seen[0][1], rel=1e-5)
        assert torch.equal(correct, seen[0][2]) and torch.allclose(gradient, seen[0][3], atol=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_conversation_memorised_drafts_whole_blocks_in_the_loop(optimizer):
    """The slot convention of training is that of the loop: a drafter that knows the answer has every draft accepted."""
    from speculate import Stats, generate
    target, drafter = toy_pair()
    prompt = conversation(6, 0, 3).ids
    answer = Stats(generate(target, None, prompt, 26)).output
    row = SimpleNamespace(ids=prompt + answer, prompt_length=6)
    anchors = list(train.anchor_candidates(row.ids, 6))
    optimisers = train.make_optimisers(drafter, optimizer, {"adamw": 3e-3, "muon": 0.02}[optimizer])
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    for step in range(150):
        batch = train.make_batch([row], [anchors], len(anchors), 4, 49)
        record = train.train_step(target, drafter, optimisers, [batch], 1.0, "uniform", None)
        if min(record["accuracy"]) == 1.0 and step >= 50:
            break
    cycles = Stats(generate(target, drafter.eval(), prompt, 25)).cycles
    assert all(c.accepted == 3 for c in cycles[:-1]), [c.accepted for c in cycles]
    assert all((before[name] != p).any() for name, p in drafter.named_parameters()), "every parameter moved, norms too"


def test_schedule_by_hand():
    assert train.lr_factor(0, 100) == 0.25 and train.lr_factor(3, 100) == 1.0 and train.lr_factor(4, 100) == 1.0
    assert train.lr_factor(99, 100) < 0.001


def test_features_before_the_anchor_and_nothing_else():
    """Overlapping anchors: the block at 8 sees features up to 7 and itself; those from 8 on, and the block at 6, are nothing to it."""
    target, drafter = toy_pair()
    batch = train.make_batch([conversation(30, 4)], [[6, 8, 9]], 3, 4, 49)
    with torch.no_grad():
        _, features = target(batch.ids, taps=(1, 2, 4))
        mask, blocks = train.visible(batch.anchors, batch.ids.shape[1], 4), target.embed(batch.block_ids)

        def block(features, blocks):
            return drafter(blocks, features, batch.positions, mask).unflatten(1, (-1, 4))[:, 1]

        before, later, earlier, other = block(features, blocks), features.clone(), features.clone(), blocks.clone()
        later[:, 8:] += 1
        earlier[:, 7] += 1
        other[:, :4] += 1
        assert torch.equal(block(later, blocks), before)
        assert not torch.allclose(block(earlier, blocks), before)
        assert torch.equal(block(features, other), before)


FLEX = [([[3, 5, 20]], [30], 4), ([[4]], [9], 16), ([[4, 5, 6, 7], [6, 0, 0, 0]], [30, 9], 5)]        # no multiple of 128; one anchor; padded rows and overlap


@pytest.mark.parametrize("anchors, lengths, B", FLEX)
def test_flex_attention_equals_the_dense_mask(anchors, lengths, B, monkeypatch):
    """The forward alone, uncompiled: FlexAttention has no backward on a CPU. On CUDA both, in test_cuda.py."""
    monkeypatch.setattr(model, "flex", lambda: flex_attention)
    target, drafter = toy_pair(B)
    N = len(anchors[0])
    batch = train.make_batch([conversation(n, 3) for n in lengths], [[a for a in row if a] for row in anchors], N, B, 49)
    with torch.no_grad():
        _, features = target(batch.ids, taps=(1, 2, 4))
        S, blocks = batch.ids.shape[1], target.embed(batch.block_ids)
        dense = train.visible(batch.anchors, S, B)
        block_mask = create_block_mask(train.block_mask(batch.anchors, S, B), len(lengths), None, N * B, S + N * B, device="cpu")
        assert torch.allclose(drafter(blocks, features, batch.positions, block_mask), drafter(blocks, features, batch.positions, dense), atol=1e-5)


@pytest.mark.slow
def test_one_conversation_memorised_with_blocks_of_16():
    """In the real loop every cycle but the last accepts all 15 drafts; in well under a minute."""
    from speculate import Stats, generate
    target, drafter = toy_pair(16, seed=1)
    prompt = conversation(6, 0, 5).ids
    answer = Stats(generate(target, None, prompt, 70)).output
    row = SimpleNamespace(ids=prompt + answer, prompt_length=6)
    anchors = list(train.anchor_candidates(row.ids, 6))
    optimisers = train.make_optimisers(drafter, "muon", 0.02)
    batch = train.make_batch([row], [anchors], len(anchors), 16, 49)
    for step in range(300):
        record = train.train_step(target, drafter, optimisers, [batch], min(1, (300 - step) / 150), "uniform", None)
        if min(record["accuracy"]) == 1.0:
            break
    cycles = Stats(generate(target, drafter.eval(), prompt, 69)).cycles
    assert len(cycles) > 3 and all(c.accepted == 15 for c in cycles[:-1]), [c.accepted for c in cycles]


def one_step(world, tmp_path):
    """A step over the same eight conversations by `world` gloo ranks -> the drafter's parameters, the record."""
    script = tmp_path / "step.py"
    script.write_text(f"""
import sys, torch, torch.distributed as dist
from types import SimpleNamespace
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import train
from test_train import conversation, toy_pair
rank, world = train.ranks()
if world > 1:
    dist.init_process_group("gloo")
target, drafter = toy_pair()
rows = [conversation(20 + s, 4, s) for s in range(8)]
options = SimpleNamespace(steps=30, batch_size=2, accumulate=4 // world, anchors=3, seed=0, loss="dpace", gamma=2.0, lr=6e-4, compile=False)
optimisers = train.make_optimisers(drafter, "adamw", 6e-4)
for group in optimisers[0].param_groups:
    group["peak"] = 6e-4
train.lr_factor = lambda *_: 1.0
record = next(train.fit(target, drafter, optimisers, rows, options))
if rank == 0:
    torch.save([torch.cat([p.detach().flatten() for p in drafter.parameters()]), record["loss"], record["simulated_tau"]], {str(tmp_path)!r} + f"/{{world}}.pt")
if world > 1:
    dist.destroy_process_group()               # else gloo's threads may end the process by an abort
""")
    command = [sys.executable, str(script)] if world == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", str(script)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    return torch.load(tmp_path / f"{world}.pt")


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path):
    (one, loss1, tau1), (two, loss2, tau2) = one_step(1, tmp_path), one_step(2, tmp_path)
    fresh = torch.cat([p.detach().flatten() for p in toy_pair()[1].parameters()])
    assert (one - fresh).abs().max() > 1e-4, "a step was made"
    assert (one - two).abs().max() < 1e-6 and loss1 == pytest.approx(loss2, abs=1e-5) and tau1 == pytest.approx(tau2)


@pytest.mark.slow
def test_head_and_loss_stay_under_a_quarter_of_the_logits(tmp_path):
    """S 1024, N 128, B 16, V 151,936, H 1024: all fp32 logits would be 1.17 GB. Peak memory of a process with head and loss, less that of one without."""
    script = """
import resource, sys, torch
sys.path.insert(0, {root!r})
import train
torch.manual_seed(0)
head = torch.randn(151936, 1024)
hidden = torch.randn(128 * 15, 1024, requires_grad=True)
hidden.grad = torch.zeros_like(hidden)
labels = torch.randint(0, 151936, (128 * 15,))
torch.randn(8, 1024) @ head[:1000].T
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
losses, _ = train.label_losses(hidden, head, labels)
losses.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    result = subprocess.run([sys.executable, "-c", script.format(root=str(ROOT))], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    added, full = int(result.stdout), 128 * 15 * 151936 * 4
    print(f"head and loss add {added / 1e6:.0f} MB, {added / full:.0%} of the logits' {full / 1e6:.0f} MB")
    assert added < 0.25 * full
