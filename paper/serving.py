"""The paper's serving table for a drafter that SGLang or vLLM serves: tokens a second, by how many requests are under way.

    python -m paper.serving --base-url http://HOST:30000/v1 --model Qwen/Qwen3-8B --concurrency 1 4 8 16 32
    python -m paper.serving ... --baseline-url http://HOST:30001/v1     the same prompts on a server without a drafter, in turns, and the speed-up

Counted as the authors count: output tokens over wall time, waiting and prefill included. With c requests under way, the first c warm the server up and
count for nothing; then come min(128 c, 1024) that do. A file with fewer prompts is gone through again, and a server that caches prompts knows them by
then, with a drafter or without.

tau, the tokens that a verification yields, is what the server tells:
    SGLang    in every answer, the verifications it took: tau of a response = (tokens - 1) / verifications, as the first token comes from prefill. A row
              has the mean over responses and the pooled one. (The paper's own figure counts that first token, too: some hundredths more.)
    vLLM      counters at /metrics, read before and after: 1 + accepted / drafts, pooled. Whatever else the server does meanwhile is in it.
Where nothing was drafted, as far as the server tells, no speed-up is printed.
"""
import argparse
import concurrent.futures
import contextlib
import json
import os
import platform
import re
import shlex
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import mean

from tqdm import tqdm

import sets
from checkpoint import InputError, Parser, command_line, read_json
from data import FAILURES, FAULTS, post, say

PUBLISHED = Path(__file__).with_name("published.json")
HELDOUT = Path(__file__).resolve().parents[1] / "tiny" / "heldout.jsonl"
PER_REQUEST, MOST = 128, 1024      # prompts that count: 128 for every request under way, at most 1024


# ---------------------------------------------------------------------------------------------------------------------
# One request

@dataclass(frozen=True)
class Answer:
    tokens: int
    verifications: int             # 0 where the server does not tell, or does not speculate
    retries: int


def request_body(messages, args):
    return {"model": args.model, "messages": messages, "max_tokens": args.max_new_tokens, "temperature": args.temperature, "stream": False,
            "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,      # whatever the server's defaults: the target's own distribution
            "chat_template_kwargs": {"enable_thinking": args.thinking}, "return_meta_info": True}


def read_answer(answer, retries):
    """A chat completion -> Answer. One of FAULTS where it is in another form."""
    choice, tokens = answer["choices"][0], answer["usage"]["completion_tokens"]
    if type(tokens) is not int or not 0 <= tokens < 2**31 or choice.get("finish_reason") == "abort":
        raise ValueError(f"{tokens!r} tokens, ended by {choice.get('finish_reason')!r}")
    verifications = (choice.get("meta_info") or {}).get("spec_verify_ct") or 0
    if not 0 <= verifications < 2**31:
        raise ValueError(f"{verifications!r} verifications")
    return Answer(tokens, int(verifications), retries)


# ---------------------------------------------------------------------------------------------------------------------
# One server

def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()


def introduce(url):
    """-> what runs there, such as "vllm 0.28.0". InputError if nothing does, before any time is spent on another server."""
    try:
        models = json.loads(get(url + "/models"))["data"]
        engine = str(models[0].get("owned_by") or "server of an unknown kind") if models else "server without a model"
    except urllib.error.HTTPError as error:
        raise InputError(f"{url}/models: {error}; the address of an OpenAI-like server is needed, which mostly ends in /v1")
    except FAULTS as error:
        raise InputError(f"{url}: no OpenAI-like server answers there ({getattr(error, 'reason', None) or error})")
    for path in ("/version", "/server_info", "/get_server_info"):           # vLLM; SGLang, now and formerly
        with contextlib.suppress(*FAULTS):
            return f"{engine} {json.loads(get(url.removesuffix('/v1') + path))['version']}"
    return engine


def counters(url):
    """vLLM's counters -> drafts made and draft tokens accepted since it started, over all its engines. Zeros from any other server."""
    text = ""
    with contextlib.suppress(*FAULTS):
        text = get(url.removesuffix("/v1") + "/metrics").decode("utf-8", "replace")
    names = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
    return [sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\d+(?:\.\d*)?(?:[eE][+-]?\d\d?)?)$", text, re.M))) for name in names]


def send(url, bodies, concurrency, title):
    """Have the bodies answered, `concurrency` requests under way as long as so many are left -> Answers as they came, and how many got none."""
    answers, failed, in_a_row, tokens, began = [], 0, 0, 0, time.perf_counter()
    pool = concurrent.futures.ThreadPoolExecutor(concurrency)
    try:
        with tqdm(total=len(bodies), desc=title, unit="request", file=sys.stderr) as bar:
            for future in concurrent.futures.as_completed([pool.submit(post, url + "/chat/completions", body, read_answer) for body in bodies]):
                answer = future.result()
                if isinstance(answer, Answer):
                    answers.append(answer)
                    in_a_row, tokens = 0, tokens + answer.tokens
                else:
                    failed, in_a_row = failed + 1, in_a_row + 1
                    say(f"{url}: {answer}")
                    if in_a_row == min(FAILURES, len(bodies)):
                        raise InputError(f"{url}: {in_a_row} requests in a row failed; the last one: {answer}")
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):,.0f} tokens/s", refresh=False)
                bar.update()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return answers, failed


def measure(url, prompts, concurrency, args):
    """-> what one server did with `concurrency` requests under way."""
    counted = args.num_prompts or min(PER_REQUEST * concurrency, MOST)
    bodies = [request_body(messages, args) for messages in islice(cycle(prompts), concurrency + counted)]
    send(url, bodies[:concurrency], concurrency, f"{url}, {concurrency} under way, warm-up")      # the first batch: dropped
    drafts, accepted = counters(url)
    began = time.perf_counter()
    answers, failed = send(url, bodies[concurrency:], concurrency, f"{url}, {concurrency} under way")
    seconds = time.perf_counter() - began
    later_drafts, later_accepted = counters(url)
    return summary(answers, failed, seconds, later_drafts - drafts, later_accepted - accepted)


def summary(answers, failed, seconds, drafts, accepted):
    tokens, by_response, pooled = sum(answer.tokens for answer in answers), None, None
    if made := [(answer.tokens - 1, answer.verifications) for answer in answers if answer.verifications and answer.tokens]:      # SGLang
        by_response, pooled = mean(n / cycles for n, cycles in made), sum(n for n, _ in made) / sum(cycles for _, cycles in made)
    elif drafts > 0:                                                                                                             # vLLM
        pooled = 1 + accepted / drafts
    return {"answered": len(answers), "failed": failed, "retries": sum(answer.retries for answer in answers), "tokens": tokens, "seconds": seconds,
            "tokens_per_second": tokens / seconds, "tau_by_response": by_response, "tau_pooled": pooled}


# ---------------------------------------------------------------------------------------------------------------------
# The report

def speedup(row):
    """None unless one server drafted, as far as it tells, and the other one did not."""
    ours, plain = row["drafter"], row.get("baseline")
    if plain and plain["tokens"] and ours["tau_pooled"] is not None and plain["tau_pooled"] is None:
        return ours["tokens_per_second"] / plain["tokens_per_second"]
    return None


def remarks(rows):
    """What a reader of the table has to know -> sentences."""
    runs = [(name, row[name]) for row in rows for name in ("drafter", "baseline") if name in row]
    if any(name == "drafter" and run["tau_pooled"] is None for name, run in runs):
        yield "The server tells of no drafting, so no speed-up is printed. Has it a drafter? Is meta_info (SGLang) or /metrics (vLLM) held back by a proxy?"
    if any(name == "baseline" and run["tau_pooled"] is not None for name, run in runs):
        yield "The server at --baseline-url drafts, too: that is no baseline, and no speed-up is printed."
    if any(name == "drafter" and run["tau_pooled"] is not None and run["tau_pooled"] < 1.2 for name, run in runs):
        yield "Almost no draft is accepted: is the drafter another target's, another thinking mode's, or are the prompts unlike those it learnt from?"
    retries, failed = (sum(run[key] for _, run in runs) for key in ("retries", "failed"))
    if retries or failed:
        yield f"{retries} requests had to be sent again, {failed} got no answer at all; the time that took is counted, so throughput is shown too low."


OURS = (("no drafter, tokens/s", lambda row: row["baseline"]["tokens_per_second"] if "baseline" in row else None, "{:.0f}"),
        ("with the drafter, tokens/s", lambda row: row["drafter"]["tokens_per_second"], "{:.0f}"),
        ("speed-up", speedup, "**{:.2f}x**"),
        ("tau, mean over responses", lambda row: row["drafter"]["tau_by_response"], "{:.2f}"),
        ("tau, pooled", lambda row: row["drafter"]["tau_pooled"], "{:.2f}"),
        ("responses counted", lambda row: row["drafter"]["answered"], "{}"))


def table(rows, published):
    """Markdown: ours, and beneath it every row of the paper's table with its numbers as they are printed there."""
    columns = sorted({row["concurrency"] for row in rows}.union(*(row["concurrency"] for row in published["rows"])))
    lines = [["requests under way", "", *columns], ["---", "---", *["---:"] * len(columns)]]
    for what, value, form in OURS:
        cells = {row["concurrency"]: form.format(value(row)) for row in rows if value(row) is not None}
        if cells:
            lines.append(["ours", what, *(cells.get(c, "–") for c in columns)])
    for row in published["rows"]:
        for what, key in ("no drafter", "baseline_tok_s"), (f"DFlash, tau {row['tau']}", "dflash_tok_s"):
            cells = dict(zip(row["concurrency"], row[key]))
            lines.append(["the paper's", f"{row['target']}, {row['task']}: {what}, tokens/s", *(cells.get(c, "–") for c in columns)])
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


def report(rows, header, published, source):
    """The table and, as the last line of stdout, all of it as one line of JSON."""
    baseline = f"; without a drafter: {header['baseline_server']}" if header["baseline_server"] else ""
    print(f"{header['model']} on {header['hardware']}; {header['server']}{baseline}; {header['prompts']}, temperature {header['temperature']:g}, "
          f"at most {header['max_new_tokens']} new tokens, thinking {'on' if header['thinking'] else 'off'}\n{header['command']}\n")
    print(table(rows, published))
    print(f"\nThe paper's: {source}, on {published['setup']}; not measured here.")
    for sentence in remarks(rows):
        print(sentence)
        say(f"warning: {sentence}")
    rows = [row | {"speedup": speedup(row)} for row in rows]
    print("\n" + json.dumps(header | {"rows": rows, "paper": published | {"source": source}}, separators=(",", ":"), ensure_ascii=False), flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Command line

def read_prompts(path):
    """A file as sets.py takes it -> list of conversations up to their first answer, in the file's order. A bad line is an InputError: what is timed is no
    matter of chance."""
    prompts = sorted(prompt for prompts in sets.read_prompts(path).values() for prompt in prompts)      # by line number
    return [[*history, sets.user(texts[0])] for _, history, texts in prompts]


def address(text):
    parts = urllib.parse.urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is no address such as http://HOST:30000/v1")
    return text.rstrip("/")


def parse_args(argv=None):
    parser = Parser(prog="python -m paper.serving", description="Tokens a second of a served drafter, beside the paper's serving table.")
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", type=address, required=True, help="an SGLang or vLLM server with a drafter, such as http://HOST:30000/v1")
    server.add_argument("--model", required=True, help="the target's name there")
    server.add_argument("--baseline-url", type=address, help="a server of the same target, under the same name, without a drafter")
    server.add_argument("--hardware", default="hardware not named (--hardware)", help="what the servers run on, for the report")
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="requests under way at once (default: 1 4 8 16 32)")
    load.add_argument("--prompts", help="JSON lines with prompt or messages, or plain text, a prompt a line (default: tiny/heldout.jsonl)")
    load.add_argument("--num-prompts", type=int, help=f"prompts that count (default: {PER_REQUEST} times the requests under way, at most {MOST})")
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument("--max-new-tokens", type=int, default=2048)
    decoding.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    decoding.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=False, help="the template's thinking mode (default: off)")
    args = parser.parse_args(argv)
    args.concurrency = sorted(set(args.concurrency))
    for name, value, least in (("concurrency", args.concurrency[0], 1), ("num-prompts", args.num_prompts, 1),
                               ("max-new-tokens", args.max_new_tokens, 1), ("temperature", args.temperature, 0)):
        if value is not None and not least <= value < float("inf"):
            raise InputError(f"--{name} is {value}, but a number from {least} up is needed")
    if args.concurrency[-1] > (args.num_prompts or MOST):
        raise InputError(f"--concurrency {args.concurrency[-1]}, but only {args.num_prompts or MOST} prompts count: so many are never under way")
    if args.base_url == args.baseline_url:
        raise InputError("--base-url and --baseline-url are the same server")
    args.command = shlex.join(["python", "-m", "paper.serving", *(sys.argv[1:] if argv is None else argv)])
    return args


def main(argv=None):
    args = parse_args(argv)
    published = read_json(PUBLISHED)
    if not args.prompts:
        say("no --prompts: these are the embedded pair's held-out ones, tiny/heldout.jsonl; the paper's rows are of other tasks")
    prompts = read_prompts(args.prompts or HELDOUT)
    header = {"command": args.command, "model": args.model, "hardware": args.hardware, "server": introduce(args.base_url),
              "baseline_server": args.baseline_url and introduce(args.baseline_url), "client": f"Python {platform.python_version()}, {platform.platform()}",
              "prompts": args.prompts or "tiny/heldout.jsonl", "temperature": args.temperature, "max_new_tokens": args.max_new_tokens,
              "thinking": args.thinking, "complete": False}                # True once every row is measured
    rows = []
    try:
        for concurrency in args.concurrency:
            rows.append({"concurrency": concurrency, "drafter": measure(args.base_url, prompts, concurrency, args)})
            if args.baseline_url:
                rows[-1]["baseline"] = measure(args.baseline_url, prompts, concurrency, args)
        header["complete"] = True
    except KeyboardInterrupt:
        say("stopped; " + ("what was measured until then is in the table" if rows else "nothing was measured yet"))
        raise
    finally:
        if rows:                   # also of a run that was stopped, or whose server went away
            report(rows, header, published["sglang"], published["source"].split(";")[0])


if __name__ == "__main__":
    command_line(main, os._exit)
