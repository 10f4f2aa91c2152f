"""Prompts in, the target's own responses to them, token rows with loss masks out.

    python data.py regenerate --prompts prompts.jsonl --out responses.jsonl     the embedded target; another one with --target Qwen/Qwen3-8B
    python data.py regenerate ... --base-url http://HOST:8000/v1 --model NAME   the target on a running vLLM, SGLang or llama.cpp

A drafter learns what its target would say, with the chat template and the thinking mode it will be served with. Token ids are stored, and never
rendered again: text that goes through a tokenizer once more can come out as other tokens.

A responses file is JSON lines. The first one, the header, says what made the others: target, vocabulary, template, sampling. Then, as they come,
    {"line": 17, "prompt_ids": [...], "response_ids": [...], "prompt": "..."}
with the prompt's line number, its `task` where it has one, `cut: true` where the budget ended it, `reencoded: true` where a server gave text alone.
"""
import argparse
import concurrent.futures
import contextlib
import hashlib
import http.client
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from checkpoint import InputError, Parser, checkpoint_dir, command_line, read_json
from model import Config
from target import Target, check_device, read_stop_ids
from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent
FORMAT = "nanodflash responses 1"
URL = r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?(/[^\s?#]*)?"


# ---------------------------------------------------------------------------------------------------------------------
# Batched decoding

@torch.inference_mode()
def decode_batch(target, prompts, max_new_tokens, stop_ids, vocab=None, temperature=0.0, generator=None):
    """Decode many prompts (lists of ids) at once -> their responses, each up to its first stop id, that included, or up to the budget.

    Prompts are padded on the left, so the newest token of every row stands in the same column of the cache; the mask hides the padding and the
    positions do not count it. A finished row is carried along until half of them are: then the others move to a smaller cache.
    """
    width, device = max(map(len, prompts)), target.device
    padding = [width - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * n + prompt for n, prompt in zip(padding, prompts)], device=device)
    positions = torch.arange(width + max_new_tokens, device=device) - torch.tensor(padding, device=device)[:, None]
    seen, positions = positions >= 0, positions[:, :width].clamp(min=0)
    cache = target.new_cache(width + min(128, max_new_tokens), len(prompts))
    responses = [[] for _ in prompts]
    rows = list(range(len(prompts)))               # whose response each row of the batch is; None once it is finished
    for _ in range(max_new_tokens):
        logits, _ = target(ids, cache, last_only=True, positions=positions, key_mask=seen[:, :cache.length + ids.shape[1]], vocab=vocab)
        if temperature > 0:                        # with Gumbel noise the best is a draw
            logits = logits.float() / temperature - torch.empty(logits.shape, device=device).exponential_(generator=generator).log()
        ids, positions = logits.argmax(-1), positions[:, -1:] + 1
        for i, token in enumerate(ids[:, 0].tolist()):                       # the step's one host sync
            if rows[i] is not None:
                responses[rows[i]].append(token)
                if token in stop_ids:
                    rows[i] = None
        live = [i for i, row in enumerate(rows) if row is not None]
        if not live:
            break
        if 2 * len(live) <= len(rows) or cache.length == cache.max_len:
            rows, kept = [rows[i] for i in live], torch.tensor(live, device=device)
            ids, positions, seen = ids[kept], positions[kept], seen[kept]
            move(cache, kept, min(seen.shape[1], cache.length + max(128, cache.length // 2)))
    return responses


def move(cache, kept, max_len):
    """Give a cache other room, for the rows `kept` alone."""
    for name in ("k", "v"):
        old = getattr(cache, name)
        new = old.new_zeros(old.shape[0], len(kept), old.shape[2], max_len, old.shape[4])
        for layer in range(len(old)):
            new[layer, :, :, :cache.length] = old[layer, :, :, :cache.length][kept]
        setattr(cache, name, new)
    cache.layers, cache.max_len = list(zip(cache.k, cache.v)), max_len


# ---------------------------------------------------------------------------------------------------------------------
# Files: prompts, which are JSON lines with `prompt` or `messages`, or plain text, a prompt a line; and the responses file

def prompt_lines(path):
    """-> (number, bytes) of every line that is not blank."""
    try:
        lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: not readable ({error.strerror})")
    lines = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not lines:
        raise InputError(f"{path}: there is no prompt in it")
    return lines


def json_object(line):
    """Bytes or text -> the JSON object in it, or None."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
        return value if isinstance(value, dict) else None


def line_parser(path, lines):
    """How a line of a prompts file becomes an object: as JSON, where the file's name or its first line says so, or as text, which is the prompt."""
    as_json = Path(path).suffix in (".jsonl", ".ndjson", ".json") or json_object(lines[0][1]) is not None
    return json_object if as_json else lambda line: {"prompt": line.decode("utf-8")}


def read_prompts(path, lines, done, tokenizer, thinking, longest):
    """Yield the beginning of its row in the responses file for each of `lines` not in `done`; one without a prompt is named and passed over."""
    parse = line_parser(path, lines)
    for number, line in (entry for entry in lines if entry[0] not in done):
        try:
            given = parse(line)
            if given is None or ("prompt" in given) == ("messages" in given):
                raise ValueError("not a JSON object with either prompt or messages")
            messages = open_turn(given["messages"] if "messages" in given else [{"role": "user", "content": given["prompt"]}])
            ids = tokenizer.encode_raw(given["prompt"]) if "prompt" in given and not tokenizer.has_template else tokenizer.chat(messages, thinking)
            if len(ids) > longest:
                raise ValueError(f"a prompt of {len(ids)} tokens, but --max-new-tokens leaves room for {longest} in the target's context")
            text = {"messages": messages} if "messages" in given else {"prompt": given["prompt"]}
            yield {"line": number, "prompt_ids": ids} | text | {key: given[key] for key in ("task",) if key in given}
        except (ValueError, InputError) as error:
            say(f"{path}, line {number} skipped: {error}")


def open_turn(messages):
    """-> the conversation up to the turn that is to be written: an assistant's turn at its end is taken off. ValueError if it is none."""
    if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages):
        raise ValueError("prompt is no text, or messages is no list of objects with role and content, both text")
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages or messages[-1]["role"] == "system" or not messages[-1]["content"].strip():
        raise ValueError("there is no turn to answer, or an empty one")
    return messages


def read_responses(path):
    """Yield (line number, object, offset behind it) of a responses file, the header first. A half-written last line is passed over."""
    end = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                row, end = json_object(line), end + len(line)
                if number == 1 and (row is None or row.get("format") != FORMAT):
                    raise InputError(f"{path}: not a responses file (its first line does not say what made it)")
                if not line.endswith(b"\n"):
                    return
                if row is None:
                    raise InputError(f"{path}, line {number}: not a line that was written here")
                yield number, row, end
    except OSError as error:
        raise InputError(f"{path}: not readable ({error.strerror})")
    if end == 0:
        raise InputError(f"{path}: empty, not a responses file")


@contextlib.contextmanager
def open_responses(path, header, done):
    """Make a responses file, or go on with the one that is there: its prompts' line numbers are put into `done` -> file at its end, nobody else's."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: not writable (not a regular file)")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        try:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)       # it ends with this process, whatever ends that
        except BlockingIOError:
            raise InputError(f"{path}: another run is writing to it; choose another --out")
        except (ImportError, OSError):                             # Windows; a file system without locks
            pass
        if file.tell() == 0:            # new, or a run was killed before it wrote anything
            try:
                append(file, [header])
            except OSError:
                path.unlink()
                raise
        _, made, end = next(entries := read_responses(path), (0, {}, 0))
        for key in header:
            if header[key] != made.get(key):
                raise InputError(f"{path}: made with another {key}, {made.get(key)!r}, and not {header[key]!r}; choose another --out")
        for _, row, end in entries:
            if isinstance(row.get("line"), int):
                done.add(row["line"])
        os.truncate(path, end)          # without a half-written last line
        yield file


def append(file, rows):
    """Write JSON lines, and have them on the disk before going on."""
    file.write(b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows))
    file.flush()
    os.fsync(file.fileno())


def row_of(prompt, response, stop_ids, **marks):
    return prompt | {"response_ids": response} | ({} if response[-1] in stop_ids else {"cut": True}) | marks


def target_id(name):
    """What a responses file calls its target: a hub id, or a directory's path, from the repository's root if it lies in there."""
    if not Path(name).is_dir():
        return str(name)
    path = Path(name).resolve()
    return (path.relative_to(ROOT) if path.is_relative_to(ROOT) else path).as_posix()


# ---------------------------------------------------------------------------------------------------------------------
# Answers: of our own target, or of a server that has it

def local_answers(target, vocab, prompts, args, stop_ids, generator):
    """Yield lists of rows, a batch at a time. Prompts of like length go together, longest first, within a window of 16 batches."""
    while window := list(islice(prompts, 16 * args.batch_size)):
        window.sort(key=lambda prompt: -len(prompt["prompt_ids"]))
        for batch in (window[start:start + args.batch_size] for start in range(0, len(window), args.batch_size)):
            responses = decode_batch(target, [row["prompt_ids"] for row in batch], args.max_new_tokens, stop_ids, vocab, args.temperature, generator)
            yield [row_of(prompt, response, stop_ids) for prompt, response in zip(batch, responses)]


FAULTS = (OSError, http.client.HTTPException, ValueError, LookupError, ArithmeticError, TypeError, AttributeError, RecursionError)      # network's, answer's
TRIES, TIMEOUT, FAILURES = 5, 600, 20      # tries a request, seconds a try; prompts that fail in a row before the server is given up


def server_answers(prompts, args, tokenizer, stop_ids):
    """Yield lists of rows as they come, with batch_size requests under way. A prompt that fails is named, and left for the next run."""
    pool, pending, failures = concurrent.futures.ThreadPoolExecutor(args.batch_size), {}, 0
    try:
        while True:
            for prompt in islice(prompts, args.batch_size - len(pending)):
                pending[pool.submit(ask, prompt, args, tokenizer, stop_ids)] = prompt["line"]
            if not pending:
                return
            for future in concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED).done:
                line, row = pending.pop(future), future.result()
                failures = 0 if isinstance(row, dict) else failures + 1
                if not failures:
                    yield [row]
                    continue
                say(f"prompt of line {line} skipped: {row}")
                if failures == FAILURES:
                    raise InputError(f"{args.base_url}: {failures} prompts in a row failed; the last one: {row}")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def ask(prompt, args, tokenizer, stop_ids):
    """-> a row, or why there is none (text)."""
    body = {"model": args.model, "prompt": prompt["prompt_ids"], "max_tokens": args.max_new_tokens, "stop_token_ids": sorted(stop_ids),
            "temperature": args.temperature, "seed": args.seed + prompt["line"], "skip_special_tokens": False, "stream": False,
            "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,      # whatever the server's defaults are: the target's own distribution
            "return_token_ids": True, "n_probs": 1}                # ids from vLLM and SGLang; from llama.cpp, beside its log-probabilities

    def read(answer, tries):
        ids, marks = ids_of(answer["choices"][0], tokenizer, stop_ids)
        return ids if isinstance(ids, str) else row_of(prompt, ids, stop_ids, **marks)
    return post(args.base_url.rstrip("/") + "/completions", body, read)


def post(url, body, read):
    """Send a request, again where that may help -> read(the answer's JSON, tries before it), or why there is none (text). Runs in threads."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    for attempt in range(TRIES):
        time.sleep(2 ** attempt / 4 if attempt else 0)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return read(json.loads(answer.read()), attempt)
        except urllib.error.HTTPError as error:
            failure = str(error)
            with contextlib.suppress(*FAULTS):
                failure += ": " + error.read(300).decode("utf-8", "replace").strip()
            if 400 <= error.code < 500 and error.code not in (408, 429):
                break                                              # the request itself is refused
        except FAULTS as error:
            failure = f"{type(error).__name__}: {error}"
    return f"no answer of the server ({failure})"


def ids_of(choice, tokenizer, stop_ids):
    """-> the response's ids up to its stop id, or (text) what is wrong with them; and {"reencoded": True} if they are made from text."""
    ids, marks = choice.get("token_ids"), {}
    if ids is None and isinstance((choice.get("logprobs") or {}).get("content"), list):
        ids = [token["id"] for token in choice["logprobs"]["content"]]
    if ids is None:
        ids, marks = tokenizer.encode(choice["text"]), {"reencoded": True}
        if "\ufffd" in choice["text"] or tokenizer.decode(ids, skip_special=False) != choice["text"]:
            return "the server gave text alone, and it does not survive encoding", marks
    if not all(type(i) is int and 0 <= i < tokenizer.size for i in ids):
        return "token ids outside the target's vocabulary; does the server run another model?", marks
    end = next((k for k, i in enumerate(ids, 1) if i in stop_ids), None)
    if end is None and choice["finish_reason"] == "stop":          # the server kept the stop token to itself
        ids = ids + sorted(tokenizer.stop_ids or stop_ids)[:1]
    elif end is None and choice["finish_reason"] != "length":
        return f"the server ended the response by {choice['finish_reason']!r}", marks
    return ids[:end] or "an empty response", marks


def regenerate(args):
    directory = checkpoint_dir(args.target)
    raw, tokenizer = read_json(directory / "config.json"), Tokenizer.load(directory)
    config, stop_ids = Config.from_dict(raw, directory / "config.json"), read_stop_ids(directory, raw) | tokenizer.stop_ids
    limit = config.max_position_embeddings
    args.max_new_tokens = args.max_new_tokens or min(2048, limit // 2)
    if tokenizer.size > config.vocab_size:
        raise InputError(f"{directory}: the tokenizer has {tokenizer.size} ids, but config.json's vocab_size is {config.vocab_size}")
    if args.max_new_tokens >= limit:
        raise InputError(f"--max-new-tokens {args.max_new_tokens} leaves no room for a prompt in the target's max_position_embeddings, {limit}")
    if args.thinking is not None and not tokenizer.has_thinking:
        raise InputError("this target's chat template has no thinking switch")
    if not args.base_url:
        device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = getattr(torch, args.dtype or ("float32" if device == "cpu" else "bfloat16"))
    lines, done = prompt_lines(args.prompts), set()
    header = {
        "format": FORMAT, "target": target_id(args.target), "vocab_size": config.vocab_size, "stop_ids": sorted(stop_ids),
        "template": "raw" if not tokenizer.has_template else "chat" if not tokenizer.has_thinking else "thinking" if args.thinking else "no thinking",
        "max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed,
        "engine": f"server, model {args.model}" if args.base_url else f"target.py, {str(dtype).removeprefix('torch.')}",
        "prompts": Path(args.prompts).name, "prompts_sha256": hashlib.sha256(b"".join(line + b"\n" for _, line in lines)).hexdigest()}
    lines = lines[:args.limit]
    prompts = read_prompts(args.prompts, lines, done, tokenizer, bool(args.thinking), limit - args.max_new_tokens)
    first = next(prompts, None)
    if first is None:
        raise InputError(f"{args.prompts}: there is no prompt in it that can be used")
    with open_responses(args.out, header, done) as file:
        prompts = chain([] if first["line"] in done else [first], prompts)
        if args.base_url:
            answers = server_answers(prompts, args, tokenizer, stop_ids)
        else:
            target = Target.load(args.target, device, dtype)
            generator = torch.Generator(device).manual_seed(args.seed + len(done))      # a resumed run does not draw the same numbers again
            answers = local_answers(target, tokenizer.size, prompts, args, stop_ids, generator)
        made, cut, tokens, began = len(done), 0, 0, time.perf_counter()
        with tqdm(total=len(lines), initial=made, unit="row", file=sys.stderr) as bar:
            for rows in answers:
                append(file, rows)
                made, cut, tokens = made + len(rows), cut + sum("cut" in row for row in rows), tokens + sum(len(row["response_ids"]) for row in rows)
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):,.0f} tokens/s", refresh=False)
                bar.update(len(rows))
    say(f"{args.out}: {made} responses, {max(0, len(lines) - made)} of {len(lines)} prompts skipped; made now: {tokens:,} tokens, "
        f"{cut} of these responses cut by the budget")
    if not made:
        raise InputError(f"{args.base_url}: the server answered none of the prompts; the same command asks again")


def say(text):
    tqdm.write(text, file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# Rows for training

@dataclass(frozen=True, eq=False)
class Row:
    """One prompt and its response, as ids (T) in numpy's int32: a million rows fit in memory. All from prompt_length on, the stop token too, has a loss."""
    ids: np.ndarray
    prompt_length: int
    task: str | None = None


def rows(path, vocab_size, max_length, target=None):
    """A responses file -> list of Row, cut at max_length tokens; what has no two response tokens then is dropped and counted on stderr.
    InputError where the responses are another target's (by its name or directory, where given, and its vocabulary), or where none is left."""
    entries = read_responses(path)
    _, header, _ = next(entries, (0, {}, 0))
    if target is not None and header.get("target") != target_id(target):
        raise InputError(f"{path}: responses of {header.get('target')}, not of {target_id(target)} (the same under another name? then change its first line)")
    if header.get("vocab_size") != vocab_size:
        raise InputError(f"{path}: responses of a target with vocab_size {header.get('vocab_size')}, but this target's is {vocab_size}")
    kept, dropped = [], 0
    for number, entry, _ in entries:
        try:
            prompt = entry["prompt_ids"]
            ids = np.array(prompt + entry["response_ids"])[:max_length]
            if ids.dtype.kind != "i" or ids.ndim != 1 or not 0 <= ids.min() <= ids.max() < vocab_size:
                raise ValueError
        except (LookupError, TypeError, ValueError):
            raise InputError(f"{path}, line {number}: prompt_ids and response_ids are no lists of ids from the target's vocabulary of {vocab_size}")
        if len(ids) < len(prompt) + 2:
            dropped += 1
        else:
            kept.append(Row(ids.astype(np.int32), len(prompt), entry.get("task")))
    if not kept:
        raise InputError(f"{path}: no two response tokens in the first {max_length} tokens of any of {dropped} samples: nothing to train on")
    if dropped:
        say(f"{path}: {dropped} of {dropped + len(kept)} samples dropped: no two response tokens in their first {max_length} tokens")
    return kept


# ---------------------------------------------------------------------------------------------------------------------
# Command line

def parse_args(argv=None):
    parser = Parser(description="Data for training a drafter: the target's own responses to a file of prompts.")
    sub = parser.add_subparsers(dest="command", required=True).add_parser(
        "regenerate", help="have the target answer every prompt", description="Have the target answer every prompt; go on where a stopped run left off.")
    files = sub.add_argument_group("files")
    files.add_argument("--prompts", required=True, help="JSON lines with prompt or messages, or plain text, a prompt a line")
    files.add_argument("--out", type=Path, required=True, help="responses file; one that is there is gone on with")
    files.add_argument("--limit", type=int, help="only the first so many prompts")
    model = sub.add_argument_group("target")
    model.add_argument("--target", default=str(ROOT / "tiny" / "target"), help="checkpoint directory or hub id (default: the embedded one)")
    model.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="the template's thinking mode (default: off, as drafters are served)")
    model.add_argument("--device", help="cpu, cuda, mps (default: cuda if there, else cpu)")
    model.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16, on cpu float32 (hidden states overflow fp16)")
    decoding = sub.add_argument_group("decoding")
    decoding.add_argument("--max-new-tokens", type=int, help="default: half the target's context, at most 2048")
    decoding.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    decoding.add_argument("--seed", type=int, default=0)
    decoding.add_argument("--batch-size", type=int, default=64, help="prompts decoded, or requests under way, at once (default 64)")
    server = sub.add_argument_group("server", "the target on a vLLM, SGLang or llama.cpp server; --target gives template and vocabulary")
    server.add_argument("--base-url", help="such as http://HOST:8000/v1")
    server.add_argument("--model", help="its name there")
    args = parser.parse_args(argv)
    for name, least in (("limit", 1), ("max_new_tokens", 1), ("batch_size", 1), ("temperature", 1e-5 if args.temperature else 0), ("seed", -2**63)):
        value = getattr(args, name)
        if value is not None and not least <= value < 2**31:
            raise InputError(f"--{name.replace('_', '-')} is {value}, but a number from {least} up is needed")
    if (args.base_url is None) != (args.model is None):
        raise InputError("--base-url and --model, the target's name there, need each other")
    if args.base_url is not None and (args.device or args.dtype or not re.fullmatch(URL, args.base_url)):
        raise InputError("--base-url is something like http://HOST:8000/v1, and --device and --dtype change nothing with it")
    return args


def main(argv=None):
    args = parse_args(argv)
    check_device(args.device)
    try:
        regenerate(args)
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        return 130
    except OSError as error:
        raise InputError(f"{args.out}: not writable ({error.strerror})")


if __name__ == "__main__":
    command_line(main, os._exit)
