"""paper/serving.py against a small local server that speaks SGLang's or vLLM's API and fails in every way: what is counted, what is told, what is refused."""
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import data
import servers
from checkpoint import InputError
from paper import serving

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = json.loads(serving.PUBLISHED.read_text())


@pytest.fixture
def serve(monkeypatch):
    """serve(script, pages) -> a server, its address in .url; `script(prompt, number of the request)` gives an answer, (status, text) or 'close'."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    started = []

    def start(script, owner="sglang", **pages):
        pages = {"/v1/models": {"data": [{"id": "toy", "owned_by": owner}]}} | {"/" + name: page for name, page in pages.items()}
        started.append(servers.start_openai(script, pages))
        return started[-1]
    yield start
    for server in started:
        servers.stop(server)


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """run(server, options...) -> the table's lines, the JSON document, stderr. Prompts are the numbers 0 to 9; retries do not wait."""
    monkeypatch.setattr(serving.time, "sleep", lambda seconds: None)
    (tmp_path / "prompts.txt").write_text("".join(f"{i}\n" for i in range(10)))

    def go(server, *options, code=None):
        argv = ["--base-url", server.url, "--model", "toy", "--prompts", str(tmp_path / "prompts.txt"), *map(str, options)]
        if code is None:
            serving.main(argv)
        else:
            with pytest.raises(code):
                serving.main(argv)
        said = capsys.readouterr()
        lines = said.out.splitlines()
        return lines, json.loads(lines[-1]) if lines else None, said.err
    return go


def chat(tokens, verifications=None, finish="stop"):
    """A chat completion, with SGLang's meta_info where the verifications are given."""
    meta = {} if verifications is None else {"meta_info": {"completion_tokens": tokens, "spec_verify_ct": verifications, "spec_accept_length": 99.0}}
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": finish} | meta],
            "usage": {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": None}}


def cells(lines, start):
    """The cells of the table's one line that starts so."""
    found, = [line for line in lines if line.startswith(start)]
    return [cell.strip() for cell in found.strip("|").split("|")][2:]


def test_what_is_counted(run, serve):
    """SGLang: the first c requests of each row are dropped from tokens, responses, tau and time; the next ones go on where they ended."""
    def script(prompt, number):
        if number == 1:
            threading.Event().wait(1)
        return chat(10 * int(prompt) + 5, int(prompt) + 1)
    server = serve(script, get_server_info={"version": "0.5.9", "api_key": "hidden"})
    lines, document, said = run(server, "--concurrency", 2, 1, 2, "--num-prompts", 9, "--hardware", "two old cores")
    assert [body["messages"][0]["content"] for body in server.bodies[:10]] == [str(i) for i in range(10)]          # c = 1: one to warm up, then nine
    assert len(server.bodies) == 1 + 9 + 2 + 9
    one, two = document["rows"]
    assert (one["concurrency"], two["concurrency"]) == (1, 2) and document["complete"]
    one, two = one["drafter"], two["drafter"]
    assert one["tokens"] == sum(10 * i + 5 for i in range(1, 10)) and two["tokens"] == sum(10 * i + 5 for i in [*range(2, 10), 0])
    assert (one["answered"], one["failed"], one["retries"]) == (9, 0, 0)
    assert one["tokens_per_second"] == one["tokens"] / one["seconds"] and one["seconds"] < 1       # the slow request was the warm-up
    assert one["tau_by_response"] == pytest.approx(sum((10 * i + 4) / (i + 1) for i in range(1, 10)) / 9)
    assert one["tau_pooled"] == pytest.approx(sum(10 * i + 4 for i in range(1, 10)) / sum(i + 1 for i in range(1, 10)))
    assert lines[0].startswith("toy on two old cores; sglang 0.5.9; ") and "hidden" not in "\n".join(lines)
    assert "python -m paper.serving --base-url" in lines[1] and document["command"] == lines[1]
    assert cells(lines, "| ours | with the drafter, tokens/s")[:2] == [f"{one['tokens_per_second']:.0f}", f"{two['tokens_per_second']:.0f}"]
    assert cells(lines, "| ours | tau, mean")[0] == f"{one['tau_by_response']:.2f}" and cells(lines, "| ours | tau, pooled")[1] == f"{two['tau_pooled']:.2f}"
    assert not any("speed-up" in line for line in lines) and "warning" not in said
    body = server.bodies[0]
    assert body["model"] == "toy" and body["stream"] is False and body["max_tokens"] == 2048 and body["temperature"] == 0 and body["return_meta_info"] is True
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and body["top_p"] == 1 and body["top_k"] == -1


def test_how_many_prompts(run, serve, monkeypatch):
    assert (serving.PER_REQUEST, serving.MOST) == (128, 1024)
    monkeypatch.setattr(serving, "PER_REQUEST", 3)
    monkeypatch.setattr(serving, "MOST", 11)
    server = serve(lambda prompt, number: chat(1, 0))
    _, document, _ = run(server, "--concurrency", 1, 2, 4)
    assert [row["drafter"]["answered"] for row in document["rows"]] == [3, 6, 11]
    assert len(server.bodies) == (1 + 3) + (2 + 6) + (4 + 11)


def test_options_reach_the_server(run, serve):
    server = serve(lambda prompt, number: chat(1))
    lines, document, _ = run(server, "--concurrency", 1, "--num-prompts", 1, "--temperature", 0.5, "--max-new-tokens", 7, "--thinking")
    body = server.bodies[0]
    assert (body["temperature"], body["max_tokens"], body["chat_template_kwargs"]) == (0.5, 7, {"enable_thinking": True})
    assert "temperature 0.5, at most 7 new tokens, thinking on" in lines[0] and document["thinking"] is True


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_so_many_are_under_way(concurrency, run, serve):
    """Each batch of the server's waits until as many are there as there should be; were it fewer, every one would wait in vain."""
    barrier, late = threading.Barrier(concurrency), []

    def script(prompt, number):
        try:
            barrier.wait(5)
        except threading.BrokenBarrierError:
            late.append(number)
        return chat(1)
    server = serve(script)
    run(server, "--concurrency", concurrency, "--num-prompts", 3 * concurrency)
    assert server.most == concurrency and not late and len(server.bodies) == 4 * concurrency


def test_vllm_counters(run, serve):
    """The difference over what counts, summed over the engines; the warm-up, what was before it and other counters are not in it."""
    def metrics():
        n = len(server.bodies)
        return "\n".join([
            "# TYPE vllm:spec_decode_num_drafts_total counter",
            f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="a b}}"}} {1000 + 10 * n}.0',
            f'vllm:spec_decode_num_drafts_total{{engine="1",model_name="a b}}"}} {2e6 + 10 * n:e}',
            f'vllm:spec_decode_num_drafts_created{{engine="0"}} {1.7e9 + n}',
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {150 * n}',
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="a b}}"}} {7 + 90 * n}.0',
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {50 * n}.0', ""])
    server = serve(lambda prompt, number: chat(20), "vllm", version={"version": "0.28.0"}, metrics=metrics)
    lines, document, said = run(server, "--concurrency", 2, "--num-prompts", 8)
    row = document["rows"][0]["drafter"]
    assert row["tau_pooled"] == pytest.approx(1 + 90 / 20) and row["tau_by_response"] is None and row["tokens"] == 160
    assert cells(lines, "| ours | tau, pooled") == ["–", "5.50", "–", "–", "–", "–"] and not any("mean over responses" in line for line in lines)
    assert "; vllm 0.28.0; " in lines[0] and "warning" not in said


def test_baseline_and_speedup(run, serve):
    fast = serve(lambda prompt, number: chat(30, 5))
    slow = serve(lambda prompt, number: threading.Event().wait(0.02) or chat(30, 0), "vllm", metrics=lambda: "vllm:spec_decode_num_drafts_total 0.0\n")
    lines, document, said = run(fast, "--baseline-url", slow.url + "/", "--concurrency", 1, 4, "--num-prompts", 8)
    for batch in slice(0, 9), slice(9, 13), slice(13, 21):                               # the same prompts: c = 1, the warm-up of c = 4, c = 4
        assert sorted(map(str, fast.bodies[batch])) == sorted(map(str, slow.bodies[batch]))
    assert len(fast.bodies) == len(slow.bodies) == 21
    for row in document["rows"]:
        assert row["speedup"] == row["drafter"]["tokens_per_second"] / row["baseline"]["tokens_per_second"] > 1.5
        assert row["baseline"]["tokens"] == row["drafter"]["tokens"] == 240 and row["baseline"]["tau_pooled"] is None
    assert cells(lines, "| ours | speed-up")[:2] == [f"**{row['speedup']:.2f}x**" for row in document["rows"]]
    assert cells(lines, "| ours | no drafter")[0] == f"{document['rows'][0]['baseline']['tokens_per_second']:.0f}" and "warning" not in said
    assert "; without a drafter: vllm; " in lines[0]


@pytest.mark.parametrize("ours, plain, remark", [
    (chat(9), chat(9), "The server tells of no drafting"),                              # no meta_info at all
    (chat(9, 0), chat(9), "The server tells of no drafting"),
    (chat(9, 2), chat(9, 3), "drafts, too")])
def test_no_speedup_without_drafts(ours, plain, remark, run, serve):
    baseline = serve(lambda prompt, number: plain)
    lines, document, said = run(serve(lambda prompt, number: ours), "--baseline-url", baseline.url, "--concurrency", 1, "--num-prompts", 2)
    assert document["rows"][0]["speedup"] is None and not any(line.startswith("| ours | speed-up") for line in lines)
    assert "warning: " in said and remark in said and any(remark in line for line in lines)


def test_almost_no_draft_accepted(run, serve):
    lines, _, said = run(serve(lambda prompt, number: chat(9, 8)), "--concurrency", 1, "--num-prompts", 2)
    assert "warning: Almost no draft is accepted" in said and any(line.startswith("Almost no draft") for line in lines)


def test_faults_are_tried_again(run, serve, monkeypatch):
    """Every request that counts fails once, each in a way of its own; tokens are counted once, and the table says so."""
    monkeypatch.setattr(data, "TIMEOUT", 0.3)
    faults = [(500, "broken"), (429, "busy"), "close", (200, "cut in the middle"), (200, "[" * 200000), (200, '{"choices": [[]], "usage": 3}'),
              chat("many"), chat(3, finish="abort"), "slow"]

    def script(prompt, number):
        if prompt == "0" or server.tries[prompt] > 1:
            return chat(7, 2)
        fault = faults[int(prompt) - 1]
        if fault == "slow":
            threading.Event().wait(0.6)                # longer than the client waits
            return chat(1000, 1)
        return fault
    server = serve(script)
    lines, document, said = run(server, "--concurrency", 1, "--num-prompts", 9)
    row = document["rows"][0]["drafter"]
    assert (row["answered"], row["failed"], row["retries"], row["tokens"], row["tau_pooled"]) == (9, 0, 9, 63, 3.0)
    assert server.tries == {"0": 1} | {str(i): 2 for i in range(1, 10)}
    assert "9 requests had to be sent again, 0 got no answer" in said and any("sent again" in line for line in lines)


def test_retries_are_bounded(run, serve):
    """A prompt that never works is given up after so many tries, one that is refused at once; the others count, and the server is not given up for it."""
    server = serve(lambda prompt, number: (503, "away") if prompt == "3" else (400, "too long for me") if prompt == "5" else chat(7))
    _, document, said = run(server, "--concurrency", 2, "--num-prompts", 120)
    row = document["rows"][0]["drafter"]
    assert server.tries["3"] == 12 * data.TRIES and server.tries["5"] == 12 and (row["answered"], row["failed"], row["tokens"]) == (96, 24, 96 * 7)
    assert "no answer of the server (HTTP Error 400: Bad Request: too long for me)" in said and "24 got no answer" in said and 24 > serving.FAILURES


def test_server_given_up(run, serve):
    server = serve(lambda prompt, number: (500, "out of memory"))
    lines, _, said = run(server, "--concurrency", 4, code=InputError)
    assert not lines and len(server.bodies) == 4 * data.TRIES and "4 under way, warm-up" in said
    server.bodies.clear()
    server.script = lambda prompt, number: chat(5, 1) if number <= 1 + 5 + 2 else (404, "gone")       # after the first row and the second's warm-up
    lines, document, _ = run(server, "--concurrency", 1, 2, "--num-prompts", 5, code=InputError)
    assert len(document["rows"]) == 1 and document["complete"] is False and cells(lines, "| ours | responses counted")[:2] == ["5", "–"]


def test_server_away(run, serve):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    server = serve(lambda prompt, number: chat(1))
    with pytest.raises(InputError, match="no OpenAI-like server answers there .*refused"):
        serving.main(["--base-url", nobody, "--model", "toy"])
    lines, _, _ = run(server, "--baseline-url", nobody, code=InputError)
    assert not lines and not server.bodies                                 # nothing was measured in vain
    with pytest.raises(InputError, match="/models: HTTP Error 404.* ends in /v1"):
        serving.main(["--base-url", server.url.removesuffix("/v1"), "--model", "toy"])
    server.pages["/v1/models"] = lambda: "<html>"
    with pytest.raises(InputError, match="no OpenAI-like server answers there"):
        serving.main(["--base-url", server.url, "--model", "toy"])


def test_the_papers_rows(run, serve):
    """All of them, unchanged, marked, with their hardware; a column for every concurrency of ours or theirs."""
    lines, document, _ = run(serve(lambda prompt, number: chat(1, 0)), "--concurrency", 2, "--num-prompts", 2)
    theirs = [line for line in lines if line.startswith("| the paper's")]
    assert [cell.strip() for cell in next(line for line in lines if "requests under way" in line).strip("|").split("|")][2:] == ["1", "2", "4", "8", "16", "32"]
    assert len(theirs) == 2 * len(PUBLISHED["sglang"]["rows"])
    for row in PUBLISHED["sglang"]["rows"]:
        for what, key in ("no drafter", "baseline_tok_s"), (f"DFlash, tau {row['tau']}", "dflash_tok_s"):
            shown = cells(lines, f"| the paper's | {row['target']}, {row['task']}: {what}, tokens/s |")
            assert shown == [str(row[key][0]), "–", *map(str, row[key][1:])]
    assert any(line.startswith("The paper's: arXiv 2602.06036v2, on SGLang, one B200, FA4") for line in lines)
    assert document["paper"] == PUBLISHED["sglang"] | {"source": "arXiv 2602.06036v2"}


def test_prompts(tmp_path, serve, capsys):
    path = tmp_path / "prompts.jsonl"
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]
    path.write_text(json.dumps({"prompt": "one", "task": "x"}) + "\n\n" + json.dumps({"messages": turns}) + "\n")
    assert serving.read_prompts(path) == [[{"role": "user", "content": "one"}], turns[:2]]
    path = tmp_path / "plain"
    path.write_text("one \n{two\n")
    assert serving.read_prompts(path) == [[{"role": "user", "content": "one"}], [{"role": "user", "content": "{two"}]]
    server = serve(lambda prompt, number: chat(1))
    serving.main(["--base-url", server.url, "--model", "toy", "--concurrency", "1", "--num-prompts", "2"])
    said = capsys.readouterr()
    first = json.loads((ROOT / "tiny" / "heldout.jsonl").read_text().splitlines()[0])["prompt"]
    assert server.bodies[0]["messages"] == [{"role": "user", "content": first}] and "tiny/heldout.jsonl" in said.err and "tiny/heldout.jsonl" in said.out


@pytest.mark.parametrize("options, message", [
    (["--concurrency", "0"], "--concurrency is 0"), (["--concurrency", "4", "-1"], "--concurrency is -1"), (["--concurrency", "two"], "invalid int"),
    (["--concurrency", "2000"], "only 1024 prompts count"), (["--concurrency", "8", "--num-prompts", "4"], "only 4 prompts count"),
    (["--num-prompts", "0"], "--num-prompts is 0"), (["--max-new-tokens", "0"], "--max-new-tokens is 0"), (["--temperature", "nan"], "--temperature is nan"),
    (["--temperature", "-1"], "--temperature is -1"), (["--base-url", "localhost:30000/v1"], "is no address such as http"),
    (["--base-url", "http://"], "is no address"), (["--base-url", "http://host:port/v1"], "base-url"), (["--baseline-url", "ftp://x/v1"], "is no address"),
    (["--baseline-url", "http://127.0.0.1:9/v1/"], "are the same server"), (["--speed", "9"], "unrecognized arguments: --speed"),
    (["--prompts", "/none"], "/none: not readable"), (["--prompts", "/tmp"], "/tmp: not readable")])
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        serving.main(["--base-url", "http://127.0.0.1:9/v1", "--model", "toy", *options])


@pytest.mark.parametrize("content, message", [
    (b"", "no prompt in it"), (b'{"prompt": "a"}\nplain\n', "line 2: not a JSON object"), (b'{"prompt": "a"}\n\n{"text": "b"}\n', "line 3: not a JSON object"),
    (b'{"prompt": "a", "messages": []}\n', "line 1: not a JSON"), (b'{"prompt": 3}\n', "line 1: a prompt or turn that is no text"),
    (b'{"messages": []}\n', "no turn to answer"),
    (b"fine\n\xff\xfe\n", "line 2: .*decode")])
def test_bad_prompts(content, message, tmp_path):
    (tmp_path / "prompts").write_bytes(content)
    with pytest.raises(InputError, match=message):
        serving.main(["--base-url", "http://127.0.0.1:9/v1", "--model", "toy", "--prompts", str(tmp_path / "prompts")])


def command(*options):
    return subprocess.Popen([sys.executable, "-m", "paper.serving", *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_command_line(serve):
    """What the two exits look like from outside: bad input at once, and Ctrl-C in the middle of the second row."""
    hangs, reached = threading.Event(), threading.Event()

    def script(prompt, number):
        if number > 1 + 3 + 2:                         # the first row and the second's warm-up are through
            reached.set()
            hangs.wait(30)
        return chat(6, 2)
    server = serve(script)
    stopped = command("--base-url", server.url, "--model", "toy", "--concurrency", "1", "2", "--num-prompts", "3")
    refused = command("--base-url", server.url, "--model", "toy", "--concurrency", "0")
    out, err = refused.communicate(timeout=60)
    assert (refused.returncode, out, err) == (2, "", "error: --concurrency is 0, but a number from 1 up is needed\n")
    assert reached.wait(60)
    stopped.send_signal(signal.SIGINT)
    began = time.perf_counter()
    out, err = stopped.communicate(timeout=20)
    hangs.set()
    document = json.loads(out.splitlines()[-1])
    assert stopped.returncode == 130 and time.perf_counter() - began < 10 and "Traceback" not in err
    assert "stopped; what was measured until then is in the table" in err
    assert [row["concurrency"] for row in document["rows"]] == [1] and document["complete"] is False and document["rows"][0]["drafter"]["tau_pooled"] == 2.5
