"""The embedded pair: speculative output is plain decoding's, token by token, on held-out prompts and for every block size.

9 prompts as a user runs it, 200 in CI. A difference is allowed only where the two best logits differ by less than 1e-5 of their size.
"""
import json
import os

import pytest
import torch

from speculate import TINY, Stats, generate, load

COUNT = 200 if os.environ.get("CI") else 9
pytestmark = pytest.mark.skipif(not (TINY / "drafter" / "model.safetensors").exists(), reason="the embedded drafter is not there")


@pytest.fixture(scope="module")
def pair():
    torch.set_num_threads(1)               # models this small gain nothing from a second thread, and lose much on a busy machine
    return load(device="cpu")


@pytest.fixture(scope="module")
def prompts():
    """COUNT held-out prompts, the three tasks in turn -> [(task, prompt)]."""
    rows = [json.loads(line) for line in (TINY / "heldout.jsonl").read_text().splitlines()]
    return [(row["task"], row["prompt"]) for row in rows[:COUNT]]


def decode(pair, drafter, prompt, block_size=None):
    target, _, tokenizer = pair
    ids = tokenizer.chat([{"role": "user", "content": prompt}])
    return Stats(generate(target, drafter, ids, 256, target.stop_ids, block_size=block_size, vocab=tokenizer.size)), ids


@torch.inference_mode()
def near_tie(pair, ids):
    """Whether the two best logits behind `ids` are within 1e-5 of their size."""
    target, _, tokenizer = pair
    best, second = target(torch.tensor([ids]), last_only=True, vocab=tokenizer.size)[0][0, -1].topk(2).values.tolist()
    return best - second < 1e-5 * abs(best)


@pytest.fixture(scope="module")
def plain(pair, prompts):
    return [decode(pair, None, prompt)[0].output for _, prompt in prompts]


@pytest.mark.parametrize("block_size", [1, 2, 5, 16])
def test_output_is_the_targets_own(pair, prompts, plain, block_size):
    accepted, rejected = {}, {}
    for (task, prompt), wanted in zip(prompts, plain):
        stats, ids = decode(pair, pair[1], prompt, block_size)
        for i, (a, b) in enumerate(zip(wanted, stats.output)):
            if a != b:
                assert near_tie(pair, ids + wanted[:i]), f"{prompt!r}: token {i} is {b}, plainly {a}"
                print(f"near-tie at token {i} of {prompt!r}")
                break
        else:
            assert len(wanted) == len(stats.output)
        accepted[task] = accepted.get(task, 0) + sum(c.accepted for c in stats.cycles)
        rejected[task] = rejected.get(task, 0) + sum(c.accepted < c.drafted for c in stats.cycles)
    if block_size > 1:
        assert all(accepted[task] > 0 and rejected[task] > 0 for task in ("arithmetic", "code", "story")), (accepted, rejected)


def test_tau_is_worth_a_drafter(pair, prompts):
    """Far above 1 in every task, so that a drafter shipped by mistake is noticed."""
    taus = {}
    for task, prompt in prompts[:24]:
        taus.setdefault(task, []).append(decode(pair, pair[1], prompt)[0].tau)
    means = {task: sum(values) / len(values) for task, values in taus.items()}
    assert means["arithmetic"] > 3 and means["code"] > 3 and means["story"] > 1.5, means


def test_checkpoints_are_small_and_unused_rows_stay_silent(pair):
    target, drafter, tokenizer = pair
    assert (TINY / "target" / "model.safetensors").stat().st_size <= 8e6
    assert (TINY / "drafter" / "model.safetensors").stat().st_size <= 4e6
    assert drafter.config.block_size == 16 and len(drafter.config.target_layer_ids) == 5
    assert tokenizer.size <= drafter.config.mask_token_id < target.config.vocab_size
