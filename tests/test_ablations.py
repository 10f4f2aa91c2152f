"""paper/ablations.py: the drafters it adds against the inference path, the verdict by hand-written numbers, and a toy run of it from end to end."""
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from checkpoint import InputError
from paper import ablations
from paper.ablations import BASE, InputDrafter, circumstances
from sets import user
from speculate import TINY, Stats, generate, load
from test_train import conversation, toy_pair

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = json.loads((ROOT / "paper" / "published.json").read_text())["ablations"]
EMBEDDED = pytest.mark.skipif(not (TINY / "target" / "model.safetensors").exists(), reason="the embedded target is not there")


def toy_pair_with(share):
    target, drafter = toy_pair()
    torch.manual_seed(1)
    return target, InputDrafter(drafter.config, share).initialise(0.1)


INPUT = BASE | {"conditioning": "input"}


# ---------------------------------------------------------------------------------------------------------------------
# What variants change

@pytest.mark.parametrize("share", [1.0, 0.0])
@torch.no_grad()
def test_training_forward_is_the_inference_path(share):
    target, drafter = toy_pair_with(share)
    row, B = conversation(30, 4), 4
    anchors = list(range(4, 29))
    batch = train.make_batch([row], [anchors], len(anchors), B, 49)
    with circumstances(target, INPUT):
        _, features = target(batch.ids, taps=(1, 2, 4))
    together = drafter(target.embed(batch.block_ids), features, batch.positions, train.visible(batch.anchors, batch.ids.shape[1], B)).unflatten(1, (-1, B))
    for j, a in enumerate(anchors):
        cache = drafter.new_cache(64)
        drafter.extend(cache, features[:, :a - 3])         # at once, one more, and two more: as prefill and cycles put them in
        drafter.extend(cache, features[:, a - 3:a - 2])
        drafter.extend(cache, features[:, a - 2:a])
        alone = drafter.propose(cache, target.embed(torch.tensor([[row.ids[a]] + [49] * (B - 1)])))
        assert torch.allclose(together[:, j], alone, atol=1e-4)


@torch.no_grad()
def test_what_the_drafters_see():
    """The block at 8: of tokens and features up to 7, without features of tokens alone."""
    for share in (1.0, 0.0):
        target, drafter = toy_pair_with(share)
        batch = train.make_batch([conversation(30, 4)], [[6, 8, 9]], 3, 4, 49)
        with circumstances(target, INPUT):
            _, features = target(batch.ids, taps=(1, 2, 4))
        assert torch.equal(features[..., :32], target.embed(batch.ids)) and features.shape[-1] == 4 * 32
        mask, blocks = train.visible(batch.anchors, batch.ids.shape[1], 4), target.embed(batch.block_ids)

        def changed(places, columns):
            other = features.clone()
            other[:, places, columns] += 1
            return not torch.equal(*(drafter(blocks, f, batch.positions, mask).unflatten(1, (-1, 4))[:, 1] for f in (features, other)))

        tokens, taps = slice(0, 32), slice(32, None)
        assert changed(slice(7, 8), tokens) and changed(slice(0, 1), tokens)
        assert changed(slice(7, 8), taps) == changed(slice(0, 1), taps) == (share == 1)
        assert not changed(slice(8, None), tokens) and not changed(slice(8, None), taps)


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_they_learn_and_draft_in_the_loop(share):
    """A conversation memorised: every cycle but the last accepts all drafts, and the output is plain decoding's."""
    target, drafter = toy_pair_with(share)
    prompt = conversation(6, 0, 3).ids
    answer = Stats(generate(target, None, prompt, 26)).output
    row = SimpleNamespace(ids=prompt + answer, prompt_length=6)
    anchors = list(train.anchor_candidates(row.ids, 6))
    optimisers, batch = train.make_optimisers(drafter, "muon", 0.02), train.make_batch([row], [anchors], len(anchors), 4, 49)
    with circumstances(target, INPUT):
        for step in range(200):
            record = train.train_step(target, drafter, optimisers, [batch], min(1, (200 - step) / 100), "uniform", None)
            if min(record["accuracy"]) == 1.0 and record["loss"] < 0.05:
                break
        stats = Stats(generate(target, drafter.eval(), prompt, 26))
    assert stats.output == answer and all(c.accepted == 3 for c in stats.cycles[:-1]), [c.accepted for c in stats.cycles]


def test_circumstances_end():
    target, _ = toy_pair()
    draw = train.draw_anchors
    with pytest.raises(ZeroDivisionError), circumstances(target, INPUT | {"placing": "contiguous", "block_size": 4}):
        assert train.draw_anchors(train.anchor_candidates([0] * 16, 3), 24, 0, 0, 0) == [3, 7, 11]
        assert train.draw_anchors(train.anchor_candidates([0] * 16, 3), 2, 0, 5, 9) == [3, 7]
        assert target(torch.tensor([[1, 2]]), taps=(1,))[1].shape[-1] == 2 * 32 and target(torch.tensor([[1, 2]]))[1] is None
        1 / 0
    assert train.draw_anchors is draw and target(torch.tensor([[1, 2]]), taps=(1,))[1].shape[-1] == 32


# ---------------------------------------------------------------------------------------------------------------------
# The verdict

def test_order_and_verdict_by_hand():
    assert ablations.our_order([3.0, 3.2, 3.1], [2.9, 2.8, 2.0]) == 1 and ablations.our_order([1.0, 1.1], [1.2, 1.3]) == -1
    assert ablations.our_order([3.0, 3.2, 3.1], [3.0, 2.8, 2.0]) == 0, "they touch"
    assert ablations.our_order([3.0, 9.0], [4.0, 5.0]) == 0 and ablations.our_order([3.0], [1.0]) is None
    assert [ablations.their_order(gap, "tau") for gap in (0.16, 0.15, -0.15, -0.16, None)] == [1, 0, 0, -1, None]
    assert [ablations.their_order(ratio, "speedup") for ratio in (1.05, 1.03, 0.97, 0.95)] == [1, 0, 0, -1]
    assert [ablations.verdict(ours, 1) for ours in (1, 0, -1, None)] == ["agrees", "within noise", "disagrees", "one seed, no verdict"]
    assert [ablations.verdict(ours, -1) for ours in (1, 0, -1)] == ["disagrees", "within noise", "agrees"]
    assert ablations.verdict(1, 0) == "no order in the paper; ours: ahead" and ablations.verdict(-1, None) == "not in the paper; ours: behind"


def test_compare_by_hand():
    rows = {"a": {"tau": [3.0, 3.1], "speedup": [2.0, 2.2]}, "b": {"tau": [2.0, 2.2], "speedup": [2.1, 2.3]}, "c": {"tau": [1.0, 1.2], "speedup": [1.0, 1.2]}}
    paper = {"a": {"x": {"speedup": 4.0, "tau": 5.0}, "y": {"speedup": 1.0, "tau": 2.0}, "z": {"speedup": 9.0, "tau": 9.0}},
             "b": {"x": {"speedup": 2.0, "tau": 5.5}, "y": {"speedup": 1.0, "tau": 3.0}}, "d": {"x": {"speedup": 1.0, "tau": 1.0}}}
    first, second = ablations.compare(rows, paper, "a")
    assert (first["first"], first["second"]) == ("a", "b") and (second["first"], second["second"]) == ("c", "a")
    assert first["tau"] == {"ours": pytest.approx(0.95), "theirs": -0.75, "verdict": "disagrees"}, "over x and y alone, arithmetic"
    assert first["speedup"] == {"ours": pytest.approx(2.1 / 2.2), "theirs": pytest.approx(2**0.5), "verdict": "within noise"}, "geometric"
    assert second["tau"] == {"ours": pytest.approx(-1.95), "theirs": None, "verdict": "not in the paper; ours: behind"}


def test_published_rows_are_as_printed():
    for ablation in ablations.ABLATIONS.values():
        rows = ablations.published(ablation.table)["rows"]
        assert (ablation.table is None) == (rows == {}) and ablation.reference in ablation.variants
        for label, tasks in rows.items():
            if label == "no target features":
                assert tasks["gsm8k"] == {"speedup": 2.83, "tau": 3.38}
            elif "epoch" in "".join(tasks):
                assert tasks == {"math500, epoch 1": {"speedup": None, "tau": PUBLISHED[ablation.table]["rows"][label][0]}}
            else:
                assert {task: [pair["speedup"], pair["tau"]] for task, pair in tasks.items()} == PUBLISHED[ablation.table]["rows"][label]
    in_both = {name: [v for v in a.variants if v in ablations.published(a.table)["rows"]] for name, a in ablations.ABLATIONS.items()}
    assert {name: len(v) for name, v in in_both.items()} == {"depth": 2, "taps": 2, "block-size": 4, "loss": 2, "anchors": 2, "conditioning": 3, "optimizer": 0}
    assert "gsm8k 3.3x, 4.2; humaneval" in ablations.printed(ablations.published(ablations.ABLATIONS["conditioning"].table)["rows"]["block, KV injection"])


class FakeLab:
    """tau by hand: the learning rate's, and what the seed adds; 0.04 diverges."""

    def __init__(self):
        self.asked = []

    def result(self, changes, seed):
        self.asked.append((changes["loss"], changes["lr"], seed))
        if changes["lr"] == 0.08:
            raise InputError("the loss is nan")
        tau = {0.02: 2.0, 0.04: 3.0}[changes["lr"]] + (changes["loss"] == "dpace") + 0.1 * (seed % 100)
        numbers = {"tau": tau, "speedup": tau / 2, "identical": 1, "responses": 1}
        return {"settings": {"block_size": 16}, "scores": {"16": {"code": numbers, "story": numbers | {"tau": tau + 1, "speedup": tau * 2}}},
                "curve": {"loss": [1.0], "simulated_tau": [tau]}}


def test_a_study_by_hand():
    lab = FakeLab()
    found, curves = ablations.study(lab, "loss", [0, 1, 2])
    assert found["rates"]["D-PACE"] == {0.02: 3.5, 0.04: 4.5, 0.08: 0.0}
    row = found["rows"]["D-PACE"]
    assert row["tau"] == pytest.approx([4.5, 4.6, 4.7]) and row["speedup"] == pytest.approx([4.0, 4.1, 4.2]) and row["responses"] == 6
    assert {(loss, lr) for loss, lr, seed in lab.asked if seed < 100} == {("decay", 0.04), ("uniform", 0.04), ("dpace", 0.04)}
    assert [lr for loss, lr, seed in lab.asked if seed == 100] == 3 * [0.02, 0.04, 0.08]
    decay_uniform, dpace = found["pairs"]
    assert decay_uniform["tau"]["verdict"] == "within noise" and dpace["tau"]["verdict"] == "not in the paper; ours: ahead"
    text = "\n".join(ablations.pieces("loss", found))
    assert "| D-PACE | 4.60 (4.50 to 4.70) | 4.10x (4.00x to 4.20x) |" in text and "0.04: **4.50**" in text and "18 of 18" in text
    assert set(curves) == {"exponential decay", "uniform", "D-PACE"}


# ---------------------------------------------------------------------------------------------------------------------
# The command

@pytest.fixture
def files(tmp_path):
    """Options that make it a toy: random conversations, one held-out prompt, two steps."""
    lines, rng = [{"format": "nanodflash responses 1", "target": "tiny/target", "vocab_size": 2048}], random.Random(0)
    lines += [{"prompt_ids": [rng.randrange(1600) for _ in range(9)], "response_ids": [rng.randrange(1600) for _ in range(40)]} for _ in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "prompt.jsonl").write_text((TINY / "heldout.jsonl").read_text().splitlines()[0] + "\n")
    return ["--data", tmp_path / "data.jsonl", "--eval-prompts", tmp_path / "prompt.jsonl", "--steps", "2", "--batch-size", "2", "--out", tmp_path / "out"]


@pytest.fixture
def signals():
    """The command takes SIGINT and SIGTERM for its own."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def command(*options, code=""):
    """python -m paper.ablations in a process of its own; `code` runs first."""
    script = f"import runpy, sys; sys.argv = ['ablations', *{[str(o) for o in options]!r}]\n{code}\nrunpy.run_module('paper.ablations', run_name='__main__')"
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@EMBEDDED
def test_an_ablation_end_to_end_and_again(files, tmp_path, capsys, monkeypatch, signals):
    monkeypatch.setattr(ablations, "BUDGET", 20)
    options = [str(o) for o in ("conditioning", *files, "--seeds", 0)]
    assert ablations.main(options) == 0
    first = capsys.readouterr().out
    report = json.loads(first.splitlines()[-1])
    found = report["ablations"]["conditioning"]
    assert report["complete"] and report["trained"] == 3 and list(found["rows"]) == ["block, KV injection", "block, input fusion", "no target features"]
    assert all(len(row["tau"]) == 1 and 1 <= row["tau"][0] < 2 and row["identical"] == 1 for row in found["rows"].values())
    assert "| *EAGLE-3-5L, input fusion* | - | - | - | gsm8k 2.1x, 4.2; humaneval 2.2x, 4.3; mt-bench 1.4x, 3.1 |" in first
    assert "one seed, no verdict" in first and "- verdicts: two of ours differ where" in first and "H200" in first
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert len(kept) == 3 and all(path.suffix == ".json" for path in kept)

    monkeypatch.setattr(train, "fit", None)                # who trains now, fails
    assert ablations.main([*options, "--figures", str(tmp_path / "figures")]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["trained"] == 0 and again["ablations"] == report["ablations"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == kept
    assert (tmp_path / "figures" / "ablation-conditioning.png").read_bytes().startswith(b"\x89PNG")

    for key, value in (("--steps", "3"), ("--batch-size", "1"), ("--anchors", "3"), ("--seeds", "1"), ("--data", str(tmp_path / "more.jsonl"))):       # all that matters
        (tmp_path / "more.jsonl").write_text((tmp_path / "data.jsonl").read_text() + "\n".join((tmp_path / "data.jsonl").read_text().splitlines()[1:2]) + "\n")
        with pytest.raises(TypeError, match="NoneType"):
            ablations.main([*options, key, value])


@EMBEDDED
def test_tau_is_that_of_train_and_other_blocks_are_tried(files, monkeypatch):
    monkeypatch.setattr(ablations, "BUDGET", 50)
    lab = ablations.Lab(ablations.parse_args(["depth", *map(str, files)]))
    target, drafter, tokenizer = load()
    prompts = [(task, tokenizer.chat([user(texts[0])])) for task, (_, _, texts) in lab.prompts]
    scores = lab.measure(drafter, lab.base)
    assert set(scores) == {"4", "8", "16"}
    assert {task: round(numbers["tau"], 3) for task, numbers in scores["16"].items()} == train.real_tau(target, drafter, prompts, tokenizer.size, 50)
    assert scores["4"]["arithmetic"]["tau"] < scores["16"]["arithmetic"]["tau"] and scores["16"]["arithmetic"]["plain_ms_a_token"] > 0
    assert set(lab.measure(drafter, lab.base | {"layers": 1})) == {"16"}


@EMBEDDED
@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(files, tmp_path):
    code = """import os, signal, train
fit, calls = train.fit, []
def slow(*a):
    calls.append(a)
    for record in fit(*a):
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        yield record
train.fit = slow"""
    stopped = command("taps", *files, "--seeds", 0, 1, code=code)
    assert stopped.returncode == 130 and "1 of them made now" in stopped.stderr and "Traceback" not in stopped.stderr, stopped.stderr
    assert [path.name[:12] for path in (tmp_path / "out").iterdir()] == ["taps-1-seed-"]
    assert json.loads(stopped.stdout.splitlines()[-1])["complete"] is False


@EMBEDDED
def test_bad_input(files, tmp_path):
    def refused(word, *options):
        with pytest.raises(InputError, match=word):
            ablations.main([str(o) for o in options])
    refused("invalid choice", "width")
    refused("ABLATION", *files)
    refused("--steps is 0", "depth", *files, "--steps", 0)
    refused("--batch-size is -1", "depth", *files, "--batch-size", -1)
    refused("learning rates are chosen on", "loss", *files, "--seeds", 0, 100)
    refused("not readable", "depth", *files, "--data", tmp_path / "nowhere.jsonl")
    refused("not readable", "depth", *files, "--eval-prompts", tmp_path / "nowhere.jsonl")
    assert not (tmp_path / "out").exists()
    missing = command("depth", *files, "--data", tmp_path / "nowhere.jsonl")
    assert missing.returncode == 2 and missing.stderr.startswith("error: ") and missing.stderr.count("\n") == 1, missing.stderr
