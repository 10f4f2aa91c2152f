"""tiny/pretrain.py: stopped and resumed is the unbroken run, bit for bit; files are whole or not there; bad input is refused."""
import json
import os
import runpy
import shutil
import signal
import sys

import pytest
import torch

import toys
from checkpoint import InputError
from target import Target
from tiny import pretrain

SETTINGS = ["--steps", "3", "--tokens", "256"]


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    """A tokenizer from fewer texts than the real one's."""
    pytest.importorskip("tokenizers", reason="pip install tokenizers: the embedded target's tokenizer is made with it")
    out, examples = tmp_path_factory.mktemp("tokenizer"), pretrain.examples
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "examples", lambda *args: (e for e, _ in zip(examples(*args), range(300))))
        pretrain.make_tokenizer(out)
    assert [path.name for path in out.iterdir()] == ["tokenizer.json"]
    return out / "tokenizer.json"


@pytest.fixture
def out(tokenizer_json, tmp_path):
    shutil.copy(tokenizer_json, tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def signals():
    """The training takes Ctrl-C and SIGTERM for itself."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def unbroken(tokenizer_json, tmp_path_factory):
    """-> the directory of a run that nothing stopped."""
    out = tmp_path_factory.mktemp("unbroken")
    shutil.copy(tokenizer_json, out)
    pretrain.main([*SETTINGS, "--out", str(out)])
    return out


def stop_in_step(number, way, monkeypatch):
    """Send a signal in the middle of a step, counted from 1."""
    train_step, calls = pretrain.train_step, []

    def stopped(*args):
        calls.append(args)
        if len(calls) == number:
            os.kill(os.getpid(), way)
        return train_step(*args)
    monkeypatch.setattr(pretrain, "train_step", stopped)


def test_what_is_written_is_a_checkpoint(unbroken):
    target = Target.load(unbroken)
    assert target.config.num_hidden_layers == 16 and len(target.stop_ids) == 1
    assert sorted(path.name for path in unbroken.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "state.pt", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("way, old_state", [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_stopped_and_resumed_is_the_unbroken_run(way, old_state, unbroken, out, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_in_step(2, way, patch)
        with pytest.raises(SystemExit) as end:
            pretrain.main([*SETTINGS, "--out", str(out)])
    assert end.value.code == 130 and "stopped after step 2 of 3" in capsys.readouterr().err and not (out / "model.safetensors").exists()
    state = torch.load(out / "state.pt")
    assert state["step"] == 2
    if old_state:                                           # of a time when states did not hold their settings
        del state["settings"]
        torch.save(state, out / "state.pt")
    pretrain.main([*SETTINGS, "--out", str(out)])
    assert (out / "model.safetensors").read_bytes() == (unbroken / "model.safetensors").read_bytes()
    ours, theirs = (torch.load(directory / "state.pt") for directory in (out, unbroken))
    assert ours["settings"] == theirs["settings"] == {"seed": 0, "steps": 3, "tokens": 256, "lr": 0.02, "embedding_lr": 0.004}
    for name, p in theirs["model"].items():
        assert torch.equal(ours["model"][name], p), name
    for mine, other in zip(ours["optimisers"], theirs["optimisers"], strict=True):
        assert mine["param_groups"] == other["param_groups"] and mine["state"].keys() == other["state"].keys()
        assert all(torch.equal(mine["state"][i][key], value) for i, moments in other["state"].items() for key, value in moments.items())


def test_a_stop_in_the_last_step_finishes(unbroken, out, monkeypatch):
    stop_in_step(3, signal.SIGTERM, monkeypatch)
    pretrain.main([*SETTINGS, "--out", str(out)])
    assert (out / "model.safetensors").read_bytes() == (unbroken / "model.safetensors").read_bytes()


def test_a_crash_leaves_the_last_whole_file(tmp_path, monkeypatch):
    file, order = tmp_path / "state.pt", []
    pretrain.write_whole(file, b"old")
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (order.append("on the disk"), fsync(number)))

    def crash(source, target):
        order.append("renamed")
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError):
        pretrain.write_whole(file, b"new")
    assert order == ["on the disk", "renamed"] and file.read_bytes() == b"old"


@pytest.mark.parametrize("options, said", [
    (("--steps", "0"), "--steps is 0"), (("--steps", "1.5"), "--steps"), (("--tokens", "-1"), "--tokens is -1"), (("--lr", "nan"), "--lr is nan"),
    (("--lr", "0"), "--lr is 0"), (("--embedding-lr", "inf"), "--embedding-lr is inf"), (("--seed", str(10**30)), "fit 64 bits"), (("--beams",), "--beams")])
def test_bad_options(options, said, tmp_path):
    with pytest.raises(InputError, match=said):
        pretrain.main([*options, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="C.. compiler"):
        pretrain.main(["--compile", "--out", str(tmp_path / "out")])


def test_no_tokenizers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match="pip install tokenizers"):
        pretrain.main([*SETTINGS, "--out", str(tmp_path / "out")])


def test_out_of_reach(tokenizer_json, tmp_path):
    (tmp_path / "file").touch()
    for out in ("file", "file/out"):
        with pytest.raises(InputError, match=f"{out}: not writable"):
            pretrain.main([*SETTINGS, "--out", str(tmp_path / out)])


def test_broken_files(unbroken, out):
    whole = (unbroken / "state.pt").read_bytes()
    for content in (b"", b"junk", whole[:-1000]):
        (out / "state.pt").write_bytes(content)
        with pytest.raises(InputError, match="state.pt: not readable as a state"):
            pretrain.main([*SETTINGS, "--out", str(out)])
    state = torch.load(unbroken / "state.pt")
    for value in ([1, 2], {}, state | {"optimisers": []}, state | {"model": {}}, state | {"settings": None}, state | {"settings": {}}):
        torch.save(value, out / "state.pt")
        with pytest.raises(InputError, match="state.pt: not readable as a state"):
            pretrain.main([*SETTINGS, "--out", str(out)])
    assert not (out / "model.safetensors").exists()
    (out / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="tokenizer.json: not readable"):
        pretrain.main([*SETTINGS, "--out", str(out)])
    toys.write_tokenizer(out, thinking=False)
    table = json.loads((out / "tokenizer.json").read_text())
    table["added_tokens"] = [token for token in table["added_tokens"] if token["content"] != "<|im_end|>"]
    (out / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(InputError, match="tokenizer.json: has .*im_end"):
        pretrain.main([*SETTINGS, "--out", str(out)])


@pytest.mark.parametrize("option, value", [("--steps", "4"), ("--tokens", "512"), ("--lr", "0.01"), ("--embedding-lr", "0.01"), ("--seed", "1")])
def test_a_state_of_other_settings(option, value, unbroken):
    before = (unbroken / "state.pt").read_bytes()
    with pytest.raises(InputError, match=f"state.pt: of a run with {option} .*, but now it is {value}"):
        pretrain.main([*SETTINGS, option, value, "--out", str(unbroken)])
    assert (unbroken / "state.pt").read_bytes() == before


def test_exit_code(tmp_path, monkeypatch, capsys):
    """The sentence on stderr, nothing on stdout, exit code 2: from the command line itself."""
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--steps", "0", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end, pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "tiny.pretrain")
        runpy.run_module("tiny.pretrain", run_name="__main__")
    said = capsys.readouterr()
    assert (end.value.code, said.out, said.err) == (2, "", "error: --steps is 0, but a number from 1 up is needed\n")
