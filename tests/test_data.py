"""data.py: batched decoding against one prompt at a time, the responses file through kills and bad input, a server with faults, rows for training."""
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import servers
import speculate
import toys
from checkpoint import InputError
from target import Target
from tokenizer import Tokenizer

STOP = toys.SPECIAL_IDS["<|im_end|>"]
OFTEN = range(0, 290, 9)        # stop ids that a random model meets soon


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A target for the command line: two layers, and a stop id that it meets now and then."""
    directory = toys.write_target(tmp_path_factory.mktemp("small"), "qwen3-padded", num_hidden_layers=2, max_position_embeddings=256)
    toys.write_json(directory / "generation_config.json", {"eos_token_id": [STOP, *OFTEN]})
    return directory


@pytest.fixture
def run(small, tmp_path):
    """run(*options, prompts=..., out=...) -> header, rows by line"""
    def call(*options, prompts=None, out="out.jsonl"):
        options = [str(option) for option in options]
        if "--target" not in options:
            options += ["--target", str(small)]
        if "--max-new-tokens" not in options:
            options += ["--max-new-tokens", "12"]
        data.main(["regenerate", "--prompts", str(prompts or tmp_path / "prompts.jsonl"), "--out", str(tmp_path / out), *options])
        return read(tmp_path / out)
    return call


def read(path):
    (_, header, _), *entries = data.read_responses(path)
    rows = {row["line"]: row for _, row, _ in entries}
    assert len(rows) == len(entries), "an answer twice"
    return header, rows


def write_prompts(path, count=30):
    rows = [{"task": f"t{i % 3}", "prompt": "the user and " * (i % 5) + str(i)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def single(target, prompt, budget, stop_ids, vocab=None):
    return [token for cycle in speculate.generate(target, None, prompt, budget, stop_ids, vocab=vocab) for token in cycle.tokens]


def random_prompts(count, longest, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, toys.N_TOKENS, (int(n),), generator=generator).tolist() for n in torch.randint(1, longest, (count,), generator=generator)]


# ---------------------------------------------------------------------------------------------------------------------
# Batched decoding

@pytest.mark.parametrize("kind", sorted(toys.KINDS))
def test_batch_is_single(kind, target_of, monkeypatch):
    target, moves = target_of(kind), []
    move = data.move
    monkeypatch.setattr(data, "move", lambda *args: (moves.append(len(args[1])), move(*args)))
    prompts = random_prompts(10, 40)
    free = data.decode_batch(target, prompts, 24, (), vocab=toys.N_TOKENS)
    stop_ids = {free[i][3 * i + 1] for i in range(7)}                      # at the least seven rows end
    got = data.decode_batch(target, prompts, 24, stop_ids, vocab=toys.N_TOKENS)
    assert got == [single(target, prompt, 24, stop_ids, toys.N_TOKENS) for prompt in prompts]
    assert len(set(map(len, got))) > 2 and moves and moves[0] <= 5         # they end apart, and the cache shrinks with them


def test_batch_outgrows_its_cache(target_of, monkeypatch):
    target, prompts, moves = target_of("qwen3-untied", num_hidden_layers=2), random_prompts(3, 9), []
    move = data.move
    monkeypatch.setattr(data, "move", lambda *args: (moves.append(args[2]), move(*args)))
    got = data.decode_batch(target, prompts, 150, ())
    assert got == [single(target, prompt, 150, ()) for prompt in prompts]
    assert moves == [max(map(len, prompts)) + 150]


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_budget_and_batch_of_one(budget, target_of):
    target = target_of("qwen2")
    assert data.decode_batch(target, [[5, 6, 7]], budget, ()) == [single(target, [5, 6, 7], budget, ())]


def test_stop_id_is_part_of_the_response(target_of):
    target = target_of("qwen3-tied")
    prompts = random_prompts(4, 9)
    free = data.decode_batch(target, prompts, 6, ())
    for slot in range(6):
        stop = {free[0][slot]}
        cut = [next((row[:k + 1] for k, token in enumerate(row) if token in stop), row) for row in free]
        assert data.decode_batch(target, prompts, 6, stop) == cut


def test_no_id_past_the_vocabulary(target_of):
    target = target_of("qwen3-padded", padding_scale=3.0)
    free, bound = (data.decode_batch(target, random_prompts(6, 9), 20, (), vocab) for vocab in (None, toys.N_TOKENS))
    assert max(map(max, free)) >= toys.N_TOKENS > max(map(max, bound))


def test_sampling_draws_from_the_distribution(target_of):
    """Two tokens of one prompt, 4000 times at once, against the softmax."""
    target, n = target_of("qwen3-untied", num_hidden_layers=2), 4000
    draws = data.decode_batch(target, [[1, 2, 3]] * n, 2, (), temperature=0.4, generator=torch.Generator().manual_seed(0))
    assert draws == data.decode_batch(target, [[1, 2, 3]] * n, 2, (), temperature=0.4, generator=torch.Generator().manual_seed(0))
    first = np.bincount([row[0] for row in draws], minlength=toys.N_TOKENS)
    common = int(first.argmax())
    second = np.bincount([row[1] for row in draws if row[0] == common], minlength=toys.N_TOKENS)
    for counts, ids in ((first, [1, 2, 3]), (second, [1, 2, 3, common])):
        with torch.inference_mode():
            p = (target(torch.tensor([ids]))[0][0, -1] / 0.4).softmax(-1).numpy()
        noise = np.sqrt(p * (1 - p) / counts.sum()).sum() / 2            # about the total variation that chance alone makes
        assert np.abs(counts / counts.sum() - p).sum() / 2 < 1.3 * noise


# ---------------------------------------------------------------------------------------------------------------------
# Prompts and the responses file

def test_responses_are_the_targets(run, small, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    header, rows = run("--batch-size", 4)
    target, tokenizer = Target.load(small), Tokenizer.load(small)
    stops = target.stop_ids | tokenizer.stop_ids
    assert sorted(rows) == list(range(1, 31))
    for line, row in rows.items():
        assert (row["prompt"], row["task"]) == (prompts[line - 1]["prompt"], prompts[line - 1]["task"])
        assert row["prompt_ids"] == tokenizer.chat([{"role": "user", "content": row["prompt"]}])
        assert row["response_ids"] == single(target, row["prompt_ids"], 12, stops, tokenizer.size)
        assert row.get("cut", False) == (row["response_ids"][-1] not in stops)
    assert 0 < sum("cut" in row for row in rows.values()) < 30
    assert header["target"] == str(small.resolve()) and header["vocab_size"] == toys.N_TOKENS + 20 and header["template"] == "no thinking"
    assert header["stop_ids"] == sorted(stops) and header["temperature"] == 0 and header["engine"] == "target.py, float32"


def test_batches_hold_prompts_of_like_length(run, tmp_path, monkeypatch):
    write_prompts(tmp_path / "prompts.jsonl")
    widths, decode = [], data.decode_batch
    monkeypatch.setattr(data, "decode_batch", lambda target, prompts, *rest: (widths.append([len(p) for p in prompts]), decode(target, prompts, *rest))[1])
    run("--batch-size", 6)
    assert [n for width in widths for n in width] == sorted((n for width in widths for n in width), reverse=True) and len(widths) == 5


def test_every_form_of_prompt(run, small, tmp_path, capsys):
    user, system, reply = ({"role": role, "content": role * 2} for role in ("user", "system", "assistant"))
    lines = [
        '{"prompt": "plain"}',
        "",
        json.dumps({"messages": [user]}),
        json.dumps({"messages": [system, user, reply, user, reply]}),       # the last turn is replaced
        '{"prompt": "half',
        '{"prompt": "a", "messages": []}',
        json.dumps({"messages": [system, reply]}),
        json.dumps({"messages": [{"role": "user"}]}),
        '{"prompt": 7}',
        '["no object"]',
        json.dumps({"prompt": "x" * 300}),                                  # longer than the context
        '{"prompt": " "}',
        '{"prompt": "\\ud800 half a pair"}',
        "[" * 5000]
    (tmp_path / "prompts.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\n{\"prompt\": \"\xff\"}")
    _, rows = run()
    tokenizer = Tokenizer.load(small)
    assert sorted(rows) == [1, 3, 4, 13]
    assert rows[4]["messages"] == [system, user, reply, user] and "prompt" not in rows[4]
    assert rows[4]["prompt_ids"] == tokenizer.chat([system, user, reply, user])
    said = capsys.readouterr().err
    assert all(f"line {number} skipped" in said for number in (5, 6, 7, 8, 9, 10, 11, 12, 14, 15)) and said.count("skipped: ") == 10
    assert "4 responses, 10 of 14 prompts skipped" in said


def test_plain_text(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n\n  {two}\nthree \n")
    _, rows = run(prompts=tmp_path / "prompts.txt")
    assert {line: row["prompt"] for line, row in rows.items()} == {1: "one", 3: "{two}", 4: "three"}
    (tmp_path / "prompts.txt").write_text('{"prompt": "json by its looks"}\n')
    assert run(prompts=tmp_path / "prompts.txt", out="2")[1][1]["prompt"] == "json by its looks"


def test_template_mode(run, small, checkpoint, tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 2)
    header, rows = run("--thinking", out="thinking")
    assert header["template"] == "thinking"
    assert rows[1]["prompt_ids"] == Tokenizer.load(small).chat([{"role": "user", "content": "0"}], thinking=True)
    assert run("--target", checkpoint("qwen2"), out="chat")[0]["template"] == "chat"
    for option in ("--thinking", "--no-thinking"):
        with pytest.raises(InputError, match="no thinking switch"):
            run("--target", checkpoint("qwen2"), option, out="none")
    assert not (tmp_path / "none").exists()


def test_no_template_continues_the_text(run, tmp_path):
    bare = toys.write_target(tmp_path / "bare", "qwen2", num_hidden_layers=1)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    toys.write_json(bare / "tokenizer_config.json", {key: value for key, value in config.items() if key != "chat_template"})
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the user"}\n{"messages": [{"role": "user", "content": "x"}]}\n')
    header, rows = run("--target", bare)
    assert header["template"] == "raw" and list(rows) == [1] and rows[1]["prompt_ids"] == Tokenizer.load(bare).encode("the user")


def test_limit_then_more(run, tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 8)
    assert sorted(run("--limit", 3)[1]) == [1, 2, 3]
    assert sorted(run()[1]) == list(range(1, 9))


def test_temperature_changes_the_draws(run, tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 6)
    options = [("--temperature", 1), ("--temperature", 1), ("--temperature", 1, "--seed", 1), ()]
    texts = [[row["response_ids"] for row in run(*option, out=str(i))[1].values()] for i, option in enumerate(options)]
    assert texts[0] == texts[1] and len({str(text) for text in texts}) == 3


def test_a_resumed_run_draws_anew(run, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the same"}\n' * 8)
    run("--temperature", 1, "--limit", 4)
    texts = [str(row["response_ids"]) for row in run("--temperature", 1)[1].values()]
    assert texts[:4] != texts[4:]


@pytest.mark.parametrize("change", [("--max-new-tokens", 13), ("--temperature", 1), ("--seed", 1), ("--thinking",), ("--dtype", "bfloat16"), "prompts"])
def test_other_settings_are_refused(change, run, tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 3)
    run()
    before = (tmp_path / "out.jsonl").read_bytes()
    if change == "prompts":
        write_prompts(tmp_path / "prompts.jsonl", 4)
    with pytest.raises(InputError, match="made with .*choose another --out"):
        run(*(() if change == "prompts" else change))
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.parametrize("content", ["notes\n", json.dumps({"format": data.FORMAT}), json.dumps({"format": data.FORMAT}) + "\n", '{"prompt": "mine"}\n', '{"format": "nanodflash resp'])
def test_foreign_files_are_left_alone(content, run, tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 3)
    (tmp_path / "out.jsonl").write_text(content)
    with pytest.raises(InputError, match="not a responses file|made with another (format|target), None"):
        run()
    assert (tmp_path / "out.jsonl").read_text() == content


@pytest.mark.parametrize("options, said", [
    (("--max-new-tokens", 256), "no room for a prompt"), (("--max-new-tokens", 0), "max-new-tokens is 0"), (("--batch-size", 0), "batch-size is 0"),
    (("--limit", -1), "limit is -1"), (("--temperature", -1), "temperature is -1"), (("--temperature", "nan"), "temperature is nan"),
    (("--temperature", 1e-40), "temperature is 1e-40"),
    (("--dtype", "float16"), "invalid choice: .float16"), (("--device", "nowhere"), "not to be had"), (("--target", "no/where/at all"), "no such directory"),
    (("--model", "m"), "need each other"), (("--base-url", "http://x"), "need each other"), (("--base-url", "x", "--model", "m"), "something like http"),
    (("--base-url", "http://x", "--model", "m", "--dtype", "float32"), "change nothing"), (("--nonsense",), "unrecognized"),
    (("--seed", 2**63), "seed is"), (("--seed", -10**30), "seed is"), (("--batch-size", 10**30), "batch-size is 10"),
    *((("--base-url", url, "--model", "m"), "something like http") for url in (
        "http://", "https:///v1", "http://[", "http://[::1", "http://host:port/v1", "http://host:800000/v1", "http://a b/v1", "http://a/v1?key=1", "ftp://a/v1"))])
def test_bad_options(options, said, run, tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 3)
    with pytest.raises(InputError, match=said):
        run(*options)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("prompts, said", [
    (None, "not readable"), ("", "no prompt in it"), ("\n\n", "no prompt in it"), ('{"prompt": " "}\n{"text": "a"}\n[]\n', "no prompt in it")])
def test_bad_prompts_file(prompts, said, run, tmp_path):
    if prompts is not None:
        (tmp_path / "prompts.jsonl").write_text(prompts)
    with pytest.raises(InputError, match=said):
        run()
    assert not (tmp_path / "out.jsonl").exists()


def test_out_of_reach(run, tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 3)
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for out in ("file/out.jsonl", ".", "pipe", "/dev/full"):
        with pytest.raises(InputError, match="not writable"):
            run(out=out)
    assert os.path.exists("/dev/full")


def test_full_disk_from_the_first_line_on(run, tmp_path, monkeypatch):
    write_prompts(tmp_path / "prompts.jsonl", 3)

    def full(file, rows):
        file.write(b'{"format": "nano')
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(data, "append", full)
    with pytest.raises(InputError, match="out.jsonl: not writable .No space left on device"):
        run()
    assert not (tmp_path / "out.jsonl").exists()


def test_an_empty_file_is_a_new_one(run, tmp_path):
    """What a kill leaves that comes before the first line."""
    write_prompts(tmp_path / "prompts.jsonl", 3)
    (tmp_path / "out.jsonl").touch()
    assert run() == run(out="other")


def test_two_runs_at_the_same_time(run, tmp_path, monkeypatch):
    """The second is refused at whatever line of the first it comes, and the first goes on."""
    pytest.importorskip("fcntl", reason="file locks are for POSIX")
    write_prompts(tmp_path / "prompts.jsonl", 9)
    append, calls = data.append, []

    def second_run(file, rows):
        before = (tmp_path / "out.jsonl").read_bytes()
        with pytest.raises(InputError, match="out.jsonl: another run is writing to it"):
            run("--batch-size", 3)
        assert (tmp_path / "out.jsonl").read_bytes() == before
        calls.append(rows)
        append(file, rows)
    monkeypatch.setattr(data, "append", second_run)
    _, rows = run("--batch-size", 3)
    assert len(calls) == 4 and sorted(rows) == list(range(1, 10))
    assert run("--batch-size", 3)[1] == rows                     # one after the other is no trouble


def test_full_disk_then_resumed(run, tmp_path, monkeypatch):
    write_prompts(tmp_path / "prompts.jsonl", 12)
    _, whole = run("--batch-size", 3, out="whole")
    append, calls = data.append, []

    def full(file, rows):
        calls.append(rows)
        if len(calls) == 4:                # the header, two batches, half of the third
            file.write(json.dumps(rows[0]).encode()[:40])
            raise OSError(28, "No space left on device")
        append(file, rows)
    monkeypatch.setattr(data, "append", full)
    with pytest.raises(InputError, match="No space left"):
        run("--batch-size", 3)
    assert len(data.rows(tmp_path / "out.jsonl", toys.N_TOKENS + 20, 999)) <= 6          # readable as it is
    monkeypatch.setattr(data, "append", append)
    assert run("--batch-size", 3)[1] == whole


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGINT])
def test_killed_then_resumed(way, run, small, tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 3000)
    out = tmp_path / "out.jsonl"
    command = [sys.executable, str(Path(data.__file__)), "regenerate", "--target", str(small), "--prompts", str(tmp_path / "prompts.jsonl"),
               "--out", str(out), "--max-new-tokens", "12", "--batch-size", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") > 5):
        time.sleep(0.02)
    process.send_signal(way)
    said = process.communicate(timeout=20)[1].decode()
    assert process.returncode == (-9 if way == signal.SIGKILL else 130), said
    if way == signal.SIGINT:
        assert "stopped; the same command goes on" in said and "Traceback" not in said
    _, before = read(out)
    assert 4 <= len(before) < 3000
    with open(out, "ab") as file:
        file.write(b'{"line": 2999, "prompt_ids": [1, 2')                                  # as a kill within a write leaves it
    os.utime(out)
    limit = max(before) + 40
    _, after = run("--limit", limit)
    assert sorted(after) == sorted(set(before) | set(range(1, limit + 1))) and before.items() <= after.items()
    assert [row["line"] for row in map(json.loads, out.read_text().splitlines()[1:])][:len(before)] == list(before)


def test_exit_code(tmp_path):
    command = [sys.executable, str(Path(data.__file__)), "regenerate", "--prompts", str(tmp_path / "none"), "--out", str(tmp_path / "out"), "--limit", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr == "error: --limit is 0, but a number from 1 up is needed\n"


# ---------------------------------------------------------------------------------------------------------------------
# A server

@pytest.fixture
def server(monkeypatch):
    """server(script) -> its options; `script(prompt ids, attempt)` gives a choice, (status, text) or 'close'."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    started = servers.start_openai()

    def start(script):
        def answer(prompt, number):
            given = script(prompt, started.tries[prompt])
            return {"choices": [given]} if isinstance(given, dict) else given
        started.script = answer
        return ["--base-url", started.url + "/", "--model", "toy"]
    start.started = started
    yield start
    servers.stop(started)


def test_server_with_faults(run, small, server, tmp_path, monkeypatch, capsys):
    """What the local path makes, through a server that fails in every way, with ids given as vLLM or as llama.cpp does."""
    write_prompts(tmp_path / "prompts.jsonl", 24)
    header, local = run(out="local")
    answers = {tuple(row["prompt_ids"]): row for row in local.values()}
    numbers = {tuple(row["prompt_ids"]): line for line, row in local.items()}
    monkeypatch.setattr(data, "TIMEOUT", 0.5)
    faults = [(500, "broken"), (429, "busy"), "close", (200, "cut short"), (200, "[" * 200000), (200, "{}"), (200, '{"choices": [[]]}'),
              (200, '{"choices": [{"text": 3}]}')]
    wait = threading.Event()

    def script(prompt, attempt):
        line = numbers[prompt]
        if attempt == 1 and line <= len(faults):
            return faults[line - 1]
        if attempt == 1 and line == 9:
            wait.wait(1)                               # slower than the client waits
        if line == 10 and not refused:
            return 400, "too long for me"
        wait.wait(0.02)
        ids = answers[prompt]["response_ids"]
        finish = "length" if "cut" in answers[prompt] else "stop"
        given = {"token_ids": ids} if line % 2 else {"logprobs": {"content": [{"id": i, "logprob": 0} for i in ids]}}
        return {"text": "", "finish_reason": finish} | given

    refused = []
    options = server(script)
    header2, rows = run(*options, "--batch-size", 4)
    assert rows == {line: row for line, row in local.items() if line != 10}
    said = capsys.readouterr().err
    assert "prompt of line 10 skipped: no answer of the server (HTTP Error 400: Bad Request: too long for me)" in said
    assert server.started.tries[tuple(local[10]["prompt_ids"])] == 1                      # refused is not asked again
    assert 2 <= server.started.most <= 4 + 1           # the one that was given up for slowness may still be there
    path, body = server.started.paths[0], server.started.bodies[0]
    assert path == "/v1/completions" and body["model"] == "toy" and body["temperature"] == 0 and body["max_tokens"] == 12 and body["return_token_ids"]
    assert body["stream"] is False and body["stop_token_ids"] == header["stop_ids"] and body["top_p"] == 1 and body["repetition_penalty"] == 1
    assert len({body["seed"] for body in server.started.bodies}) == 24
    assert header2 == header | {"engine": "server, model toy"}

    refused.append("not any more")
    asked = len(server.started.bodies)
    assert run(*options)[1] == local and len(server.started.bodies) == asked + 1        # only what was missing
    with pytest.raises(InputError, match="made with another engine"):
        run()


def test_server_gives_text_alone(run, checkpoint, server, tmp_path, capsys):
    target = checkpoint("qwen3-untied")
    tokenizer = Tokenizer.load(target)
    texts = {"0": ("the user and", "stop"), "1": ("and on and on", "length"), "2": ("half a \ufffd", "stop"), "3": ("", "stop"), "4": ("", "length"),
             "5": ("words <|im_end|>\nmore", "stop"), "6": ("combine e\u0301", "stop"), "7": ("gone", "abort")}
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": key}) + "\n" for key in texts))
    keys = {tuple(tokenizer.chat([{"role": "user", "content": key}])): key for key in texts}
    script = lambda prompt, attempt: dict(zip(("text", "finish_reason"), texts[keys[prompt]]), logprobs=None)
    _, rows = run(*server(script), "--target", target)
    assert {line: row["response_ids"] for line, row in rows.items()} == {
        1: tokenizer.encode("the user and") + [STOP], 2: tokenizer.encode("and on and on"), 4: [STOP], 6: tokenizer.encode("words <|im_end|>")}
    assert all(row["reencoded"] for row in rows.values()) and [line for line in sorted(rows) if "cut" in rows[line]] == [2]
    said = capsys.readouterr().err
    assert "line 3 skipped: the server gave text alone" in said and "line 7 skipped: the server gave text alone" in said      # NFC would change the last
    assert "line 5 skipped: an empty response" in said and "line 8 skipped: the server ended the response by 'abort'" in said


@pytest.mark.parametrize("answer", [{"token_ids": [toys.N_TOKENS], "finish_reason": "stop"}, {"token_ids": ["1"], "finish_reason": "stop"}, (503, "away")])
def test_server_given_up(answer, run, server, tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 60)
    with pytest.raises(InputError, match="20 prompts in a row failed"):
        run(*server(lambda prompt, attempt: answer), "--batch-size", 8)
    assert read(tmp_path / "out.jsonl")[1] == {} and len(server.started.tries) < 40
    assert max(server.started.tries.values()) == (data.TRIES if answer == (503, "away") else 1)


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:70000/v1"])
def test_server_that_answers_nothing(url, run, server, tmp_path):
    """Fewer prompts than it takes to give a server up; a port that there is not, to which no request can be sent."""
    write_prompts(tmp_path / "prompts.jsonl", 3)
    options = server(lambda prompt, attempt: (503, "away"))
    with pytest.raises(InputError, match="answered none of the prompts"):
        run(*options, *(("--base-url", url) if url else ()))
    assert run(*server(lambda prompt, attempt: {"token_ids": [STOP], "finish_reason": "stop"}))[1].keys() == {1, 2, 3}


# ---------------------------------------------------------------------------------------------------------------------
# Rows for training

HEADER = {"format": data.FORMAT, "target": "Qwen/Toy", "vocab_size": 100}


def write_responses(path, *rows, header=HEADER, end=""):
    path.write_text("".join(json.dumps(row) + "\n" for row in (header, *rows)) + end)
    return path


def test_rows_mask_is_the_response(run, small, tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 12)
    _, made = run()
    kept = data.rows(tmp_path / "out.jsonl", toys.N_TOKENS + 20, 999, target=small)
    expected = [row for row in made.values() if len(row["response_ids"]) > 1]
    assert len(kept) == len(expected) > 5
    for row, source in zip(kept, expected):
        assert row.ids.tolist() == source["prompt_ids"] + source["response_ids"] and row.task == source["task"]
        assert row.ids[row.prompt_length:].tolist() == source["response_ids"] and row.prompt_length == len(source["prompt_ids"])


def test_rows_are_cut_and_dropped(tmp_path, capsys):
    path = write_responses(tmp_path / "r", *({"prompt_ids": [1] * p, "response_ids": [2] * r} for p, r in ((3, 0), (3, 1), (3, 2), (3, 9), (7, 5), (9, 5))),
                           end='{"prompt_ids": [1], "resp')
    kept = data.rows(path, 100, 9)
    assert [(row.ids.tolist(), row.prompt_length, row.task) for row in kept] == [([1] * p + [2] * r, p, None) for p, r in ((3, 2), (3, 6), (7, 2))]
    assert "3 of 6 samples dropped" in capsys.readouterr().err


def test_rows_of_another_target(tmp_path):
    path = write_responses(tmp_path / "r", {"prompt_ids": [1], "response_ids": [2, 3]})
    assert len(data.rows(path, 100, 9)) == len(data.rows(path, 100, 9, target="Qwen/Toy")) == 1
    with pytest.raises(InputError, match="responses of Qwen/Toy, not of Qwen/Other"):
        data.rows(path, 100, 9, target="Qwen/Other")
    with pytest.raises(InputError, match="vocab_size 100, but this target's is 120"):
        data.rows(path, 120, 9)


def test_target_names():
    assert data.target_id("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert data.target_id(data.ROOT / "tests") == data.target_id(str(data.ROOT / "tests" / ".." / "tests")) == "tests"
    assert data.target_id("/usr") == "/usr"


@pytest.mark.parametrize("row, said", [
    ({"prompt_ids": [1], "response_ids": [2]}, "nothing to train on"),
    ({"prompt_ids": [1]}, "line 2: prompt_ids and"),
    ({"prompt_ids": [1], "response_ids": [2, 100]}, "line 2"),
    ({"prompt_ids": [-1], "response_ids": [2, 3]}, "line 2"),
    ({"prompt_ids": [1], "response_ids": [2, 3.5]}, "line 2"),
    ({"prompt_ids": [], "response_ids": []}, "line 2"),
    ({"prompt_ids": "ab", "response_ids": "c"}, "line 2"),
    ({"prompt_ids": [[1]], "response_ids": [[2]]}, "line 2")])
def test_rows_of_broken_files(row, said, tmp_path):
    with pytest.raises(InputError, match=said):
        data.rows(write_responses(tmp_path / "r", row), 100, 9)


def test_rows_of_what_is_no_responses_file(tmp_path):
    for content in (b"", b"{}\n", b"\x00\xff\n", b'{"format": "nanodflash responses 1"'):
        (tmp_path / "r").write_bytes(content)
        with pytest.raises(InputError, match="not a responses file"):
            data.rows(tmp_path / "r", 100, 9)
    with pytest.raises(InputError, match="not readable"):
        data.rows(tmp_path / "none", 100, 9)
    write_responses(tmp_path / "r", end='garbage\n{"prompt_ids": [1], "response_ids": [2, 3]}\n')
    with pytest.raises(InputError, match="line 2: not a line that was written here"):
        data.rows(tmp_path / "r", 100, 9)
