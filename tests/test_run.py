"""A training run as a user starts it: bad input, stopping, going on, what lies in its directory. The embedded target is the model."""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import run
from checkpoint import InputError
from draft import Drafter

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "tiny" / "target" / "model.safetensors").exists(), reason="the embedded target is not there")
SMALL = ["--steps", "6", "--batch-size", "4", "--anchors", "4", "--layers", "1", "--block-size", "4", "--eval-every", "3", "--eval-each", "0"]
HEADER = {"format": "nanodflash responses 1", "target": "tiny/target", "vocab_size": 2048}


def responses(path, header=HEADER, rows=12, mask=None):
    lines, rng = [header], random.Random(0)
    for _ in range(rows):
        prompt, response = ([rng.randrange(1600) for _ in range(n)] for n in (9, 20))
        lines.append({"prompt_ids": prompt, "response_ids": response + ([mask] if mask else [])})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def answers(tmp_path):
    return responses(tmp_path / "responses.jsonl")


def command(*options, code="", **kwargs):
    """train.py in a process of its own; `code` runs first."""
    script = f"import sys; sys.argv = ['train.py', *{[str(o) for o in options]!r}]\nimport run, train\n{code}\nrun.main()"
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, **kwargs)


KILLS = {                           # SIGKILL, and what runs when it comes
    "behind the state's save": "save = run.save_state\ndef saved(path, step, *a):\n    save(path, step, *a)\n    step == 3 and os.kill(os.getpid(), 9)\nrun.save_state = saved",
    "in an evaluation": "calls = []\ndef evaluate(*a, **k):\n    calls.append(0)\n    len(calls) == 2 and os.kill(os.getpid(), 9)\nrun.real_tau = evaluate"}


@pytest.mark.parametrize("moment", ["behind the state's save", pytest.param("in an evaluation", marks=pytest.mark.slow)])
def test_resumed_is_bit_for_bit_the_same(tmp_path, answers, monkeypatch, moment):
    options = ["--data", answers, *SMALL, "--optimizer", "muon"]
    whole = command(*options, "--out", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert command(*options, "--out", tmp_path / "cut", code="import os\n" + KILLS[moment]).returncode == -signal.SIGKILL
    with open(tmp_path / "cut" / "log.jsonl", "a") as log:             # what a kill after a later step leaves
        log.write('{"step": 4, "loss": 9}\n{"step": 5, "lo')
    again = command("--resume", tmp_path / "cut")
    assert again.returncode == 0, again.stderr
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    assert run.start(["--resume", str(tmp_path / "cut")]) == 0, "a run that has ended ends once more"
    states = [torch.load(tmp_path / name / "state.pt") for name in ("whole", "cut")]
    assert all(torch.equal(states[0]["drafter"][name], p) for name, p in states[1]["drafter"].items())
    logs = [[json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()] for name in ("whole", "cut")]
    assert [r["step"] for r in logs[1]] == [1, 2, 3, 4, 5, 6] and [r["loss"] for r in logs[0]] == [r["loss"] for r in logs[1]]
    assert {p.name for p in (tmp_path / "cut").iterdir()} == {"config.json", "model.safetensors", "state.pt", "log.jsonl", "figure.png", "run.json"}
    config = Drafter.load(tmp_path / "cut").config
    assert config.block_size == 4 and config.training_length == 9 + 20
    assert json.loads((tmp_path / "cut" / "run.json").read_text())["versions"]["torch"] == torch.__version__


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves(tmp_path, answers, number):
    slow = f"import os, signal\nfit = run.fit\ndef slow(*a):\n    for r in fit(*a):\n        os.kill(os.getpid(), {int(number)}) if r['step'] == 2 else None\n        yield r\nrun.fit = slow"
    stopped = command("--data", answers, *SMALL, "--out", tmp_path / "run", code=slow)
    assert stopped.returncode == 130 and "--resume" in stopped.stderr and "Traceback" not in stopped.stderr, stopped.stderr
    assert torch.load(tmp_path / "run" / "state.pt")["step"] == 2 and Drafter.load(tmp_path / "run")
    assert command("--resume", tmp_path / "run").returncode == 0


@pytest.mark.slow
def test_a_measurement_that_was_broken_off_is_made_up(tmp_path, answers):
    """A signal while tau is measured; then the same run goes on, and needs neither the drafter it began with nor anything but its directory and the data."""
    broken = "def broken(*a, stop, **k):\n    stop.append(2)\n    return {}\nrun.real_tau = broken"
    start = shutil.copytree(ROOT / "tiny" / "drafter", tmp_path / "start")
    options = ["--data", answers, "--batch-size", "4", "--anchors", "4", "--steps", "2", "--eval-every", "2", "--eval-each", "1"]
    stopped = command(*options, "--init", start, "--out", tmp_path / "run", code=broken)
    assert stopped.returncode == 130 and "stopped after step 2 of 2" in stopped.stderr, stopped.stderr
    assert "tau" not in run.read_log(tmp_path / "run" / "log.jsonl")[-1]
    shutil.rmtree(start)
    again = command("--resume", tmp_path / "run")
    assert again.returncode == 0 and "tau on held-out prompts, story" in again.stderr, again.stderr
    assert [r["step"] for r in run.read_log(tmp_path / "run" / "log.jsonl")] == [1, 2]
    assert set(run.read_log(tmp_path / "run" / "log.jsonl")[-1]["tau"]) == {"arithmetic", "code", "story"}


def test_prompts_are_held_out_of_the_data(answers):
    """Without a file of prompts the last rows are what tau is measured on, and no more trained on: a tenth at most."""
    rows = run.data.rows(responses(answers, rows=40), 2048, 999)
    target = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=4096))
    prompts, left = run.eval_prompts(SimpleNamespace(eval_prompts=None, eval_each=8), target, None, rows)
    assert prompts == [("held out", row.ids[:9].tolist()) for row in rows[36:]] and left == rows[:36]
    prompts, left = run.eval_prompts(SimpleNamespace(eval_prompts=None, eval_each=3), target, None, rows)
    assert len(prompts) == 3 and left == rows[:37]
    assert run.eval_prompts(SimpleNamespace(eval_prompts=None, eval_each=0), target, None, rows) == ([], rows)


@pytest.mark.slow
def test_fifty_kills_while_saving(tmp_path):
    """A child saves state and drafter over and over; it is killed at a random moment; what lies there loads."""
    from test_train import toy_pair
    _, drafter = toy_pair()
    optimisers, rng = run.make_optimisers(drafter, "adamw", 1e-3), random.Random(1)
    for p in drafter.parameters():
        p.grad = torch.ones_like(p)
    optimisers[0].step()
    began = time.perf_counter()
    for _ in range(3):
        run.save_state(tmp_path / "state.pt", 0, drafter, optimisers, {})
        drafter.save(tmp_path)
    once = (time.perf_counter() - began) / 3
    steps = set()
    for _ in range(50):
        child = os.fork()
        if child == 0:
            for step in range(1, 10**6):
                run.save_state(tmp_path / "state.pt", step, drafter, optimisers, {})
                drafter.save(tmp_path)
        time.sleep(rng.uniform(0, 4 * once))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        state = run.load_state(tmp_path)
        steps.add(state["step"])
        drafter.load_state_dict(state["drafter"])
        optimisers[0].load_state_dict(state["optimisers"][0])
        Drafter.load(tmp_path)
    assert max(steps) > 0, "some saves were whole"


BAD = {
    "block size 1": (["--block-size", "1"], "block-size"),
    "taps twice": (["--taps", "3", "3"], "target_layer_ids"),
    "a tap outside": (["--taps", "3", "16"], "target_layer_ids"),
    "mask is a stop id": (["--mask-token-id", "1670"], "stop id"),
    "mask in the data": (["--mask-token-id", "7"], "occurs"),
    "mask outside": (["--mask-token-id", "5000"], "no unused row"),
    "negative steps": (["--steps", "-1"], "steps"),
    "steps and epochs": (["--epochs", "2"], "one of the two"),
    "lr nan": (["--lr", "nan"], "lr"),
    "no such data": (["--data", "nowhere.jsonl"], "not readable"),
    "no such prompts": (["--eval-prompts", "nowhere.jsonl"], "not readable"),
    "no such device": (["--device", "tpu"], "device"),
    "init that contradicts": (["--init", "tiny/drafter"], "--init has 3"),
    "init nowhere": (["--init", "./nowhere"], "nowhere"),
    "block longer than the context": (["--block-size", "4097"], "4096 positions"),
    "gamma of another loss": (["--gamma", "3"], "changes nothing with dpace"),
    "no name of a target": (["--target", ""], "name of a model is empty"),
    "no name of a drafter": (["--init", ""], "no such directory"),
    "unknown option": (["--banana"], "banana"),
    "resume and more": (["--resume", "somewhere"], "stands alone"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, tmp_path):
    data = responses(tmp_path / "responses.jsonl", mask=7)
    options, word = BAD[case]
    with pytest.raises(InputError, match=word):
        run.start(["--data", str(data), *SMALL, "--out", str(tmp_path / "out"), *options])
    assert not (tmp_path / "out").exists()


def test_more_bad_input(tmp_path, answers, monkeypatch):
    def refused(word, *options):
        with pytest.raises(InputError, match=word):
            run.start([str(o) for o in options])
    refused("needs --data", "--target", "somewhere")
    refused("nothing to train on", "--data", responses(tmp_path / "none.jsonl", rows=0), "--out", tmp_path / "x")
    refused("responses of", "--data", responses(tmp_path / "other.jsonl", HEADER | {"target": "another/model"}), "--out", tmp_path / "x")
    refused("no state.pt", "--resume", tmp_path)
    refused("no state.pt", "--resume", tmp_path / "nowhere")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.pt").write_bytes(b"PK\x03\x04 not a state")
    refused("not readable", "--resume", tmp_path / "broken")
    refused("not empty", "--data", answers, "--out", tmp_path / "broken")
    refused("not a directory", "--data", answers, "--out", answers)
    torch.save({"a": 1}, tmp_path / "broken" / "state.pt")
    refused("not a state", "--resume", tmp_path / "broken")
    refused("not a file", "--show-mask", tmp_path)
    for options in (("--lr", 0), ("--layers", 99999), ("--anchors", 10**11), ("--seed", 10**11)):
        refused("is needed", "--data", answers, *options)
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a " * 4000}) + "\n")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "\xff\xfe"}\n')
    refused("long.jsonl, line 1: .* do not fit", "--data", answers, "--out", tmp_path / "x", "--eval-prompts", tmp_path / "long.jsonl")
    refused("bytes.jsonl, line 1", "--data", answers, "--out", tmp_path / "x", "--eval-prompts", tmp_path / "bytes.jsonl")
    monkeypatch.setattr(run.os, "sysconf", lambda name: 1000)
    refused("a step needs about", "--data", answers, "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_resumed_run_is_the_one_begun(tmp_path, answers):
    stop = "fit = run.fit\nrun.fit = lambda *a: (r for r in fit(*a) if r['step'] < 4 or sys.exit(9))"
    assert command("--data", answers, *SMALL, "--out", tmp_path / "run", code=stop).returncode == 9
    answers.write_text(answers.read_text() + answers.read_text().splitlines()[-1] + "\n")
    changed = command("--resume", tmp_path / "run")
    assert changed.returncode == 2 and "data_sha256 changed" in changed.stderr and "Traceback" not in changed.stderr


@pytest.mark.slow
def test_killed_before_its_first_save_it_goes_on(tmp_path, answers):
    early = "def killed(*a):\n    import os; os._exit(9)\nrun.fit = killed"
    assert command("--data", answers, *SMALL, "--out", tmp_path / "run", code=early).returncode == 9
    again = command("--resume", tmp_path / "run")
    assert again.returncode == 0 and Drafter.load(tmp_path / "run"), again.stderr


def test_a_full_disk(tmp_path, answers):
    """Files may have no more than 300 KB: one sentence, exit code 2, and no half-written state."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))"
    full = command("--data", answers, *SMALL, "--out", tmp_path / "run", code=limit)
    assert full.returncode == 2 and "Traceback" not in full.stderr, full.stderr
    assert not (tmp_path / "run" / "state.pt").exists() and not (tmp_path / "run" / "model.safetensors").exists()


def test_init_goes_on_from_a_drafter(tmp_path, answers):
    args = SimpleNamespace(init=str(ROOT / "tiny" / "drafter"), layers=None, taps=None, block_size=None, mask_token_id=None)
    target, _, tokenizer = run.load(None)
    drafter, shipped = run.ready(run.new_drafter(target, args, tokenizer), target, 100), Drafter.load(args.init)
    assert all(torch.equal(p, q) for p, q in zip(drafter.parameters(), shipped.parameters()))
    assert all(p.requires_grad and p.dtype == torch.float32 for p in drafter.parameters()) and drafter.training
    assert drafter.config.training_length == 274           # more than the 100 of now


def test_show_mask(tmp_path):
    assert run.start(["--show-mask", str(tmp_path / "mask.png")]) == 0
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG") and len(list(tmp_path.iterdir())) == 1


def test_the_bare_command_has_the_embedded_recipe_and_others_the_papers():
    bare, paper = run.fill_in(run.parse_args([])), run.fill_in(run.parse_args(["--target", "x", "--data", "y"]))
    assert (bare.layers, bare.anchors, bare.steps) == (run.EMBEDDED["layers"], 24, run.EMBEDDED["steps"])
    assert (paper.layers, paper.anchors, paper.epochs, paper.steps, paper.optimizer, paper.lr, paper.loss) == (5, 512, 6, None, "adamw", 6e-4, "decay")
    assert run.fill_in(run.parse_args(["--epochs", "2"])).steps is None
