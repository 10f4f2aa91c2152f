"""speculate.py's loop: the output is the target's own, token by token (at temperature 0; test_sampling.py has the others), it ends where it should, the models
are given what they should be, and the counts are right.

Most loops here run with an Oracle in the drafter's place: it knows the target's text and errs where it is told to, so that each test chooses what is
accepted and what is rejected.
"""
import math
from types import SimpleNamespace

import pytest
import torch

import speculate
import toys
from checkpoint import InputError
from draft import Drafter
from fakes import PROMPT, Oracle, errors, plain, small_drafter, tokens_of
from speculate import Cycle, Sampling, Stats, commit, generate, verify
from target import Target


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
