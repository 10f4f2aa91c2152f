"""speculate.py's command line: text to stdout, the rest to stderr, every option does what it says, bad input is refused in one sentence; and loading, from
directories and from a hub.
"""
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import servers
import speculate
import toys
from checkpoint import InputError
from fakes import PROMPT, Oracle, errors, plain, tokens_of
from speculate import Cycle, Stats, generate, identical, load, stream
from target import Target
from tokenizer import Tokenizer

ROOT = Path(speculate.__file__).resolve().parent


# ---------------------------------------------------------------------------------------------------------------------
# Run as a script, within this process

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
@pytest.mark.parametrize("closed", ["", *(pytest.param(how, marks=pytest.mark.slow) for how in ("2>&-", ">&-"))])
def test_streams_that_are_odd_or_closed(tmp_path, closed):
    """Text that a terminal cannot show is no reason to lose an answer; what is said never lands in a stdout whose stderr is closed."""
    code = "import sys; from checkpoint import command_line; command_line(lambda: print('said', file=sys.stderr) or print('\\u2013 \\ud800') if sys.stdout else 0)"
    done = subprocess.run(f'{sys.executable} -c "{code}" {closed}', shell=True, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stdout == ("" if closed == ">&-" else "? ?\n") and "Traceback" not in done.stderr, done.stderr


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
    assert identical(target, tokenizer, ids, text, text) == "yes"
    best, second = target(torch.tensor([ids + text[:7]]))[0][0, -1].topk(2).values.tolist()
    names = [repr(tokenizer.decode([id], skip_special=False)) for id in (text[7], toys.SPECIAL_IDS["<|im_end|>"])]
    line = identical(target, tokenizer, ids, text, text[:7] + [toys.SPECIAL_IDS["<|im_end|>"]] + text[8:])
    assert line.startswith("no; token 8 is") and line.index(names[0]) < line.index(names[1])
    assert [float(x) for x in re.search(r"(\S+) and (\S+), (\S+) apart", line).groups()] == pytest.approx([best, second, best - second], rel=0.05)
    assert "the end" in identical(target, tokenizer, ids, text, text[:19]) and "the end" in identical(target, tokenizer, ids, text[:19], text)


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


def test_a_prompt_longer_than_what_the_drafter_learnt_from(cli, toy_dirs, tmp_path):
    drafter = shutil.copytree(toy_dirs / "DRAFT", tmp_path / "taught")
    raw = json.loads((drafter / "config.json").read_text())
    raw["dflash_config"]["training_length"] = 40
    (drafter / "config.json").write_text(json.dumps(raw))
    said = "this drafter learnt from conversations of at most 40: expect a lower tau"
    assert said in cli(f"--target TARGET --draft {drafter} --max-new-tokens 5 --prompt {'long' * 40}")[2]
    assert said not in cli(f"--target TARGET --draft {drafter} --max-new-tokens 5 --prompt short")[2]


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


# ---------------------------------------------------------------------------------------------------------------------
# Loading

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

class Hub(servers.Quiet):
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


def test_hub_ids(toy_dirs, tmp_path, cli):
    """Served, then from the cache when the server is gone; another id then is an error. Each in a process of its own, as a user starts it."""
    Hub.repos = {"some/target": toy_dirs / "TARGET", "some/drafter": toy_dirs / "DRAFT"}
    (toy_dirs / "TARGET" / "pytorch_model.bin").write_bytes(b"not to be downloaded")
    server = servers.start(Hub)
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and not key.lower().endswith("_proxy")}
    env |= dict(HF_ENDPOINT=server.url, HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_PROGRESS_BARS="1", PYTHONIOENCODING="utf-8")

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
    servers.stop(server)
    code, out, err = run(*pair)
    assert (code, out) == (0, expected), err
    assert "some/other" in error_line(*run("--target", "some/other"))
