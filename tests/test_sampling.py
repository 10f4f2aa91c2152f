"""speculate.py above temperature 0: drafts, verify and the whole loop keep the target's distribution. Biased rules fail the same bars."""
import math

import pytest
import torch

import speculate
from checkpoint import InputError
from fakes import LOOP_V, Oracle, chi_square_p, errors, small_drafter, small_target, tokens_of
from speculate import Sampling, draft, generate, probabilities, verify


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------------------------
# Temperature, top-k, top-p

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


# ---------------------------------------------------------------------------------------------------------------------
# Drafts and verify

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


# ---------------------------------------------------------------------------------------------------------------------
# The loop itself

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
