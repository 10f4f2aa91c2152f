"""speculate.py: the output is the target's own (token by token at temperature 0, in distribution above), the loop ends where it should, bad input is refused.

Most loops here run with an Oracle in the drafter's place: it knows the target's text and errs where it is told to, so that each test chooses what is
accepted and what is rejected.
"""
import http.server
import io
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import speculate
import toys
from checkpoint import InputError
from draft import DraftConfig, Drafter
from model import Config
from speculate import Cycle, Sampling, Stats, commit, draft, first_difference, generate, load, probabilities, stream, verify
from target import Target
from tokenizer import Tokenizer

ROOT = Path(speculate.__file__).resolve().parent
PROMPT = [5, 77, 260, 31, 8, 199, 100, 42]


# ---------------------------------------------------------------------------------------------------------------------
# Models and fakes

def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small_config(V, layers=2, H=16):
    return Config(model_type="qwen3", vocab_size=V, hidden_size=H, intermediate_size=2 * H, num_hidden_layers=layers, num_attention_heads=2,
                  num_key_value_heads=1, head_dim=8, rms_norm_eps=1e-6, max_position_embeddings=4096, rope=dict(rope_theta=1e4, rope_type="default"),
                  tie_word_embeddings=False, qkv_bias=False, o_bias=False, qk_norm=True)


def small_target(V, seed=0, sharpness=2.0, **shape):
    """A target straight from a Config. Its head's rows have one length, so that each is the argmax of its own direction; `sharpness` sizes the logits."""
    torch.manual_seed(seed)
    target = Target(small_config(V, **shape)).eval().requires_grad_(False)
    for name, p in target.named_parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=1.0 if "embed" in name else 1.5 / p.shape[1] ** 0.5)
    target.lm_head.weight.copy_(sharpness * torch.nn.functional.normalize(target.lm_head.weight, dim=-1))
    return target


def small_drafter(target, B, seed=0, taps=(0, 1), mask=1):
    torch.manual_seed(seed)
    config = DraftConfig(small_config(target.config.vocab_size, layers=1), B, mask, taps, target.config.num_hidden_layers)
    drafter = Drafter(config).eval().requires_grad_(False)
    for p in drafter.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=1.5 / p.shape[1] ** 0.5)
    return drafter


class Oracle:
    """A drafter that proposes `text`, the target's own, but for the positions in `wrong`. It keeps what it was given, for the tests to look at."""

    def __init__(self, target, text, B, wrong=(), mask=0, taps=(1, 3)):
        self.config = SimpleNamespace(block_size=B, mask_token_id=mask, target_layer_ids=taps)
        self.target, self.text, self.wrong = target, text, set(wrong)
        self.features, self.blocks = [], []
        rows = target.head_weight
        assert ((rows @ rows.T).argmax(-1) == torch.arange(len(rows)))[list(set(text))].all()    # so that a head row proposes its own token

    def new_cache(self, max_len):
        self.max_len = max_len
        return SimpleNamespace(length=0, max_len=max_len)

    def extend(self, cache, features):
        self.features.append(features)
        cache.length += features.shape[1]

    def propose(self, cache, block):
        self.blocks.append(block)
        start, B = cache.length, block.shape[1]
        assert start + B <= cache.max_len
        ids = [self.text[p] if p < len(self.text) else 0 for p in range(start, start + B)]
        ids = [(id + 1) % 256 if start + k in self.wrong else id for k, id in enumerate(ids)]
        return self.target.head_weight[torch.tensor([ids])]


def plain(target, prompt, n, vocab=None):
    """The next n tokens, greedily, one row at a time: what every loop must give. No code of speculate.py."""
    with torch.inference_mode():
        cache, ids, out = target.new_cache(len(prompt) + n), torch.tensor([prompt]), []
        for _ in range(n):
            ids = target(ids, cache, last_only=True, vocab=vocab)[0][:, -1].argmax(-1, keepdim=True)
            out.append(ids.item())
    return out


def tokens_of(cycles):
    return [token for cycle in cycles for token in cycle.tokens]


def errors(seed, start, end, share=0.3):
    """Positions to err at, the same for the same seed."""
    return {start + i for i in torch.nonzero(torch.rand(end - start, generator=torch.Generator().manual_seed(seed)) < share)[:, 0].tolist()}


@pytest.fixture(scope="module")
def wanderer():
    """A small target, a prompt, and its greedy continuation (60 tokens), of which the first 30 are all different."""
    target = small_target(1024, seed=2, layers=4)
    for seed in range(4, 100):
        prompt = torch.randint(1024, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
        if len(set(plain(target, prompt, 30))) == 30:
            return target, prompt, plain(target, prompt, 60)
    raise AssertionError("no such prompt")


# ---------------------------------------------------------------------------------------------------------------------
# Greedy: the same tokens

@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-untied", "qwen2", "llama"])
@pytest.mark.parametrize("B", [1, 2, 5, 16])
def test_speculative_equals_plain(target_of, kind, B):
    target, n = target_of(kind), 40
    for seed in range(2):
        prompt = torch.randint(256, (1 + 9 * seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        text = plain(target, prompt, n)
        oracle = Oracle(target, prompt + text, B, errors(seed, len(prompt), len(prompt) + n))
        cycles = list(generate(target, oracle, prompt, n))
        assert tokens_of(cycles) == text
        assert tokens_of(generate(target, None, prompt, n)) == text
        assert all(c.drafted == B - 1 and len(c.tokens) == c.accepted + 1 for c in cycles[1:-1])
        if B == 1:
            assert len(cycles) == n and not oracle.blocks
            continue
        assert sum(c.accepted for c in cycles) > 5 and sum(c.drafted - c.accepted for c in cycles[:-1]) > 5
        assert len({c.accepted for c in cycles[1:-1]}) > 1


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-untied", "qwen3-padded", "qwen2", "llama"])
def test_a_real_drafter_too(target_of, tmp_path, kind):
    target, n = target_of(kind), 40
    text = plain(target, PROMPT, n, vocab=toys.N_TOKENS)
    drafter = Drafter.load(toys.write_drafter(tmp_path / "drafter", target.name, parrot=max(set(text), key=text.count)))
    drafter.check_fits(target, target.stop_ids)
    for B in (1, 2, 5, 16, 20):                             # above the trained block size, too
        cycles = list(generate(target, drafter, PROMPT, n, (), Sampling(), B, vocab=toys.N_TOKENS))
        assert tokens_of(cycles) == text
        if B > 1:
            assert sum(c.accepted for c in cycles) > 0 and sum(c.drafted - c.accepted for c in cycles[:-1]) > 0


def test_two_runs_in_turn_and_a_shorter_second(target_of, tmp_path):
    """No state outside the caches: runs that take turns, and a short one after a long one, give what each gives alone."""
    target = target_of("qwen3-tied")
    drafter = Drafter.load(toys.write_drafter(tmp_path / "drafter", target.name, parrot=plain(target, PROMPT, 40)[-1]))
    fresh = lambda: (Target.load(target.name), Drafter.load(tmp_path / "drafter"))

    def outcome(cycles):
        return [(c.tokens, c.drafted, c.accepted) for c in cycles]
    long, short = (*fresh(), PROMPT * 3, 50), (*fresh(), PROMPT[:2], 9)
    alone = [outcome(generate(*run)) for run in (long, short)]
    assert outcome(generate(target, drafter, *long[2:])) == alone[0]
    assert outcome(generate(target, drafter, *short[2:])) == alone[1]
    first, second = generate(target, drafter, *long[2:]), generate(target, drafter, *short[2:])
    turns = [(next(first), next(second)) for _ in alone[1]]
    assert outcome([a for a, _ in turns] + list(first)) == alone[0]
    assert outcome([b for _, b in turns]) == alone[1]


def test_a_target_that_emits_the_mask_id(target_of, tmp_path):
    target, n = target_of("qwen3-tied"), 30
    text = plain(target, PROMPT, n)
    for mask in {text[5], max(set(text), key=text.count)}:
        oracle = Oracle(target, PROMPT + text, 5, errors(0, 8, 38), mask=mask)
        cycles = list(generate(target, oracle, PROMPT, n))
        assert tokens_of(cycles) == text and sum(c.accepted for c in cycles) > 5
        drafter = Drafter.load(toys.write_drafter(tmp_path / str(mask), target.name, mask_token_id=mask))
        assert tokens_of(generate(target, drafter, PROMPT, n)) == text
        assert tokens_of(generate(target, drafter, [mask] * 4, n)) == plain(target, [mask] * 4, n)      # and a prompt that holds it


def test_greedy_drafts_are_judged_by_argmax_alone(wanderer):
    """Sampled drafts and all the rest of the settings change nothing at temperature 0."""
    target, prompt, text = wanderer
    drafter = small_drafter(target, 4)
    for sampling in (Sampling(draft_temperature=1.0), Sampling(draft_temperature=0.3, top_k=5, top_p=0.9)):
        assert tokens_of(generate(target, drafter, prompt, 40, (), sampling, generator=torch.Generator().manual_seed(0))) == text[:40]


# ---------------------------------------------------------------------------------------------------------------------
# Where a response ends

@pytest.mark.parametrize("B", [1, 2, 5, 16])
def test_stop_token_at_each_slot(wanderer, B):
    target, prompt, text = wanderer
    for slot in range(1, B + 1):                            # the prefill gives text[0]; slot B is the target's own token after B - 1 drafts
        for wrong in ((), {len(prompt) + slot}):            # as an accepted draft, and as the target's correction of one
            oracle = Oracle(target, prompt + text, B, wrong)
            cycles = list(generate(target, oracle, prompt, 50, {text[slot]}))
            assert tokens_of(cycles) == text[:slot + 1]
            if B > 1:
                assert len(cycles) == 2 and cycles[1].accepted == (slot if slot < B and not wrong else slot - 1)


def test_stop_token_in_a_later_cycle(wanderer):
    target, prompt, text = wanderer
    for i in range(1, 20):
        oracle = Oracle(target, prompt + text, 5, errors(1, 6, 66))
        assert tokens_of(generate(target, oracle, prompt, 50, {text[i]})) == text[:i + 1]


def test_the_first_of_two_stop_ids_wins(wanderer):
    target, prompt, text = wanderer
    for stop in ([text[3], text[6]], [text[6], text[3]], frozenset({text[3], text[6]})):
        assert tokens_of(generate(target, Oracle(target, prompt + text, 16), prompt, 50, stop)) == text[:4]
        assert tokens_of(generate(target, None, prompt, 50, stop)) == text[:4]


def test_prefill_that_gives_a_stop_id(wanderer):
    target, prompt, text = wanderer
    for drafter in (None, Oracle(target, prompt + text, 5)):
        only, = generate(target, drafter, prompt, 50, {text[0]})
        assert only.prefill and only.tokens == text[:1] and only.drafted == only.accepted == 0
        stats = Stats()
        stats.add(only)
        assert stats.tokens == 1 and math.isnan(stats.tau) and stats.accepted_by_position() == [] and stats.seconds_per_token == 0


def test_stop_ids_in_the_prompt_do_not_count(wanderer):
    target, prompt, text = wanderer
    stop = set(prompt) - set(text[:30])
    assert stop and tokens_of(generate(target, Oracle(target, prompt + text, 5), prompt, 30, stop)) == text[:30]


@pytest.mark.parametrize("B", [1, 2, 5, 16])
def test_every_budget(wanderer, B):
    target, prompt, text = wanderer
    for wrong in ((), errors(2, 6, 66)):
        for budget in range(1, 2 * B + 1):
            oracle = Oracle(target, prompt + text, B, wrong)
            cycles = list(generate(target, oracle, prompt, budget))
            assert tokens_of(cycles) == text[:budget]
            assert all(len(c.tokens) >= 1 and c.accepted <= len(c.tokens) for c in cycles)
            assert all(block.shape[1] == B for block in oracle.blocks)      # whole blocks up to the end, and never none
            assert B == 1 or len(oracle.blocks) == len(cycles) - 1


def test_commit():
    assert commit(2, [7, 8, 9], 10, {0}) == ([7, 8, 9], 2, False)
    assert commit(2, [7, 8, 9], 3, {0}) == ([7, 8, 9], 2, True)             # the budget, just reached
    assert commit(2, [7, 8, 9], 2, {0}) == ([7, 8], 2, True)
    assert commit(2, [7, 8, 9], 1, {0}) == ([7], 1, True)
    assert commit(2, [7, 8, 9], 10, {9}) == ([7, 8, 9], 2, True)            # a stop id, last
    assert commit(2, [7, 8, 9], 10, {7, 8}) == ([7], 1, True)               # cut after the first in position
    assert commit(2, [7, 8, 9], 1, {8}) == ([7], 1, True)
    assert commit(0, [7], 1, ()) == ([7], 0, True)
    assert commit(0, [7], 2, ()) == ([7], 0, False)


def test_limits(target_of):
    target = target_of("qwen3-tied", max_position_embeddings=64)
    text = plain(target, PROMPT, 56)
    for drafter in (None, Oracle(target, PROMPT + text, 16)):
        assert tokens_of(generate(target, drafter, PROMPT, 56)) == text     # 8 + 56 = 64, though the last block reaches beyond
        refusals = (PROMPT, 57, ["8", "57", "64"]), (PROMPT * 8, 1, ["64", "1"]), ([], 5, ["empty"]), (PROMPT, 0, ["0"]), (PROMPT, -3, ["-3"])
        for prompt, budget, words in refusals:
            with pytest.raises(InputError) as refusal:
                next(generate(target, drafter, prompt, budget))
            assert all(word in str(refusal.value) for word in words)
    for B in (0, -1):
        with pytest.raises(InputError, match=f"block.size is {B}"):
            next(generate(target, Oracle(target, text, 4), PROMPT, 5, block_size=B))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_past_the_tokenizer_are_never_emitted(target_of, tmp_path, temperature):
    target = target_of("qwen3-padded", padding_scale=3.0)
    drafter = Drafter.load(toys.write_drafter(tmp_path / "drafter", target.name))
    proposed = []

    def emitted(vocab, **sampling):
        def propose(cache, block, propose=drafter.propose):
            proposed.append(block)
            return propose(cache, block)
        sampling = Sampling(temperature, **sampling)
        watched = SimpleNamespace(config=drafter.config, new_cache=drafter.new_cache, extend=drafter.extend, propose=propose)
        return tokens_of(generate(target, watched, PROMPT, 60, (), sampling, 4, torch.Generator().manual_seed(0), vocab))
    assert max(emitted(None)) >= toys.N_TOKENS              # or this test would show nothing
    for draft_temperature in (0.0, 1.0):
        assert max(emitted(toys.N_TOKENS, draft_temperature=draft_temperature)) < toys.N_TOKENS
    if temperature == 0:
        assert emitted(toys.N_TOKENS) == plain(target, PROMPT, 60, vocab=toys.N_TOKENS) != plain(target, PROMPT, 60)
    mask = target.embed(torch.tensor([[drafter.config.mask_token_id]]))     # whose own row lies past the tokenizer
    assert all(torch.equal(block[:, 1:], mask.expand(1, 3, -1)) for block in proposed)


# ---------------------------------------------------------------------------------------------------------------------
# What the models are given

def test_caches_and_features_after_each_cycle_are_those_of_a_fresh_prefill(checkpoint, tmp_path):
    target, B, n = Target.load(checkpoint("qwen3-untied")), 5, 40           # a copy of its own, to be watched
    text = plain(target, PROMPT, n)
    drafter = Drafter.load(toys.write_drafter(tmp_path / "drafter", target.name, parrot=max(set(text), key=text.count), block_size=B))
    caches = []

    def watch(model):
        def new_cache(*args):
            caches.append(type(model).new_cache(model, *args))
            return caches[-1]
        return new_cache
    target.new_cache, drafter.new_cache = watch(target), watch(drafter)
    emitted, before = [], None
    for cycle in generate(target, drafter, PROMPT, n):
        emitted += cycle.tokens
        mine, drafts = caches[:2]
        if len(emitted) < n:
            decided = PROMPT + emitted[:-1]                 # all but the anchor
            assert mine.length == len(decided)
            assert drafts.length == (0 if cycle.prefill else before)
            fresh, contexts = Target.new_cache(target, n + 20), Drafter.new_cache(drafter, n + 20)
            features = target(torch.tensor([decided]), fresh, drafter.config.target_layer_ids)[1]
            drafter.extend(contexts, features)
            for ours, theirs, length in ((mine, fresh, mine.length), (drafts, contexts, drafts.length)):
                for a, b in ((ours.k, theirs.k), (ours.v, theirs.v)):
                    torch.testing.assert_close(a[..., :length, :], b[..., :length, :], atol=1e-4, rtol=1e-4)
            before = mine.length
    assert emitted == text


def test_the_drafter_gets_each_feature_once_and_the_anchor_first(wanderer):
    target, prompt, text = wanderer
    oracle = Oracle(target, prompt + text, 5, errors(3, 6, 66), mask=9, taps=(0, 2, 3))
    cycles = list(generate(target, oracle, prompt, 40))
    given = torch.cat(oracle.features, 1)
    expected = target(torch.tensor([(prompt + text)[:given.shape[1]]]), taps=(0, 2, 3))[1]
    assert given.shape == expected.shape
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=1e-4)
    starts = torch.tensor([len(prompt)] + [len(c.tokens) for c in cycles[1:]]).cumsum(0)
    for start, block in zip(starts.tolist(), oracle.blocks, strict=False):
        assert torch.equal(block, target.embed(torch.tensor([[(prompt + text)[start], 9, 9, 9, 9]])))


def test_every_verify_row_is_what_a_single_row_gives(wanderer, monkeypatch):
    """B rows == B single rows: the logits that judge drafts, against a forward without cache or block."""
    target, prompt, text = wanderer
    seen = []

    def watched(logits, drafts, *rest):
        accepted, token = verify(logits, drafts, *rest)
        seen.append(logits[0, :accepted + 1])
        return accepted, token
    monkeypatch.setattr(speculate, "verify", watched)
    list(generate(target, Oracle(target, prompt + text, 5, errors(4, 6, 66)), prompt, 40))
    judged = torch.cat(seen)
    assert len(judged) >= 40
    whole = target(torch.tensor([(prompt + text)[:len(prompt) + len(judged) - 1]]))[0][0, len(prompt) - 1:]
    torch.testing.assert_close(judged, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=5, top_p=0.9), Sampling(1.0, draft_temperature=1.0)])
def test_one_host_synchronisation_a_cycle(target_of, tmp_path, monkeypatch, sampling):
    target = target_of("qwen3-tied")
    drafter = Drafter.load(toys.write_drafter(tmp_path / "drafter", target.name, parrot=plain(target, PROMPT, 30)[-1]))
    syncs = []

    def count(name, original):
        def counted(*args, **kwargs):
            syncs.append(name)
            return original(*args, **kwargs)
        return counted
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "__array__", "nonzero", "__contains__"):
        monkeypatch.setattr(torch.Tensor, name, count(name, getattr(torch.Tensor, name)))
    for name in ("nonzero", "equal", "allclose"):
        monkeypatch.setattr(torch, name, count(name, getattr(torch, name)))
    for d in (drafter, None):
        cycles = 0
        for _ in generate(target, d, PROMPT, 30, (), sampling, 5, torch.Generator().manual_seed(0)):
            assert syncs == ["tolist"]
            syncs.clear()
            cycles += 1
        assert cycles > 5


def test_times(wanderer):
    target, prompt, text = wanderer
    for drafter in (Oracle(target, prompt + text, 5), None):
        for cycle in generate(target, drafter, prompt, 30):
            assert 0 < cycle.verify_seconds <= cycle.seconds and cycle.draft_seconds + cycle.verify_seconds <= cycle.seconds
            assert cycle.draft_seconds > 0 or cycle.prefill or drafter is None


# ---------------------------------------------------------------------------------------------------------------------
# Counting

def test_stats_of_a_hand_trace():
    stats = Stats()
    assert Stats(iter([Cycle([5], prefill=True), Cycle([6, 7])])).output == [5, 6, 7]
    for cycle in (Cycle([1], prefill=True, seconds=9.0), Cycle([1, 2, 3], 4, 2, seconds=1.0), Cycle([1], 4, 0, seconds=2.0),
                  Cycle([1, 2, 3, 4, 5], 4, 4, seconds=3.0), Cycle([1, 2], 4, 2, seconds=4.0)):     # the last: cut after its second draft
        stats.add(cycle)
    assert stats.tokens == 12
    assert stats.tau == (3 + 1 + 5 + 2) / 4                 # the bonus counts, the prefill's token does not
    assert stats.seconds_per_token == 10 / 12
    assert stats.accepted_by_position() == [3 / 4, 3 / 4, 1 / 4, 1 / 4]


def test_stats_of_a_known_loop(wanderer):
    target, prompt, text = wanderer
    P = len(prompt)                                         # anchors at P, P + 3, P + 8, P + 9, ...; slot k stands for anchor + k
    oracle = Oracle(target, prompt + text, 5, {P + 3, P + 9, P + 12})
    stats, counts = Stats(), []
    for cycle in generate(target, oracle, prompt, 16):
        stats.add(cycle)
        counts.append((len(cycle.tokens), cycle.drafted, cycle.accepted))
    assert counts == [(1, 0, 0), (3, 4, 2), (5, 4, 4), (1, 4, 0), (3, 4, 2), (3, 4, 3)]    # the last one cut by the budget after three drafts
    assert stats.tau == 15 / 5 and stats.tokens == 16
    assert stats.accepted_by_position() == [4 / 5, 4 / 5, 2 / 5, 1 / 5]


# ---------------------------------------------------------------------------------------------------------------------
# Sampling: distributions

def exact(logits, temperature, top_k=0, top_p=1.0):
    """One row of logits -> its distribution in float64, written out: temperature, then the top_k best, then the fewest that reach top_p."""
    weights = [math.exp((x - max(logits.tolist())) / temperature) for x in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    order = order[:top_k or None]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if mass >= top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in kept)
    return torch.tensor([weights[i] / total if i in kept else 0.0 for i in range(len(weights))], dtype=torch.float64)


def test_order_of_temperature_top_k_top_p():
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])

    def after(temperature, top_k=0, top_p=1.0):
        return [round(x, 3) for x in probabilities(p.log(), temperature, top_k, top_p).tolist()]
    assert after(1.0) == [0.4, 0.3, 0.2, 0.1]
    assert after(0.5) == [0.533, 0.3, 0.133, 0.033]
    assert after(1.0, 2) == [0.571, 0.429, 0, 0]
    assert after(1.0, 4) == after(1.0, 9) == after(1.0)
    assert after(1.0, 0, 0.6) == [0.571, 0.429, 0, 0]       # the token that crosses is kept
    assert after(1.0, 0, 0.001) == after(1.0, 1) == [1, 0, 0, 0]
    assert after(1.0, 3, 0.75) == [0.571, 0.429, 0, 0]      # top-p of what top-k left, 4/9 + 3/9 > 0.75; of all four it would keep three
    assert after(2.0, 0, 0.65) == [0.389, 0.337, 0.275, 0]  # top-p of the flattened ones; at temperature 1 it would keep two
    assert after(0.5, 0, 0.65) == [0.64, 0.36, 0, 0]
    batch = probabilities(torch.stack([p.log(), p.flip(0).log()])[None], 1.0, 3, 0.75)
    assert batch.shape == (1, 2, 4) and torch.equal(batch[0, 0], batch[0, 1].flip(0))


@pytest.mark.parametrize("temperature, top_k, top_p", [(0.5, 0, 1.0), (1.3, 5, 1.0), (0.8, 0, 0.7), (2.0, 7, 0.9), (1.0, 1, 0.5), (0.01, 0, 0.99)])
def test_probabilities_written_out(temperature, top_k, top_p):
    logits = 3 * rand(20, 30)
    ours = probabilities(logits, temperature, top_k, top_p)
    for row, p in zip(logits.double(), ours, strict=True):
        assert torch.allclose(p.double(), exact(row, temperature, top_k, top_p), atol=1e-5)
    assert probabilities(logits.bfloat16(), temperature, top_k, top_p).dtype == torch.float32


@pytest.mark.parametrize("temperature, top_k, top_p", [(0.5, 0, 1.0), (1.3, 5, 1.0), (0.8, 0, 0.7), (2.0, 7, 0.9)])
def test_probabilities_equal_those_of_transformers(temperature, top_k, top_p):
    warpers = pytest.importorskip("transformers").generation.logits_process
    logits = 3 * rand(50, 200)
    scores = warpers.TemperatureLogitsWarper(temperature)(None, logits)
    scores = warpers.TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = warpers.TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    assert torch.allclose(probabilities(logits, temperature, top_k, top_p), scores.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("bad", [dict(temperature=-0.1), dict(temperature=math.nan), dict(temperature=math.inf), dict(draft_temperature=-1), dict(top_p=0.0),
                                 dict(draft_temperature=math.nan), dict(top_p=1.01), dict(top_p=math.nan), dict(top_p=-1), dict(top_k=-1)])
def test_settings_out_of_range(bad):
    with pytest.raises(InputError, match=next(iter(bad))):
        Sampling(**bad)


V, N_DRAWS = 8, 400_000
CHAIN = 1.5 * rand(V, V, seed=1)                            # the target: logits of the token after each token
SLOTS = torch.stack([CHAIN[0], CHAIN[3], CHAIN[5]]) + 0.7 * rand(3, V, seed=2)      # the drafter: one distribution a slot, B = 4


def two_tokens(sampling, choose=draft, seed=0):
    """The two tokens after the anchor 0, N_DRAWS times -> counts (V, V). Where a cycle commits one token only, the other comes from a second cycle."""
    generator = torch.Generator().manual_seed(seed)

    def cycle(anchor):
        drafts, q_draft = choose(SLOTS.expand(len(anchor), -1, -1), sampling, generator)
        accepted, token = verify(CHAIN[torch.cat((anchor[:, None], drafts), 1)], drafts, q_draft, sampling, generator)
        return torch.cat((drafts, token[:, None]), 1).scatter(1, accepted[:, None], token[:, None]), accepted
    tokens, accepted = cycle(torch.zeros(N_DRAWS, dtype=torch.long))
    first, second = tokens[:, 0], tokens[:, 1].clone()
    short = torch.nonzero(accepted == 0)[:, 0]
    second[short] = cycle(first[short])[0][:, 0]
    assert 0.05 < len(short) / N_DRAWS < 0.95               # both ways are in it
    return torch.bincount(first * V + second, minlength=V * V).view(V, V)


def distance(counts, sampling):
    """Total variation from the exact joint distribution."""
    settings = sampling.temperature, sampling.top_k, sampling.top_p
    joint = exact(CHAIN[0], *settings)[:, None] * torch.stack([exact(row, *settings) for row in CHAIN])
    return (counts / counts.sum() - joint).abs().sum().item() / 2


def as_if_sampled(logits, sampling, generator=None):
    """The biased mix: argmax drafts, judged as if they had been drawn from the drafter's distribution."""
    return logits.argmax(-1), probabilities(logits, sampling.temperature, sampling.top_k, sampling.top_p)


@pytest.mark.parametrize("temperature, top_k, top_p", [(0.5, 0, 1.0), (1.0, 0, 1.0), (2.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.8)])
@pytest.mark.parametrize("drafts", ["argmax", "sampled"])
def test_verify_keeps_the_distribution(temperature, top_k, top_p, drafts):
    sampling = Sampling(temperature, top_k, top_p, draft_temperature=temperature if drafts == "sampled" else 0.0)
    assert distance(two_tokens(sampling), sampling) < 0.01


def test_verify_with_drafts_of_another_temperature():
    sampling = Sampling(1.0, draft_temperature=0.4)
    assert distance(two_tokens(sampling), sampling) < 0.01


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_bar_is_one_that_a_biased_rule_fails(temperature):
    sampling = Sampling(temperature)
    assert distance(two_tokens(sampling, as_if_sampled), sampling) > 0.02


def test_drafts_come_from_the_distribution_that_is_judged():
    """q_draft has the draft's own temperature and the target's truncation, and the drafts are drawn from it; argmax drafts have none."""
    sampling = Sampling(2.0, 5, 0.9, draft_temperature=0.6)
    drafts, q_draft = draft(SLOTS.expand(50_000, -1, -1), sampling, torch.Generator().manual_seed(0))
    for k in range(3):
        expected = exact(SLOTS[k], 0.6, 5, 0.9)
        assert torch.allclose(q_draft[0, k].double(), expected, atol=1e-5)
        assert torch.allclose(torch.bincount(drafts[:, k], minlength=V) / 50_000, expected.float(), atol=0.01)
    drafts, q_draft = draft(SLOTS[None], Sampling(2.0))
    assert q_draft is None and drafts.tolist() == [SLOTS.argmax(-1).tolist()]


def test_sampled_drafts_are_accepted_by_the_overlap():
    """P(accept) = sum of min(p, q) = 1 - TV(p, q) for sampled drafts, p(argmax q) for argmax ones."""
    logits = torch.cat((CHAIN[:1], CHAIN[:1])).expand(N_DRAWS, -1, -1)
    p, q = exact(CHAIN[0], 1.0), exact(SLOTS[0], 1.0)
    for sampling, expected in ((Sampling(1.0, draft_temperature=1.0), torch.minimum(p, q).sum()), (Sampling(1.0), p[q.argmax()])):
        generator = torch.Generator().manual_seed(0)
        drafts, q_draft = draft(SLOTS[:1].expand(N_DRAWS, -1, -1), sampling, generator)
        accepted, _ = verify(logits, drafts, q_draft, sampling, generator)
        assert accepted.float().mean().item() == pytest.approx(expected.item(), abs=0.005)


def test_a_drafter_that_equals_the_target_is_always_accepted():
    sampling, generator = Sampling(1.0, top_k=5, draft_temperature=1.0), torch.Generator().manual_seed(0)
    rows = CHAIN[:4].expand(10_000, -1, -1)
    drafts, q_draft = draft(rows[:, :3], sampling, generator)
    accepted, token = verify(rows, drafts, q_draft, sampling, generator)
    assert (accepted == 3).all() and set(token.tolist()) == set(exact(CHAIN[3], 1.0, 5).nonzero()[:, 0].tolist())


def test_verify_at_temperature_0_keeps_the_argmax():
    """Sampled drafts, judged greedily: the committed tokens are the argmax chain, whatever was drafted."""
    sampling, generator = Sampling(draft_temperature=1.0), torch.Generator().manual_seed(0)
    drafts, q_draft = draft(SLOTS.expand(2000, -1, -1), sampling, generator)
    assert len(drafts.unique(dim=0)) > 50
    rows = CHAIN[torch.cat((torch.zeros(2000, 1, dtype=torch.long), drafts), 1)]
    accepted, token = verify(rows, drafts, q_draft, sampling, generator)
    chain, best = [0], CHAIN.argmax(-1).tolist()
    for _ in range(4):
        chain.append(best[chain[-1]])
    for row in range(2000):
        a = accepted[row].item()
        assert drafts[row, :a].tolist() + [token[row].item()] == chain[1:a + 2]
        assert a == 3 or drafts[row, a].item() != chain[a + 1]
    assert set(accepted.tolist()) >= {0, 1}


def test_low_temperature_is_nearly_greedy(wanderer):
    target, prompt, text = wanderer
    for drafter in (None, Oracle(target, prompt + text, 5, errors(5, 6, 66))):
        for sampling in (Sampling(1e-4), Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6)):
            assert tokens_of(generate(target, drafter, prompt, 30, (), sampling, generator=torch.Generator().manual_seed(0))) == text[:30]


def test_one_generator_drawn_in_order(wanderer):
    """Same seed, same text; another seed, another; and torch's own random numbers are left alone."""
    target, prompt, _ = wanderer
    drafter, state = small_drafter(target, 4), torch.get_rng_state()
    for sampling in (Sampling(1.0), Sampling(1.0, draft_temperature=1.0)):
        runs = [tokens_of(generate(target, drafter, prompt, 30, (), sampling, generator=torch.Generator().manual_seed(seed))) for seed in (0, 0, 1)]
        assert runs[0] == runs[1] != runs[2]
        one = torch.Generator().manual_seed(0)              # two answers from one generator: not the same numbers again
        assert tokens_of(generate(target, drafter, prompt, 30, (), sampling, generator=one)) == runs[0]
        assert tokens_of(generate(target, drafter, prompt, 30, (), sampling, generator=one)) != runs[0]
    assert torch.equal(torch.get_rng_state(), state)


# ---- the loop itself

LOOP_V = 6


def chi_square_p(counts, expected):
    """The probability of a chi-square at least as large; cells that expect fewer than 5 are put together."""
    small = expected < 5
    counts = torch.cat((counts[~small], counts[small].sum()[None]))
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2).item()


def loop_p_value(runs, draft_temperature=0.0, B=3):
    """`runs` responses of three tokens at temperature 1 -> chi-square p, and the drafts accepted and rejected."""
    target, prompt = small_target(LOOP_V, sharpness=1.0, layers=1), [3, 1, 4]
    drafter = small_drafter(target, B, taps=(0,))
    sequences = torch.cartesian_prod(*[torch.arange(LOOP_V)] * 3)
    p = target(torch.cat((torch.tensor([prompt]).expand(len(sequences), -1), sequences), 1))[0].double().softmax(-1)[:, len(prompt) - 1:-1]
    p = p.gather(-1, sequences[..., None]).prod(1)[:, 0]
    assert abs(p.sum() - 1) < 1e-5 and p.max() < 0.2
    counts, accepted, rejected = torch.zeros(len(p), dtype=torch.float64), 0, 0
    generator, sampling = torch.Generator().manual_seed(0), Sampling(1.0, draft_temperature=draft_temperature)
    for _ in range(runs):
        cycles = list(generate(target, drafter, prompt, 3, (), sampling, generator=generator))
        a, b, c = tokens_of(cycles)
        counts[(a * LOOP_V + b) * LOOP_V + c] += 1
        accepted += sum(cycle.accepted for cycle in cycles)
        rejected += sum(cycle.accepted < len(cycle.tokens) for cycle in cycles[1:])
    assert accepted > runs / 10 and rejected > runs / 10
    return chi_square_p(counts, runs * p)


def test_the_loop_keeps_the_distribution():
    assert loop_p_value(5000) > 1e-3


def test_the_loop_keeps_the_distribution_with_sampled_drafts():
    assert loop_p_value(1000, draft_temperature=1.0) > 1e-3


def test_a_biased_loop_fails_the_same_bar(monkeypatch):
    monkeypatch.setattr(speculate, "draft", as_if_sampled)
    assert loop_p_value(500) < 1e-6


# ---------------------------------------------------------------------------------------------------------------------
# The command line: run as a script, within this process

@pytest.fixture(scope="module")
def toy_dirs(tmp_path_factory):
    """Checkpoints that the command lines below name in capitals."""
    base = tmp_path_factory.mktemp("cli")
    toys.write_target(base / "TARGET", "qwen3-tied")
    tokenizer = Tokenizer.load(base / "TARGET")
    text = plain(Target.load(base / "TARGET"), tokenizer.chat([{"role": "user", "content": "hello"}]), 40)
    toys.write_drafter(base / "DRAFT", base / "TARGET", block_size=8, parrot=max(set(text), key=text.count))
    toys.write_drafter(base / "RANDOM", base / "TARGET")
    toys.write_target(base / "SHORT", "qwen3-tied", max_position_embeddings=64)
    toys.write_target(base / "LLAMA", "llama")
    toys.write_target(base / "NARROW", "qwen3-untied")
    for source, name in (("TARGET", "TRUNCATED"), ("DRAFT", "TRUNCATEDDRAFT")):
        file = shutil.copytree(base / source, base / name) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
    (base / "EMPTY").mkdir()
    for name, file in (("NOTOKENIZER", "tokenizer.json"), ("NOWEIGHTS", "model.safetensors"), ("NOCONFIG", "config.json")):
        (shutil.copytree(base / "TARGET", base / name) / file).unlink()
    file = shutil.copytree(base / "TARGET", base / "NOTEMPLATE") / "tokenizer_config.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "chat_template"}))
    toys.write_target(base / "FEWROWS", "qwen3-tied", vocab_size=toys.N_TOKENS - 1)
    return base


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def cli(toy_dirs, monkeypatch, capsys):
    """cli("--target TARGET --prompt hi", more...) -> exit code, stdout, stderr. The first argument is split at spaces, the others are whole."""
    def run(line, *more, stdin="", terminal=False):
        args = [str(toy_dirs / word) if word.isupper() else word for word in line.split()] + list(more)
        screen, interrupt = Terminal(), signal.getsignal(signal.SIGINT)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["speculate.py"] + args)
            patch.setattr(sys, "stdin", io.StringIO(stdin))
            if terminal:
                patch.setattr(sys, "stdout", screen)
            code = 0
            try:
                runpy.run_path(str(ROOT / "speculate.py"), run_name="__main__")
            except SystemExit as end:
                code = end.code
            finally:
                signal.signal(signal.SIGINT, interrupt)     # a script takes Ctrl-C for itself
        out, err = capsys.readouterr()
        return code, screen.getvalue() if terminal else out, err
    return run


PAIR = "--target TARGET --draft DRAFT "
HI = "--prompt hi --max-new-tokens 5 "
BAD_INPUT = {                                               # command line, words of the error
    "no such target": ("--target NOWHERE " + HI, ["NOWHERE", "no such directory"]),
    "no such drafter": ("--target TARGET --draft NOWHERE " + HI, ["NOWHERE", "no such directory"]),
    "an empty directory": ("--target EMPTY " + HI, ["EMPTY", "no such file"]),
    "an empty drafter": ("--target TARGET --draft EMPTY " + HI, ["EMPTY", "config.json", "no such file"]),
    "no tokenizer": ("--target NOTOKENIZER " + HI, ["tokenizer.json", "no such file"]),
    "no config": ("--target NOCONFIG " + HI, ["config.json", "no such file"]),
    "no weights": ("--target NOWEIGHTS " + HI, ["model.safetensors", "no such file"]),
    "truncated target": ("--target TRUNCATED " + HI, ["TRUNCATED", "model.safetensors"]),
    "truncated drafter": ("--target TARGET --draft TRUNCATEDDRAFT " + HI, ["TRUNCATEDDRAFT", "model.safetensors"]),
    "fewer rows than tokens": ("--target FEWROWS " + HI, ["vocab_size", str(toys.N_TOKENS), str(toys.N_TOKENS - 1)]),
    "a drafter for another target": ("--target NARROW --draft DRAFT " + HI, ["DRAFT", "NARROW", "hidden_size", "64", "48"]),
    "a target as drafter": ("--target TARGET --draft TARGET " + HI, ["dflash_config"]),
    "a drafter as target": ("--target DRAFT " + HI, ["DRAFT", "tokenizer.json"]),
    "prompt over the limit": ("--target SHORT --max-new-tokens 5 --prompt " + "x" * 80, ["max_position_embeddings", "64"]),
    "prompt over the limit, no budget": ("--target SHORT --prompt " + "x" * 80, ["max_position_embeddings", "64"]),
    "budget over the limit": ("--target SHORT --max-new-tokens 60 --prompt x", ["max_position_embeddings", "60", "64"]),
    "block size 0": (PAIR + HI + "--block-size 0", ["block.size", "0"]),
    "block size negative": (PAIR + HI + "--block-size -4", ["block.size", "-4"]),
    "block size no number": (PAIR + HI + "--block-size many", ["--block-size", "many"]),
    "budget 0": (PAIR + "--prompt hi --max-new-tokens 0", ["max_new_tokens", "0"]),
    "budget negative": (PAIR + "--prompt hi --max-new-tokens -1", ["max_new_tokens", "-1"]),
    "budget no whole number": (PAIR + "--prompt hi --max-new-tokens 2.5", ["--max-new-tokens", "2.5"]),
    "temperature negative": (PAIR + HI + "--temperature -1", ["temperature", "-1"]),
    "temperature nan": (PAIR + HI + "--temperature nan", ["temperature", "nan"]),
    "temperature inf": (PAIR + HI + "--temperature inf", ["temperature", "inf"]),
    "draft temperature nan": (PAIR + HI + "--draft-temperature nan", ["draft_temperature", "nan"]),
    "top-p 0": (PAIR + HI + "--temperature 1 --top-p 0", ["top_p", "0"]),
    "top-p 2": (PAIR + HI + "--temperature 1 --top-p 2", ["top_p", "2"]),
    "top-k negative": (PAIR + HI + "--temperature 1 --top-k -1", ["top_k", "-1"]),
    "top-k, greedy": (PAIR + HI + "--top-k 5", ["--top-k", "temperature 0"]),
    "top-p, greedy": (PAIR + HI + "--top-p 0.5", ["--top-p", "temperature 0"]),
    "float16": (PAIR + HI + "--dtype float16", ["float16", "bfloat16"]),
    "another dtype": (PAIR + HI + "--dtype int8", ["--dtype", "int8"]),
    "no such device": (PAIR + HI + "--device nonsense", ["nonsense"]),
    "no such option": (PAIR + HI + "--beams 4", ["--beams"]),
    "a loose argument": (PAIR + HI + "hello", ["hello"]),
    "an option without its value": (PAIR + "--prompt", ["--prompt"]),
    "raw with system": (PAIR + HI + "--raw --system x", ["--raw", "--system"]),
    "raw with thinking": (PAIR + HI + "--raw --thinking", ["--raw", "--thinking"]),
    "raw chat": (PAIR + "--raw", ["--raw", "--prompt"]),
    "thinking without a switch": ("--target LLAMA --thinking " + HI, ["thinking"]),
    "no thinking without a switch": ("--target LLAMA --no-thinking " + HI, ["thinking"]),
    "no template": ("--target NOTEMPLATE " + HI, ["template"]),
    "compare without a drafter": ("--target TARGET --compare " + HI, ["--compare", "--draft"]),
    "block size without a drafter": ("--target TARGET --block-size 4 " + HI, ["--block-size", "--draft"]),
    "draft temperature without a drafter": ("--target TARGET --draft-temperature 1 " + HI, ["--draft-temperature", "--draft"]),
    "draft temperature, no drafts": (PAIR + HI + "--draft-temperature 1 --block-size 1", ["--draft-temperature", "--block-size"]),
}


def error_line(code, out, err):
    """One sentence on stderr, after what a run says of its models; exit code 2; nothing on stdout."""
    assert code == 2 and out == "" and "Traceback" not in err
    *before, last = err.splitlines()
    assert last.startswith("error: ") and not any("error" in line for line in before)
    return last


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(cli, case):
    line, words = BAD_INPUT[case]
    last = error_line(*cli(line))
    assert all(re.search(word, last) for word in words), last


@pytest.mark.parametrize("prompt", ["", "  \n\t "])
def test_empty_prompt(cli, prompt):
    assert "empty" in error_line(*cli(PAIR + "--prompt", prompt))
    assert "empty" in error_line(*cli(PAIR + "--prompt -", stdin=prompt))
    assert "empty" in error_line(*cli(PAIR + "--raw --prompt", prompt))


def test_help(cli):
    code, out, _ = cli("--help")
    assert code == 0
    for option in ("--target", "--draft", "--prompt", "--system", "--thinking", "--no-thinking", "--raw", "--max-new-tokens", "--temperature", "--top-k",
                   "--top-p", "--draft-temperature", "--seed", "--block-size", "--device", "--dtype", "--compare", "--show"):
        assert option in out


def test_text_to_stdout_the_rest_to_stderr(cli, toy_dirs):
    tokenizer, target = Tokenizer.load(toy_dirs / "TARGET"), Target.load(toy_dirs / "TARGET")
    ids = tokenizer.chat([{"role": "user", "content": "hello"}])
    text = tokenizer.decode(plain(target, ids, 40))
    for options in (PAIR, PAIR + "--no-thinking ", PAIR + "--block-size 3 ", PAIR + "--draft-temperature 1 ", "--target TARGET ",
                    PAIR + "--device cpu --dtype float32 "):
        code, out, err = cli(options + "--max-new-tokens 40 --prompt hello")
        assert (code, out) == (0, text + "\n")
        assert "40 tokens" in err and "ms a token" in err and "prefill" in err and text not in err
        assert ("tau" in err) and ("accepted by position" in err) == ("--draft" in options)
    assert "<|im_end|>" in err and "<|endoftext|>" in err   # the stop ids are shown
    code, out, _ = cli(PAIR + "--max-new-tokens 40 --prompt -", stdin="hello")
    assert (code, out) == (0, text + "\n")


def test_options_change_what_they_say(cli):
    def text(options, *more):
        code, out, err = cli(PAIR + "--max-new-tokens 12 --prompt hello " + options, *more)
        assert code == 0, err
        return out
    base = text("")
    assert text("--system terse") != base and text("--thinking") != base and text("--raw") != base
    assert text("--system", "") != base                     # an empty system message is one
    warm = text("--temperature 2")
    assert warm != base and text("--temperature 2") == warm and text("--temperature 2 --seed 0") == warm != text("--temperature 2 --seed 1")
    assert text("--temperature 2 --top-k 1") == base == text("--temperature 2 --top-p 0.000001")
    assert text("--temperature 2 --draft-temperature 1") != warm
    code, _, err = cli(PAIR + HI + "--dtype bfloat16")
    assert code == 0 and "bfloat16" in err
    code, _, err = cli(PAIR + HI + "--block-size 12")
    assert code == 0 and re.search("warning: .*12.* 8", err) and "blocks of 12" in err
    assert "warning" not in cli(PAIR + HI + "--block-size 8")[2]


def test_positions_up_to_the_last_accepted_draft(capsys):
    prefill = Cycle([1], prefill=True, seconds=1.0)
    for accepted, line in (((2, 0, 2, 1), "1:75% 2:50%"), ((0, 0), "none"), ((5,), "1:100% 2:100% 3:100% 4:100% 5:100%")):
        speculate.report(Stats([prefill] + [Cycle([1] * (k + 1), 5, k, seconds=1.0) for k in accepted]))
        assert f"accepted by position: {line}\n" in capsys.readouterr().err


def test_the_embedded_pair_says_what_it_knows(toy_dirs, capsys):
    """A sample of each of its tasks, a line each, and no screenful before the answer."""
    target, drafter, tokenizer = load(str(toy_dirs / "TARGET"), str(toy_dirs / "DRAFT"))
    speculate.introduce(SimpleNamespace(target=None, block_size=None), target, drafter, tokenizer)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6 and all(lines)
    held_out = [json.loads(line) for line in (speculate.TINY / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
    tasks = {row["prompt"]: row["task"] for row in held_out}
    assert {tasks[line.strip()] for line in lines[3:]} == {"arithmetic", "code", "story"}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send")
def test_ctrl_c_while_torch_is_imported(tmp_path):
    """No traceback out of the middle of somebody's module. (A torch that takes its time stands in the real one's place.)"""
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen([sys.executable, str(ROOT / "speculate.py"), "--prompt", "hi"], env=os.environ | {"PYTHONPATH": str(tmp_path)},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")


def test_raw_prompt_is_encoded_as_it_is(cli, toy_dirs):
    tokenizer, target = Tokenizer.load(toy_dirs / "TARGET"), Target.load(toy_dirs / "TARGET")
    text = tokenizer.decode(plain(target, tokenizer.encode_raw("  the <|im_start|>user"), 20))
    assert cli(PAIR + "--raw --max-new-tokens 20 --prompt", "  the <|im_start|>user")[1] == text + "\n"


def test_budget_without_the_option_is_what_fits(cli):
    code, out, err = cli("--target SHORT --raw --prompt", "x" * 30)
    assert code == 0 and "\n34 tokens" in err               # 64 - 30
    code, out, err = cli("--target SHORT --raw --prompt", "x" * 63)
    assert code == 0 and "\n1 tokens, no cycle" in err


def test_compare(cli):
    code, out, err = cli(PAIR + "--compare --max-new-tokens 40 --prompt hello")
    assert code == 0 and "identical: yes" in err and re.search(r"speed-up: \d+\.\d\dx", err) and "plain: 40 tokens" in err
    assert out == cli(PAIR + "--max-new-tokens 40 --prompt hello")[1]
    _, _, err = cli(PAIR + "--compare --block-size 1 --max-new-tokens 10 --prompt hello")
    assert "identical: yes" in err and "speed-up" not in err            # nothing was drafted
    _, _, err = cli(PAIR + "--compare --max-new-tokens 1 --prompt hello")
    assert "identical: yes" in err and "speed-up" not in err
    _, _, err = cli(PAIR + "--compare --max-new-tokens 10 --temperature 1 --prompt hello")
    assert "identical: yes" not in err and "identical: no;" not in err


def test_a_difference_is_reported(toy_dirs):
    """Its place, both tokens, and how near to each other the two best logits are there."""
    target, _, tokenizer = load(str(toy_dirs / "TARGET"))
    ids = tokenizer.chat([{"role": "user", "content": "hello"}])
    text = plain(target, ids, 20)
    assert first_difference(target, tokenizer, ids, text, text) == "yes"
    best, second = target(torch.tensor([ids + text[:7]]))[0][0, -1].topk(2).values.tolist()
    names = [repr(tokenizer.decode([id], skip_special=False)) for id in (text[7], toys.SPECIAL_IDS["<|im_end|>"])]
    line = first_difference(target, tokenizer, ids, text, text[:7] + [toys.SPECIAL_IDS["<|im_end|>"]] + text[8:])
    assert line.startswith("no; token 8 is") and line.index(names[0]) < line.index(names[1])
    assert [float(x) for x in re.search(r"(\S+) and (\S+), (\S+) apart", line).groups()] == pytest.approx([best, second, best - second], rel=0.05)
    assert "the end" in first_difference(target, tokenizer, ids, text, text[:19]) and "the end" in first_difference(target, tokenizer, ids, text[:19], text)


def test_show(cli, monkeypatch):
    line = PAIR + "--max-new-tokens 40 --prompt hello "
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, bare, err = cli(line)
    cycles = int(re.search(r"(\d+) cycles", err)[1])
    accepted = 40 - 1 - cycles                              # each cycle adds one token of the target's own; more where the budget cut the last
    _, coloured, _ = cli(line + "--show", terminal=True)
    assert coloured.count("\x1b[32m") in (accepted, accepted + 1) and coloured.count("\x1b[2m|\x1b[0m") == cycles
    assert re.sub(r"\x1b\[2m\|\x1b\[0m|\x1b\[\d*m", "", coloured) == bare
    _, piped, _ = cli(line + "--show")
    assert "\x1b" not in piped and piped.replace("|", "") == bare.replace("|", "")
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli(line + "--show", terminal=True)[1] == piped
    monkeypatch.delenv("NO_COLOR")
    assert cli(line, terminal=True)[1] == bare              # no colour without --show


def test_characters_are_whole_when_they_are_printed(toy_dirs, monkeypatch):
    tokenizer = Tokenizer.load(toy_dirs / "TARGET")
    ids = tokenizer.encode("a🙂é<|im_end|>日") + tokenizer.encode("🙂")[:2]   # the last one is never completed
    writes = []
    cycles = [Cycle(ids[:3], prefill=True, seconds=1.0)] + [Cycle(ids[i:i + 2], 1, 1, seconds=1.0) for i in range(3, len(ids), 2)]
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=writes.append, flush=lambda: None, isatty=lambda: False))
    text, stats = stream(cycles, tokenizer, show=False)
    assert stats.output == ids and text == "a🙂é日\ufffd" and "".join(writes) == text + "\n"
    assert [w for w in writes if "\ufffd" in w] == ["\ufffd"] and writes.index("🙂") < writes.index("é")


def test_almost_nothing_accepted_is_said_once(cli, target_of, capsys):
    code, _, err = cli("--target TARGET --draft RANDOM --max-new-tokens 120 --prompt hello")
    assert code == 0 and err.count("warning: almost no draft is accepted") == 1
    assert "warning" not in cli("--target TARGET --draft RANDOM --max-new-tokens 45 --prompt hello")[2]     # too early to tell
    assert "warning" not in cli("--target TARGET --max-new-tokens 120 --prompt hello")[2]                   # nothing was drafted
    target = target_of("qwen3-tied")                        # enough is accepted
    text = plain(target, PROMPT, 120)
    cycles = generate(target, Oracle(target, PROMPT + text, 2, errors(0, 8, 128)), PROMPT, 120)
    _, stats = stream(cycles, Tokenizer.load(target.name), show=False)
    assert len(stats.cycles) > 60 and 1.3 < stats.tau < 1.9 and "warning" not in capsys.readouterr().err


def test_chat_keeps_its_history(cli, toy_dirs):
    tokenizer, target = Tokenizer.load(toy_dirs / "TARGET"), Target.load(toy_dirs / "TARGET")
    messages, replies = [{"role": "system", "content": "terse"}], []
    for line in ("hello", "and more"):
        messages.append({"role": "user", "content": line})
        replies.append(tokenizer.decode(plain(target, tokenizer.chat(messages), 12)))
        messages.append({"role": "assistant", "content": replies[-1]})
    code, out, err = cli(PAIR + "--system terse --max-new-tokens 12", stdin="hello\n\n  \nand more\n")
    assert code == 0 and out == replies[0] + "\n" + replies[1] + "\n"
    assert err.count("12 tokens") == 2 and "chat" in err
    alone = cli(PAIR + "--system terse --max-new-tokens 12", stdin="and more\n")[1]
    assert alone.strip("\n") != replies[1].strip("\n")      # or the history would not show
    code, out, _ = cli(PAIR, stdin="")
    assert (code, out) == (0, "")


def test_load(toy_dirs):
    target, drafter, tokenizer = load(str(toy_dirs / "TARGET"))
    assert drafter is None and target.stop_ids == {toys.SPECIAL_IDS["<|im_end|>"], toys.SPECIAL_IDS["<|endoftext|>"]}
    if not torch.cuda.is_available():
        assert (target.device.type, target.dtype) == ("cpu", torch.float32)
    target, drafter, _ = load(str(toy_dirs / "TARGET"), str(toy_dirs / "DRAFT"), "cpu", torch.bfloat16)
    assert {p.dtype for model in (target, drafter) for p in model.parameters()} == {torch.bfloat16}
    assert len(tokens_of(generate(target, drafter, PROMPT, 20))) == 20
    with pytest.raises(InputError, match="float16"):
        load(str(toy_dirs / "TARGET"), str(toy_dirs / "DRAFT"), "cpu", torch.float16)


def test_stop_ids_are_those_of_checkpoint_and_tokenizer(toy_dirs, tmp_path):
    directory = shutil.copytree(toy_dirs / "TARGET", tmp_path / "target")
    (directory / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert load(directory)[0].stop_ids == {7, toys.SPECIAL_IDS["<|im_end|>"]}
    toys.write_drafter(tmp_path / "drafter", directory, mask_token_id=7)
    with pytest.raises(InputError, match="mask_token_id 7"):
        load(directory, tmp_path / "drafter")


# ---------------------------------------------------------------------------------------------------------------------
# A model hub, in the way huggingface_hub wants one

class Hub(http.server.BaseHTTPRequestHandler):
    repos, commit = {}, "0123456789abcdef0123456789abcdef01234567"      # {owner/name: directory}

    def do_GET(self):
        parts = self.path.partition("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2 if is_api else 0:]
        repo, rest = "/".join(parts[:2]), parts[2:]
        if repo not in self.repos:
            return self.answer(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        files = {file.name: file for file in self.repos[repo].iterdir()}
        if is_api and rest[:1] == ["tree"]:
            tree = [dict(type="file", path=name, size=file.stat().st_size, oid=name.encode().hex()) for name, file in files.items()]
            return self.answer(200, json.dumps(tree).encode())
        if is_api:
            return self.answer(200, json.dumps(dict(id=repo, modelId=repo, sha=self.commit, siblings=[dict(rfilename=name) for name in files])).encode())
        if rest[0] != "resolve" or rest[2] not in files:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self.answer(200, files[rest[2]].read_bytes(), {"ETag": f'"{rest[2].encode().hex()}"', "X-Repo-Commit": self.commit})

    do_HEAD = do_GET

    def answer(self, code, body, headers={}):
        self.send_response(code)
        for key, value in ({"Content-Length": str(len(body)), "Content-Type": "application/json"} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_hub_ids(toy_dirs, tmp_path, cli):
    """Served, then from the cache when the server is gone; another id then is an error. Each in a process of its own, as a user starts it."""
    Hub.repos = {"some/target": toy_dirs / "TARGET", "some/drafter": toy_dirs / "DRAFT"}
    (toy_dirs / "TARGET" / "pytorch_model.bin").write_bytes(b"not to be downloaded")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and not key.lower().endswith("_proxy")}
    env |= dict(HF_ENDPOINT=f"http://127.0.0.1:{server.server_address[1]}", HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_PROGRESS_BARS="1",
                PYTHONIOENCODING="utf-8")

    def run(*args):
        done = subprocess.run([sys.executable, str(ROOT / "speculate.py"), *args, "--max-new-tokens", "40", "--prompt", "hello"], env=env, cwd=tmp_path,
                              capture_output=True, encoding="utf-8", timeout=120)
        return done.returncode, done.stdout, done.stderr
    pair = "--target", "some/target", "--draft", "some/drafter"
    expected = cli(PAIR + "--max-new-tokens 40 --prompt hello")[1]
    code, out, err = run(*pair)
    assert (code, out) == (0, expected), err
    assert "some/target" in err and "some/drafter" in err
    assert not list((tmp_path / "home").rglob("*.bin"))
    server.shutdown()
    server.server_close()
    code, out, err = run(*pair)
    assert (code, out) == (0, expected), err
    assert "some/other" in error_line(*run("--target", "some/other"))
