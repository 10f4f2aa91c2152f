"""bench.py: the figures are those of a trace counted by hand, the sets are the right ones or refused, a cut run goes on, bad input is one sentence."""
import contextlib
import hashlib
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bench
import servers
import speculate
import toys
from checkpoint import InputError
from fakes import LOOP_V, chi_square_p, small_drafter, small_target
from sets import read_prompts, read_set
from speculate import TINY, Cycle, Stats, commit, first_difference

ROOT = Path(bench.__file__).resolve().parent
SHARED = ROOT.parent / "shared"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="there is no ../shared here, with the sets' files and the paper's tables")
needs_pair = pytest.mark.skipif(not (TINY / "drafter" / "model.safetensors").exists(), reason="the embedded drafter is not there")


# ---------------------------------------------------------------------------------------------------------------------
# Numbers, counted by hand

STOP = 9
# two responses; of each cycle the drafts that were right, and they with the target's token behind them
RAW = ((3, [1, 2, 3, 4]), (0, [5]), (3, [6, STOP, 7, 8])), ((2, [1, 2, 3]), (3, [4, 5, 6, 7]))
BUDGETS = 100, 5


def response(raw, budget):
    """Cycles of 0.3 s drafting, 0.8 verifying, 1.2 in all, behind a prefill of 1.5, cut as the loop cuts them; and their plain twin, 1 s a step."""
    cycles, left = [Cycle([0], seconds=1.5, prefill=True)], budget - 1
    for right, tokens in raw:
        tokens, accepted, _ = commit(right, tokens, left, {STOP})
        cycles.append(Cycle(tokens, 3, accepted, 0.3, 0.8, 1.2))
        left -= len(tokens)
    steps = [Cycle([token], verify_seconds=1.0, seconds=1.0) for cycle in cycles[1:] for token in cycle.tokens]
    return Stats([Cycle([0], seconds=1.0, prefill=True), *steps]), Stats(cycles)


def rows_of(raws=RAW, budgets=BUDGETS, **label):
    label = {"context": None, "temperature": 0.0, "set": "s", "turn": 0, "prompt_tokens": 10} | label
    pairs = [response(raw, budget) for raw, budget in zip(raws, budgets)]
    return [label | {"row": i, "runs": {"plain": bench.numbers(plain), "d": bench.numbers(fast)}} for i, (plain, fast) in enumerate(pairs)]


def test_a_trace_counted_by_hand():
    """Tokens committed by the cycles: 4, 1, 2 (a stop id, with a right draft behind it); 3, 1 (the budget)."""
    c = bench.summarise(rows_of(), "d")
    assert (c["prompts"], c["responses"], c["tokens_in"], c["tokens_out"]) == (2, 2, 10, (8 + 5) / 2)
    assert c["tau"] == pytest.approx((7 / 3 + 2) / 2) and c["tau_pooled"] == pytest.approx(11 / 5)
    assert c["plain_ms_a_token"] == pytest.approx(1000 * (7 / 8 + 4 / 5) / 2) and c["ms_a_token"] == pytest.approx(1000 * (3.6 / 8 + 2.4 / 5) / 2)
    assert c["speedup"] == pytest.approx((7 / 8 + 4 / 5) / (3.6 / 8 + 2.4 / 5))
    assert c["speedup_end_to_end"] == pytest.approx((8 / 8 + 5 / 5) / (5.1 / 8 + 3.9 / 5))
    assert (c["cycle_ms"], c["draft_ms"], c["verify_ms"], c["rest_of_cycle"]) == pytest.approx((1200, 300, 800, 0.1 / 1.2))
    assert c["explained"] == pytest.approx(c["tau"] * c["plain_ms_a_token"] / 1200)
    # (committed, accepted): (4, 3) (1, 0) (2, 2) (3, 2) (1, 1). Slot 3 of the third and slot 2 of the last were not reached: the response ended there.
    assert c["by_length"] == [(1.0, 4 / 5, 2), (3 / 5, 1.0, 1), (2 / 5, 1 / 2, 1), (None, None, 1)]


def test_a_response_that_ended_in_its_prefill_counts_nowhere():
    """No cycle of its own, in either run."""
    rows = rows_of()
    assert bench.summarise(rows + rows_of(([],), (1,), row=7), "d") == bench.summarise(rows, "d")
    assert bench.summarise(rows_of(([],), (1,)), "d") == {"prompts": 0, "responses": 0}


def test_nothing_drafted_gives_no_speedup():
    for c in (bench.summarise(rows_of(), "plain"), bench.report_of(rows_of(), ["plain"])[0]["methods"]["plain"]):
        assert not {"speedup", "tau", "speedup_geometric", "tau_arithmetic"} & c.keys()


def test_intervals():
    rng = np.random.default_rng(1)
    slow, quick, taus = rng.normal(4, 0.4, 80), rng.normal(2, 0.2, 80), rng.normal(5, 1, 80)
    found = bench.intervals(list(range(80)), slow, quick, taus)
    assert found == bench.intervals(list(range(80)), slow, quick, taus)
    speedup, tau = found["speedup_95"], found["tau_95"]
    half = 1.96 * taus.std() / 80**0.5
    assert tau == pytest.approx((taus.mean() - half, taus.mean() + half), abs=0.03)
    assert speedup[0] < slow.mean() / quick.mean() < speedup[1]
    # two turns that say the same are one observation
    twice = [np.repeat(values, 2) for values in (slow, quick, taus)]
    assert bench.intervals(np.repeat(np.arange(80), 2).tolist(), *twice)["tau_95"] == pytest.approx(tau)
    assert bench.intervals([3, 3], slow[:2], quick[:2], taus[:2]) == {}


def test_averages_are_geometric_and_arithmetic():
    rows = rows_of() + rows_of(([(3, [1, 2, 3, 4])],), (50,), set="other")
    entry = bench.report_of(rows, ["d"])[0]["methods"]["d"]
    a, b = entry["sets"].values()
    assert b["tau"] == 4 and b["speedup"] == pytest.approx(4 / 1.2)
    assert entry["speedup_geometric"] == pytest.approx((a["speedup"] * b["speedup"]) ** 0.5) and entry["tau_arithmetic"] == pytest.approx((a["tau"] + 4) / 2)
    assert sum(count for *_, count in entry["by_length"]) == 6


def test_first_difference():
    """Where two outputs part, the two best logits of the target."""
    target, ids, plain = small_target(50), [4, 7, 9], [11, 12, 13, 14]
    assert first_difference(target, ids, plain, plain, 50) is None
    best = target(torch.tensor([ids + plain[:2]]))[0][0, -1].topk(2).values
    assert first_difference(target, ids, plain, [11, 12, 40], 50) == (2, pytest.approx(best[0].item(), abs=1e-4), pytest.approx(best[1].item(), abs=1e-4))


# ---------------------------------------------------------------------------------------------------------------------
# Beside the paper

def table_cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_the_papers_rows_stand_unchanged_beneath_ours():
    stored = json.loads((ROOT / "paper" / "published.json").read_text())
    sets = ["gsm8k", "mbpp", "own"]
    for target, T in itertools.product(("Qwen3-4B", "Qwen3-8B"), (0.0, 1.0)):
        paper = bench.published(f"/models/{target}", [T])
        report = bench.report_of([row for name in sets for row in rows_of(set=name, temperature=T)], ["d"])
        head, _, ours, *theirs, less = table_cells(bench.main_table(report, sets, paper))
        assert head[2:] == ["gsm8k", "tau", "mbpp", "tau", "own", "tau", "average (geometric)", "tau (arithmetic)"] and ours[1] == "d"
        printed = {row["method"]: row for row in stored["table1"]["rows"] if (row["target"], row["temperature"]) == (target, T)}
        assert [row[1] for row in theirs] == [f"*paper, H200: {method}*" for method in printed] and len(printed) == 3
        for row, values in zip(theirs, printed.values()):
            pairs = [(f"{values[name]['speedup']:.2f}x", f"{values[name]['tau']:.2f}") for name in ("gsm8k", "mbpp", "avg")]
            assert row[2:] == [*pairs[0], *pairs[1], "-", "-", *pairs[2]]
        c, dflash = report[0]["methods"]["d"]["sets"]["mbpp"], printed["DFlash (16)"]["mbpp"]
        assert less[1] == "d less the paper's DFlash (16)" and less[6:] == ["-"] * 4
        assert less[4:6] == [f"{c['speedup'] - dflash['speedup']:+.2f}", f"{c['tau'] - dflash['tau']:+.2f}"]
        assert stored["table1"]["setup"] in "".join(bench.pieces({}, report, sets, paper))


def test_no_published_rows_for_other_targets_or_prompt_lengths():
    for target, T in ((None, 0.0), ("Qwen/Qwen3-14B", 0.0), ("Qwen/Qwen3-8B", 0.5)):
        assert bench.published(target, [T])["rows"] == []
    report = bench.report_of(rows_of(context=4000, set="gsm8k"), ["d"])
    assert "paper" not in bench.main_table(report, ["gsm8k"], bench.published("Qwen3-8B", [0.0]))
    assert report[0]["label"] == "T = 0, 4,000 tokens"


@needs_shared
def test_published_numbers_are_those_handed_over():
    assert json.loads((ROOT / "paper" / "published.json").read_text()) == json.loads((SHARED / "paper_tables.json").read_text())


# ---------------------------------------------------------------------------------------------------------------------
# The sets

@pytest.fixture
def server(monkeypatch, tmp_path):
    """A server for one small set of three rows; `answer` says how it answers. No cache yet."""
    rows = [{"question": f"What is {i} + {i}?"} for i in range(3)]
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)

    class Handler(servers.Quiet):
        answer, asked = "whole", 0

        def do_GET(self):
            Handler.asked += 1
            body = content.replace(b"What", b"what") if self.answer == "other" else content
            self.send_response(404 if self.answer == "missing" else 200)
            if self.answer != "cut without a length":
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:50] if self.answer.startswith("cut") else body)

    here = servers.start(Handler)
    Handler.stop = lambda: servers.stop(here)
    address = here.url + "/test.jsonl"
    file, _, _, _, prompts, texts = bench.SETS["gsm8k"]
    monkeypatch.setitem(bench.SETS, "gsm8k", (file, address, hashlib.sha256(content).hexdigest(), 3, prompts, texts))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield Handler
    with contextlib.suppress(OSError):
        Handler.stop()


def test_a_set_is_fetched_once(server, tmp_path):
    first = read_set("gsm8k")
    assert sorted(row for row, _, _ in first) == [0, 1, 2] and server.asked == 1
    assert [file.name for file in (tmp_path / "cache" / "nanodflash").iterdir()] == ["gsm8k_test.jsonl"]
    server.stop()                                  # offline from here
    assert read_set("gsm8k") == first
    assert read_set("gsm8k", tmp_path / "cache" / "nanodflash") == first


@pytest.mark.parametrize("answer, words", [
    ("missing", "404"), ("other", "sha256"), ("cut", "IncompleteRead"), ("cut without a length", "sha256"), (None, "refused")])
def test_a_set_that_is_not_whole_is_refused(server, tmp_path, answer, words):
    server.stop() if answer is None else setattr(server, "answer", answer)
    with pytest.raises(InputError, match=words) as caught:
        read_set("gsm8k")
    assert "http://127.0.0.1" in str(caught.value) and not list(tmp_path.rglob("*.jsonl*"))


def test_copies_are_checked_too(server, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="--data-dir"):
        read_set("gsm8k", tmp_path)
    read_set("gsm8k")
    cached = tmp_path / "cache" / "nanodflash" / "gsm8k_test.jsonl"
    cached.write_bytes(cached.read_bytes()[:-9])
    for folder in (None, cached.parent):
        with pytest.raises(InputError, match="broken or changed"):
            read_set("gsm8k", folder)
    cached.unlink()
    monkeypatch.setitem(bench.SETS, "gsm8k", (*bench.SETS["gsm8k"][:3], 4, *bench.SETS["gsm8k"][4:]))
    with pytest.raises(InputError, match="3 rows in gsm8k_test.jsonl, but 4"):
        read_set("gsm8k")


@needs_shared
def test_the_real_sets():
    """The files of ../shared: the hashes and counts that the code states, and the authors' words around each prompt."""
    sets = {name: read_set(name, SHARED / "data") for name in bench.SETS}
    assert {name: len(prompts) for name, prompts in sets.items()} == {"gsm8k": 1319, "math500": 500, "humaneval": 164, "mbpp": 257, "mt-bench": 80}
    assert [row for row, _, _ in sets["humaneval"][:5]] == [61, 104, 105, 42, 145]         # random.Random(42), as in the authors' package
    by_row = {name: {row: texts for row, _, texts in prompts} for name, prompts in sets.items()}
    boxed = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert by_row["gsm8k"][0][0].startswith("Janet") and by_row["gsm8k"][0][0].endswith("farmers' market?" + boxed)
    assert by_row["math500"][0][0].endswith(boxed)
    assert by_row["humaneval"][0][0].startswith(
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\nfrom typing import List\n\n\ndef has_close_elements(")
    assert by_row["humaneval"][0][0].endswith('"""\n\n```')
    assert by_row["mbpp"][0] == ["Write a python function to remove first and last occurrence of a given character from the string."]
    assert [len(texts) for texts in by_row["mt-bench"].values()] == [2] * 80


# ---------------------------------------------------------------------------------------------------------------------
# Prompts from a file

def test_prompts_of_every_form(tmp_path):
    lines = ['{"prompt": "a"}', "", '{"turns": ["b", "c"], "task": "two"}',
             '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}]}']
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    assert read_prompts(tmp_path / "mine.jsonl") == {
        "mine": [(1, [], ["a"]), (4, [{"role": "system", "content": "s"}], ["d"])], "two": [(3, [], ["b", "c"])]}
    (tmp_path / "plain.txt").write_text("what is this?\n\n{and} that\n")
    assert read_prompts(tmp_path / "plain.txt") == {"plain": [(1, [], ["what is this?"]), (3, [], ["{and} that"])]}


@pytest.mark.parametrize("line", [
    "{", "[]", "{}", '{"prompt": ""}', '{"prompt": 3}', '{"turns": []}', '{"turns": "a"}', '{"turns": ["a", ""]}', '{"messages": []}',
    '{"prompt": "a", "turns": ["a"]}', '{"messages": [{"role": "system", "content": "s"}]}', b"\xff"])
def test_a_bad_line_is_named(tmp_path, line):
    text = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "mine.jsonl").write_bytes(b'{"prompt": "a"}\n\n' + text + b"\n")
    with pytest.raises(InputError, match="mine.jsonl, line 3: "):
        read_prompts(tmp_path / "mine.jsonl")


def test_lengthened_prompts(checkpoint):
    tokenizer = speculate.Tokenizer.load(checkpoint("qwen3-tied"))
    prompts = [(row, [], [f"{word} " * 12, "and then?"]) for row, word in enumerate(("one", "two", "three"))]
    row, history, texts = bench.lengthened(prompts, 1, 400, tokenizer, False)
    assert (row, history, texts[1]) == (1, [], "and then?") and texts[0].endswith("\n\n" + prompts[1][2][0])
    assert texts[0].rindex("three") > texts[0].rindex("one")                # nearest the one that follows it, then round the end
    longest = max(len(tokenizer.encode(p[2][0] + "\n\n")) for p in prompts)
    assert 400 <= len(tokenizer.chat([bench.user(texts[0])])) <= 400 + longest + 5
    assert bench.lengthened(prompts, 1, 5, tokenizer, False) == prompts[1]


# ---------------------------------------------------------------------------------------------------------------------
# Measuring

def test_both_paths_keep_the_distribution():
    """700 responses of three tokens at temperature 1 through bench's own decoding: chi-square against the exact distribution, plain and speculative."""
    target, prompt, runs = small_target(LOOP_V, sharpness=1.0, layers=1), [3, 1, 4], 700
    drafter = small_drafter(target, 3, taps=(0,))
    sequences = torch.cartesian_prod(*[torch.arange(LOOP_V)] * 3)
    p = target(torch.cat((torch.tensor([prompt]).expand(len(sequences), -1), sequences), 1))[0].double().softmax(-1)[:, len(prompt) - 1:-1]
    p = p.gather(-1, sequences[..., None]).prod(1)[:, 0]
    methods, counts = {"plain": (None, 1), "fast": (drafter, 3)}, torch.zeros(2, len(p), dtype=torch.float64)
    for seed in range(runs):
        stats = bench.decode(target, None, methods, prompt, 3, 1.0, seed, first=seed)
        assert list(stats) == (["plain", "fast"] if seed % 2 == 0 else ["fast", "plain"])        # in turns
        for side, name in enumerate(methods):
            a, b, c = stats[name].output
            counts[side, (a * LOOP_V + b) * LOOP_V + c] += 1
    for side in counts:
        assert chi_square_p(side, runs * p) > 1e-3


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A toy target with a drafter of its own and one of another target, and a file of prompts."""
    base = tmp_path_factory.mktemp("bench")
    toys.write_target(base / "TARGET", "qwen3-tied", max_position_embeddings=512)
    toys.write_drafter(base / "DRAFT", base / "TARGET", block_size=4)
    toys.write_drafter(base / "SECOND", base / "TARGET", seed=1, block_size=5)
    toys.write_drafter(base / "OTHER", toys.write_target(base / "UNTIED", "qwen3-untied"))
    rows = [{"turns": [f"question {i}", "and then?"][:1 + i % 2], "task": "ab"[i % 2]} for i in range(6)]
    (base / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return base


def bench_main(capsys, *args):
    """Run in this process -> exit code, stdout, stderr"""
    try:
        bench.main([str(arg) for arg in args])
        code = 0
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err


def toy_args(toy, *more):
    return "--target", toy / "TARGET", "--draft", toy / "DRAFT", "--prompts", toy / "prompts.jsonl", "--device", "cpu", "--max-new-tokens", 12, *more


def by_count(results):
    """Summed over cycles, so whatever the order of the rows"""
    return [(s["label"], method, name, c["tau_pooled"], c["by_length"]) for s in results["report"] for method, e in s["methods"].items()
            for name, c in sorted(e["sets"].items())]


def taus(results):
    return [(s["label"], method, name, c["tau"], c["tau_pooled"]) for s in results["report"] for method, e in s["methods"].items()
            for name, c in e["sets"].items()]


def test_a_whole_run(toy, capsys, tmp_path):
    """Two temperatures, prompt lengths and block sizes; the table, the JSON on the last line and in the file, the figures."""
    args = toy_args(toy, "--temperature", 0, 1, "--context", 40, 80, "--block-size", 2, 4, "--num-prompts", 2,
                    "--json", tmp_path / "new" / "out.json", "--figures", tmp_path / "figures")
    code, out, err = bench_main(capsys, *args)
    results, kept = json.loads(out.splitlines()[-1]), json.loads((tmp_path / "new" / "out.json").read_text())
    assert code == 0 and {key: kept[key] for key in results} == results and not list(tmp_path.rglob("*.part*"))
    assert [s["label"] for s in results["report"]] == ["T = 0, 40 tokens", "T = 1, 40 tokens", "T = 0, 80 tokens", "T = 1, 80 tokens"]
    (small, few), = {tuple(s["methods"]) for s in results["report"]}
    assert small.endswith("DRAFT (2)") and few.endswith("DRAFT (4)") and f"| T = 0, 40 tokens | {small} |" in out
    assert len(kept["rows"]) == 4 * (2 * 1 + 2 * 2)                         # settings x (prompts x turns)
    for row in kept["rows"]:
        assert row["prompt_tokens"] >= row["context"] and row["runs"].keys() == {"plain", small, few}
        if row["temperature"] == 0:
            assert row["runs"][few]["gap"] is None or row["runs"][few]["gap"] < 1e-3
    header = results["header"]
    assert header["dtype"] == "float32" and header["torch"] == torch.__version__
    assert "8 layers" in header["target"] and "2 layers, block 4" in header["drafters"]
    assert all(f"- {key}: {value}" in out for key, value in header.items()) and "--context 40 80" in header["command"]
    assert sorted(file.name for file in (tmp_path / "figures").iterdir()) == ["histogram.png", "latency.png", "positions.png", "speedups.png"]
    assert [len(times) for times in results["draft_times_ms"][few]] == [3, 3]
    assert "tau" in err and "| --- |" not in err


def test_the_first_answer_is_in_the_second_prompt(toy, capsys, tmp_path, monkeypatch):
    seen = []
    real = speculate.Tokenizer.chat
    monkeypatch.setattr(speculate.Tokenizer, "chat", lambda self, messages, thinking=False: seen.append(list(messages)) or real(self, messages, thinking))
    code, out, _ = bench_main(capsys, *toy_args(toy, "--sets", "b", "--num-prompts", 1, "--json", tmp_path / "out.json"))
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert code == 0 and [row["turn"] for row in rows] == [0, 1]
    assert [m["role"] for m in seen[-1]] == ["user", "assistant", "user"] and seen[-1][2]["content"] == "and then?" and seen[-1][1]["content"]
    assert rows[1]["prompt_tokens"] == len(real(speculate.Tokenizer.load(toy / "TARGET"), seen[-1]))


@needs_pair
def test_what_does_not_fit(toy, capsys, tmp_path):
    """A first turn is refused and leaves no FILE.part in the way of the mended command; a later turn is left out, and that is said."""
    long, later = tmp_path / "long.jsonl", tmp_path / "later.jsonl"
    long.write_text(json.dumps({"prompt": "word " * 60000}) + "\n")
    later.write_text(json.dumps({"turns": ["a", "word " * 60000, "b"], "task": "$x$"}) + "\n")
    args = ["--target", toy / "TARGET", "--draft", toy / "DRAFT", "--device", "cpu", "--max-new-tokens", 12, "--json", tmp_path / "out.json"]
    with pytest.raises(InputError, match="max_position_embeddings"):
        bench.main([str(arg) for arg in (*args, "--prompts", long)])
    code, out, err = bench_main(capsys, *args, "--prompts", later, "--figures", tmp_path / "figures")
    assert code == 0 and "prompt 1: from turn 2 on it does not fit" in err and len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 1
    assert (tmp_path / "figures" / "speedups.png").exists()


def test_same_seed_same_taus(capsys):
    """To the last digit, at T = 0 and above. Another seed draws otherwise."""
    runs = []
    for seed in (0, 0, 1):
        code, out, _ = bench_main(capsys, "--sets", "story", "--num-prompts", 1, "--max-new-tokens", 24, "--device", "cpu", "--seed", seed)
        runs.append(taus(json.loads(out.splitlines()[-1])))
    assert runs[0] == runs[1] and runs[0][0] == runs[2][0] and runs[0][1] != runs[2][1]


def test_several_drafters_stand_beside_each_other(toy, capsys):
    code, out, _ = bench_main(capsys, "--target", toy / "TARGET", "--draft", toy / "DRAFT", toy / "SECOND", *toy_args(toy)[4:], "--num-prompts", 1)
    methods = json.loads(out.splitlines()[-1])["report"][0]["methods"]
    assert code == 0 and [name.rpartition("/")[2] for name in methods] == ["DRAFT (4)", "SECOND (5)"]
    assert [len(entry["by_length"]) for entry in methods.values()] == [4, 5]


@pytest.mark.parametrize("more, method", [(("--block-size", 1), "DRAFT (1)"), (None, "plain")])
def test_no_speedup_is_printed_where_nothing_was_drafted(toy, capsys, more, method):
    args = toy_args(toy, *more) if more else ("--target", toy / "TARGET", *toy_args(toy)[4:])
    code, out, _ = bench_main(capsys, *args, "--num-prompts", 1)
    main, detail, = (table for table in out.split("\n\n") if table.startswith("|  |"))
    cells = table_cells(main)[2]
    assert code == 0 and cells[1].endswith(method) and cells[2:] == ["-"] * 6
    assert table_cells(detail)[2][7:13] == ["-"] * 6 and "x |" not in out and "warning" not in out
    assert not {"speedup", "tau"} & json.loads(out.splitlines()[-1])["report"][0]["methods"][cells[1]]["sets"]["a"].keys()


@needs_pair
def test_a_shuffled_drafter_is_found_out(capsys, monkeypatch):
    def shuffled(*args):
        target, drafter, tokenizer = speculate.load(*args)
        generator = torch.Generator().manual_seed(0)
        for p in drafter.parameters():
            p.copy_(p.flatten()[torch.randperm(p.numel(), generator=generator)].view_as(p))
        return target, drafter, tokenizer

    monkeypatch.setattr(bench, "load", shuffled)
    code, out, _ = bench_main(capsys, "--num-prompts", 2, "--sets", "code", "arithmetic", "--temperature", 0, "--max-new-tokens", 32, "--device", "cpu")
    results = json.loads(out.splitlines()[-1])
    for c in results["report"][0]["methods"]["tiny/drafter (16)"]["sets"].values():
        assert 1 <= c["tau"] < 1.3 and c["speedup"] < 1 and c["identical"] == 2
    assert "almost no draft is accepted" in out and "slower than plain decoding" in out


@needs_pair
def test_the_embedded_pair(capsys):
    """What `python bench.py` measures: its three tasks, both temperatures."""
    code, out, _ = bench_main(capsys, "--num-prompts", 1, "--max-new-tokens", 32, "--device", "cpu")
    head, _, zero, one = table_cells(next(table for table in out.split("\n\n") if table.startswith("|  | method | a")))
    assert code == 0 and head[2:8:2] == ["arithmetic", "code", "story"] and (zero[0], one[0]) == ("T = 0", "T = 1")
    assert all(float(cell) > 1.2 for cell in zero[3::2]) and "paper" not in zero[1]


# ---- cut runs

def test_a_cut_run_goes_on(toy, capsys, tmp_path, monkeypatch):
    """Ctrl-C in the fourth prompt: the table so far and exit code 130; then --resume measures the rest alone."""
    args = toy_args(toy, "--temperature", 1, "--json", tmp_path / "out.json")
    measured, measure = [], bench.measure

    def noting(target, tokenizer, methods, prompt, *rest):
        measured.append(prompt[0])
        if len(measured) == 4:
            signal.raise_signal(signal.SIGINT)
        return measure(target, tokenizer, methods, prompt, *rest)

    monkeypatch.setattr(bench, "measure", noting)
    code, out, err = bench_main(capsys, *args)
    results = json.loads(out.splitlines()[-1])
    assert code == 130 and "stopped" in err and "--resume" in err and results["stopped"] and "| T = 1 |" in out
    assert results["report"][0]["methods"].popitem()[1]["sets"]["a"]["prompts"] == 3 and not (tmp_path / "out.json").exists()
    part = tmp_path / "out.json.part"
    code, out, err = refused(capsys, *args)
    assert "--resume goes on with it" in err
    code, out, err = refused(capsys, *args, "--resume", "--seed", 5)
    assert "another seed" in err
    with part.open("ab") as file:
        file.write(b'[{"context": null, "temper')           # half a line, as a kill leaves it
    code, out, err = bench_main(capsys, *args, "--resume")
    assert code == 0 and measured[3:] == [2, 2, 4, 6] and not part.exists()
    whole = json.loads((tmp_path / "out.json").read_text())
    code, out, _ = bench_main(capsys, *args[:-2])
    assert taus(whole) == taus(json.loads(out.splitlines()[-1])) and len(whole["rows"]) == 9


def test_ctrl_c_before_anything_is_measured(toy, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda *args: signal.raise_signal(signal.SIGINT))
    code, out, err = bench_main(capsys, *toy_args(toy))
    assert code == 130 and json.loads(out.splitlines()[-1])["report"] == [] and "--resume" not in err


@pytest.mark.slow
def test_two_processes_share_the_prompts(toy, capsys, tmp_path):
    """As torchrun starts them: the first prints what both have measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = [str(arg) for arg in toy_args(toy, "--json", tmp_path / "out.json")]
    env = os.environ | dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    both = [subprocess.Popen([sys.executable, str(ROOT / "bench.py"), *args], env=env | {"RANK": str(rank)}, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(2)]
    (out, err), (silent, _) = (process.communicate(timeout=120) for process in both)
    assert [process.returncode for process in both] == [0, 0] and silent == "", err
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert sorted((row["set"], row["row"], row["turn"]) for row in rows) == [
        ("a", 1, 0), ("a", 3, 0), ("a", 5, 0), ("b", 2, 0), ("b", 2, 1), ("b", 4, 0), ("b", 4, 1), ("b", 6, 0), ("b", 6, 1)]
    assert not list(tmp_path.glob("*.part*"))
    alone = json.loads(bench_main(capsys, *args[:-2])[1].splitlines()[-1])
    assert json.loads(out.splitlines()[-1])["header"]["processes"] == 2 and by_count(alone) == by_count(json.loads(out.splitlines()[-1]))


# ---- refusals

def refused(capsys, *args):
    with pytest.raises(InputError) as caught:
        bench.main([str(arg) for arg in args])
    assert "\n" not in str(caught.value)
    out, _ = capsys.readouterr()
    assert out == ""
    return 2, out, str(caught.value)


@pytest.mark.parametrize("line, words", [
    ("--sets nonsense", "'nonsense'"), ("--target TARGET --sets gsm9k", "gsm8k, math500"), ("--prompts MISSING", "not readable"),
    ("--prompts EMPTY", "no prompt"), ("--target TARGET --draft OTHER --prompts FILE", "does not fit"),
    ("--target nobody/nothing --prompts FILE", "not to be had from the hub"), ("--target TARGET --sets gsm8k --data-dir DIR", "not to be had"),
    ("--num-prompts 0", "--num-prompts is 0"), ("--block-size 0", "--block-size is 0"), ("--context -1", "--context is -1"), ("--json /", "not a file"), ("--context 2000000000", "max_position_embeddings"),
    ("--temperature -1", "temperature is -1"), ("--max-new-tokens 1", "2 or more"), ("--resume", "--json"), ("--data-dir .", "--data-dir changes nothing"),
    ("--target TARGET --block-size 4", "--draft"), ("--thinking", "no switch for thinking"), ("--device nonsense", "device"),
    ("--dtype float16", "float16"), ("--nonsense", "--help"), ("--target TARGET --prompts FILE --context 600", "max_position_embeddings")])
def test_bad_input_is_one_sentence(toy, capsys, tmp_path, monkeypatch, line, words):
    def no_hub(*args, **more):
        raise OSError("Connection refused")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_hub)
    (tmp_path / "EMPTY").write_text("\n")
    places = {"TARGET": toy / "TARGET", "OTHER": toy / "OTHER", "FILE": toy / "prompts.jsonl", "DIR": tmp_path,
              "EMPTY": tmp_path / "EMPTY", "MISSING": tmp_path / "no"}
    assert words in refused(capsys, *(places.get(word, word) for word in line.split()))[2]
    assert [file.name for file in tmp_path.iterdir()] == ["EMPTY"]


@pytest.mark.parametrize("more, words", [
    (("--sets", "nonsense"), "there is no set 'nonsense'"), (("--json", os.devnull + "/out.json"), "cannot be written")])
def test_the_command_exits_with_2(toy, monkeypatch, capsys, more, words):
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, toy_args(toy)), *more])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "bench.py"), run_name="__main__")
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.startswith("error: ") and words in err and err.count("\n") == 1
