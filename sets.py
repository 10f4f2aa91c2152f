"""Prompts to measure with: the public sets that the paper measures on, fetched and checked, and files of one's own.

A prompt is (row, history, texts): its place in the set, the messages before it, and what the user says, a text a turn.
"""
import gzip
import hashlib
import http.client
import itertools
import json
import os
import random
import urllib.request
from pathlib import Path

import data
from checkpoint import InputError
from speculate import TINY

GITHUB = "https://raw.githubusercontent.com/"
MATH = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CODE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
SETS = {    # file name, address, sha256, rows of the split in use, how many of them the paper runs, and how a row becomes the user's turns
    "gsm8k": ("gsm8k_test.jsonl", GITHUB + "openai/grade-school-math/master/grade_school_math/data/test.jsonl",
              "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14", 1319, 128, lambda row: [row["question"] + MATH]),
    "math500": ("math500_test.jsonl", "https://media.githubusercontent.com/media/openai/prm800k/main/prm800k/math_splits/test.jsonl",
                "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132", 500, 128, lambda row: [row["problem"] + MATH]),
    "humaneval": ("HumanEval.jsonl.gz", GITHUB + "openai/human-eval/master/data/HumanEval.jsonl.gz",
                  "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef", 164, 164, lambda row: [CODE + row["prompt"] + "\n```"]),
    "mbpp": ("sanitized-mbpp.json", GITHUB + "google-research/google-research/master/mbpp/sanitized-mbpp.json",
             "8ac32b2799150228e2d745aed09c870b7e4444246d4727d1004576207ef40769", 257, 128, lambda row: [row["prompt"]]),
    "mt-bench": ("mt_bench_question.jsonl", GITHUB + "lm-sys/FastChat/main/fastchat/llm_judge/data/mt_bench/question.jsonl",
                 "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7", 80, 80, lambda row: row["turns"])}


def fetch(file, address, sha256, folder=None):
    """The bytes of a set's file: from `folder` if named, else from the user's cache, else from its address, and cached. InputError if it isn't whole."""
    path = Path(folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanodflash") / file
    source = path if folder or path.exists() else address
    try:
        content = path.read_bytes() if source == path else urllib.request.urlopen(source, timeout=60).read()
    except (OSError, http.client.HTTPException) as error:
        raise InputError(f"{source}: not to be had ({error}); --data-dir can name a folder with a copy called {file}")
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise InputError(f"{source}: broken or changed, its sha256 is {found[:16]}... and not {sha256[:16]}...")
    if source != path:
        write_aside(path, content)
    return content


def write_aside(path, content):
    """Write bytes beside `path`, then rename: whoever reads it finds it whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    aside.write_bytes(content)
    os.replace(aside, path)


def read_set(name, folder=None):
    """-> all prompts of a public set, in the order that a subset is the beginning of."""
    file, address, sha256, count, _, texts = SETS[name]
    content = fetch(file, address, sha256, folder)
    content = gzip.decompress(content) if file.endswith(".gz") else content
    rows = json.loads(content) if file.endswith(".json") else [json.loads(line) for line in content.splitlines()]
    if name == "mbpp":
        rows = [row for row in rows if 11 <= row["task_id"] <= 510]            # its test split
    if len(rows) != count:
        raise InputError(f"{name}: {len(rows)} rows in {file}, but {count} were expected")
    order = list(range(count))
    random.Random(42).shuffle(order)
    return [(i, [], texts(rows[i])) for i in order]


def read_prompts(path):
    """A file of plain lines, or of JSON lines with `prompt`, `messages` or `turns` -> {task, or the file's name where a line has none: its prompts}"""
    lines, sets = data.prompt_lines(path), {}
    parse = data.line_parser(path, lines)
    for number, line in lines:
        try:
            given = parse(line)
            if given is None or sum(key in given for key in ("prompt", "messages", "turns")) != 1:
                raise ValueError("not a JSON object with one of prompt, messages and turns")
            *history, last = data.open_turn(given["messages"]) if "messages" in given else [None]
            texts = [last["content"]] if last else given.get("turns", [given.get("prompt")])
            if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
                raise ValueError("a prompt or turn that is no text, or an empty one")
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}")
        task = str(given.get("task", Path(path).stem)).encode("utf-8", "replace").decode()        # JSON can hold halves of characters
        sets.setdefault(task, []).append((number, history, texts))
    return sets


def lengthened(prompts, i, length, tokenizer, thinking):
    """prompts[i] with those that follow it in front, until it has `length` tokens or, by less than a prompt, more."""
    row, history, (text, *later) = prompts[i]
    missing = length - len(tokenizer.chat([*history, user(text)], thinking))
    others = itertools.cycle(prompts[i + 1:] + prompts[:i + 1])
    while missing > 0:
        other = next(others)[2][0] + "\n\n"
        text, missing = other + text, missing - len(tokenizer.encode(other))
    return row, history, [text, *later]


def user(text):
    return {"role": "user", "content": text}


def choose_sets(args):
    """-> {name: all its prompts}, {name: how many are run}"""
    path = args.prompts or (None if args.target else TINY / "heldout.jsonl")
    known = read_prompts(path) if path else SETS
    names = list(dict.fromkeys(args.sets or known))
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"there is no set {unknown[0]!r}{f' in {path}' if path else ''}, but {', '.join(known)}")
    sets = {name: known[name] if path else read_set(name, args.data_dir) for name in names}
    usual = {name: 128 if args.prompts else 16 if path else SETS[name][4] for name in names}
    return sets, {name: min(args.num_prompts or usual[name], len(sets[name])) for name in names}
