"""The paper's speed-up table for any target and drafters, beside what the paper printed (DFlash, arXiv 2602.06036, table 1).

    python bench.py                                                                the embedded pair on its three held-out tasks
    python bench.py --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16       the paper's sets; add --json FILE --figures DIR
    torchrun --nproc-per-node 8 bench.py ...                                       each process takes its share of the prompts

Every prompt is decoded plainly and speculatively, in turns, by the same loop. What is counted follows the authors' package, dflash 0.1.0:
    tau        of a response: tokens committed in cycles / cycles, the prefill's token being in none; then the mean over responses ("macro")
    speed-up   mean time per output token, plain / speculative: decoding without the target's prefill / tokens; the drafter's own prefill is in it
    average    of speed-ups geometric, of taus arithmetic
    subset     rows in the order of random.Random(42).shuffle; the paper's own runs took datasets' shuffle(seed=0), so other rows
Beside them stand tau over all cycles at once ("pooled") and the speed-up end to end, prefill included.
"""
import datetime
import hashlib
import itertools
import json
import os
import platform
import random
import sys
import time
from pathlib import Path
from statistics import geometric_mean, mean, median

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import data
from checkpoint import InputError, Parser, command_line, read_json
from draft import Drafter
from sets import SETS, choose_sets, lengthened, user, write_aside
from speculate import TINY, Sampling, Stats, first_difference, generate, load, say

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))      # set by torchrun


# ---------------------------------------------------------------------------------------------------------------------
# Measuring. `methods` is {name: (drafter, block size)}, plain decoding first.

def decode(target, vocab, methods, ids, budget, temperature, seed, first=0):
    """Decode one prompt by every method, beginning with number `first`, modulo, of them -> {name: Stats}"""
    stats, names, first = {}, list(methods), first % len(methods)
    for name in names[first:] + names[:first]:
        drafter, block_size = methods[name]
        generator = torch.Generator(target.device).manual_seed(seed)
        stats[name] = Stats(generate(target, drafter, ids, budget, target.stop_ids, Sampling(temperature), block_size, generator, vocab))
    return stats


def measure(target, tokenizer, methods, prompt, label, args, first, cold):
    """Decode all turns of a prompt, the last method's answers being the history -> a row for each: `label`, which names set and setting, and numbers.
    `cold`: after a warm-up as the authors', so that nothing is timed at its first use."""
    (row, messages, texts), rows = prompt, []
    for turn, text in enumerate(texts):
        messages = [*messages, user(text)]
        ids, limit = tokenizer.chat(messages, args.thinking), target.config.max_position_embeddings
        budget = args.max_new_tokens or max(2, min(2048, limit - len(ids)))
        if turn and len(ids) + budget > limit:
            say(f"{label['set']}, prompt {row}: from turn {turn + 1} on it does not fit the target's max_position_embeddings, {limit}, and is left out")
            break
        seed = random.Random(f"{args.seed} {label} {row} {turn}").getrandbits(63)               # a resumed run, or another share, draws the same
        if cold and turn == 0:
            decode(target, tokenizer.size, methods, ids, min(64, budget), label["temperature"], seed)
        stats = decode(target, tokenizer.size, methods, ids, budget, label["temperature"], seed, first + turn)
        runs = {name: numbers(stats[name]) for name in stats}
        if label["temperature"] == 0:
            for name in list(methods)[1:]:
                difference = first_difference(target, ids, stats["plain"].output, stats[name].output, tokenizer.size)
                runs[name]["gap"] = difference and difference[1] - difference[2]               # None where there is none
        rows.append(label | {"row": row, "turn": turn, "prompt_tokens": len(ids), "runs": runs})
        messages.append({"role": "assistant", "content": tokenizer.decode(stats[list(methods)[-1]].output)})
    return rows


def measure_all(target, tokenizer, methods, sets, counts, args, rows):
    """Yield the rows of one prompt after another: of this process's share of the first counts[name] prompts of each set, less what `rows` has of it."""
    done = {(row["context"], row["temperature"], row["set"], row["row"]) for row in rows}
    todo = [(case, i) for case in itertools.product(args.context, args.temperature, sets) for i in range(RANK, counts[case[-1]], WORLD)
            if (*case, sets[case[-1]][i][0]) not in done]
    taus = {}
    with tqdm(todo, unit="prompt", file=sys.stderr, disable=RANK > 0) as bar:
        for number, (case, i) in enumerate(bar):
            context, T, name = case
            prompt = lengthened(sets[name], i, context, tokenizer, args.thinking) if context else sets[name][i]
            measured = measure(target, tokenizer, methods, prompt, {"context": context, "temperature": T, "set": name}, args, number, case not in taus)
            taus.setdefault(case, []).extend(mean(run["committed"]) for row in measured if (run := row["runs"][list(methods)[-1]])["committed"])
            bar.set_postfix_str(f"{name}, T = {T:g}, tau {mean(taus[case] or [0]):.2f}")
            yield measured


# ---------------------------------------------------------------------------------------------------------------------
# Numbers: pure functions of cycles

def numbers(stats):
    """What is kept of a response: counts, and times in seconds. The lists have an entry for every cycle; the prefill is none."""
    cycles = stats.cycles
    return {"tokens": stats.tokens, "prefill": stats.prefill.seconds, "decode": sum(c.seconds for c in cycles),
            "draft": sum(c.draft_seconds for c in cycles), "verify": sum(c.verify_seconds for c in cycles),
            "drafted": max((c.drafted for c in cycles), default=0),
            "committed": [len(c.tokens) for c in cycles], "accepted": [c.accepted for c in cycles]}


def summarise(rows, method):
    """What is said of a method, from the rows of one set and setting; no speed-up and no tau where nothing was drafted. Times in ms."""
    # A response that ended in its prefill, the same token for every method, was not decoded and counts nowhere.
    rows = [row for row in rows if all(run["committed"] for run in row["runs"].values())]
    result = {"prompts": len({row["row"] for row in rows}), "responses": len(rows)}
    if not rows:
        return result
    plain, fast = ([row["runs"][name] for row in rows] for name in ("plain", method))
    slow, quick, slow_whole, quick_whole = (np.array([1000 * sum(run[part] for part in parts) / run["tokens"] for run in runs])
                                            for parts in (("decode",), ("prefill", "decode")) for runs in (plain, fast))
    result |= {"tokens_in": mean(row["prompt_tokens"] for row in rows), "tokens_out": mean(run["tokens"] for run in fast),
               "plain_ms_a_token": slow.mean(), "ms_a_token": quick.mean()}
    if "gap" in fast[0]:
        gaps = [run["gap"] for run in fast if run["gap"] is not None]
        result |= {"identical": len(fast) - len(gaps), "largest_gap": max(gaps, default=None)}
    if not any(run["drafted"] for run in fast):
        return result
    taus, cycles = np.array([mean(run["committed"]) for run in fast]), sum(len(run["committed"]) for run in fast)
    draft, verify, cycle = (1000 * sum(run[part] for run in fast) / cycles for part in ("draft", "verify", "decode"))
    return result | intervals([row["row"] for row in rows], slow, quick, taus) | {
        "speedup": slow.mean() / quick.mean(), "speedup_end_to_end": slow_whole.mean() / quick_whole.mean(),
        "tau": taus.mean(), "tau_pooled": sum(sum(run["committed"]) for run in fast) / cycles, "by_length": by_length(fast),
        "cycle_ms": cycle, "draft_ms": draft, "verify_ms": verify, "rest_of_cycle": 1 - (draft + verify) / cycle, "explained": taus.mean() * slow.mean() / cycle}


def intervals(prompts, slow, quick, taus, draws=2000):
    """95 % bootstrap intervals over prompts, whose turns stay together (`prompts`: whose a response is); always the same draws -> {speedup_95, tau_95}"""
    names, whose = np.unique(prompts, return_inverse=True)
    if len(names) < 2:
        return {}                                  # one prompt says nothing about others
    sums = np.zeros((len(names), 4))
    np.add.at(sums, whose, np.stack((slow, quick, taus, np.ones_like(taus)), 1))
    slow, quick, taus, count = sums[np.random.default_rng(0).integers(len(names), size=(draws, len(names)))].sum(1).T
    return {name: np.percentile(values, (2.5, 97.5)).tolist() for name, values in (("speedup_95", slow / quick), ("tau_95", taus / count))}


def by_length(runs):
    """-> for k = 1 .. B: P(reached slot k), P(accepted k | reached k), and how many cycles committed k tokens; no block has a slot B.

    Reached is a slot that a token was committed for, the draft or what the target put in its place. Behind a stop id or the budget none is."""
    committed, accepted = (np.array([n for run in runs for n in run[key]]) for key in ("committed", "accepted"))
    B, rows = 1 + max(run["drafted"] for run in runs), []
    for k in range(1, B + 1):
        reached, kept, ended = (int(which.sum()) for which in (committed >= k, accepted >= k, committed == k))
        rows.append((reached / len(committed), kept / reached if reached else None, ended) if k < B else (None, None, ended))
    return rows


def report_of(rows, methods):
    """-> for every prompt length and temperature, in it for every method: a summary of each set, averages over sets, by_length of all their cycles."""
    report = []
    for context, T in dict.fromkeys((row["context"], row["temperature"]) for row in rows):
        some, entries = [row for row in rows if (row["context"], row["temperature"]) == (context, T)], {}
        for method in methods:
            sets = {name: summarise([row for row in some if row["set"] == name], method) for name in dict.fromkeys(row["set"] for row in some)}
            entries[method] = {"sets": sets}
            if drafted := [c for c in sets.values() if "tau" in c]:
                entries[method] |= {"speedup_geometric": geometric_mean(c["speedup"] for c in drafted), "tau_arithmetic": mean(c["tau"] for c in drafted),
                                    "by_length": by_length([row["runs"][method] for row in some])}
        report.append({"label": f"T = {T:g}" + (f", {context:,} tokens" if context else ""), "context": context, "temperature": T, "methods": entries})
    return report


def published(target, temperatures):
    """From the paper's table 1, as printed -> {source, setup, rows: those of a target of this name}. (Its drafters for thinking are not public.)"""
    paper = read_json(data.ROOT / "paper" / "published.json")
    rows = [row for row in paper["table1"]["rows"] if row["target"] == Path(str(target)).name and row["temperature"] in temperatures]
    return {"source": paper["source"].split(";")[0], "setup": paper["table1"]["setup"], "rows": rows}


# ---------------------------------------------------------------------------------------------------------------------
# The report, in Markdown

COLUMNS = (("n", "prompts", "{}"), ("responses", "responses", "{}"), ("tokens in", "tokens_in", "{:.0f}"), ("out", "tokens_out", "{:.0f}"),
           ("speed-up", "speedup", "{:.2f}x"), ("95 %", "speedup_95", "{0[0]:.2f} to {0[1]:.2f}"), ("end to end", "speedup_end_to_end", "{:.2f}x"),
           ("tau (macro)", "tau", "{:.2f}"), ("95 %", "tau_95", "{0[0]:.2f} to {0[1]:.2f}"), ("tau (pooled)", "tau_pooled", "{:.2f}"),
           ("plain, ms a token", "plain_ms_a_token", "{:.2f}"), ("ms a token", "ms_a_token", "{:.2f}"), ("draft, ms", "draft_ms", "{:.2f}"),
           ("verify, ms", "verify_ms", "{:.2f}"), ("rest of a cycle", "rest_of_cycle", "{:.1%}"), ("tau x plain / cycle", "explained", "{:.2f}"),
           ("identical", "identical", "{}"), ("largest gap", "largest_gap", "{:.2g}"))


def show(value, form):
    return "-" if value is None else form.format(value)


def markdown(head, lines):
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)) + "\n"


def main_table(report, sets, paper):
    """Laid out as the paper's table 1: at each temperature ours, the paper's rows, and ours less the paper's DFlash."""
    lines = []

    def line(title, values, average, forms=("{:.2f}x", "{:.2f}")):             # values: {set: {speedup, tau}}
        pairs = [values.get(name, {}) for name in sets] + [average]
        lines.append([setting["label"], title, *(show(pair.get(key), form) for pair in pairs for key, form in zip(("speedup", "tau"), forms))])

    for setting in report:
        theirs = [row for row in paper["rows"] if row["temperature"] == setting["temperature"] and not setting["context"]]
        for method, entry in setting["methods"].items():
            line(method, entry["sets"], {"speedup": entry.get("speedup_geometric"), "tau": entry.get("tau_arithmetic")})
        for row in theirs:
            line(f"*paper, {paper['setup'].split(',')[0]}: {row['method']}*", row, row["avg"])
        for (method, entry), row in itertools.product(setting["methods"].items(), theirs):
            if "DFlash" in row["method"] and "tau_arithmetic" in entry:
                less = {name: {key: c[key] - row[name][key] for key in row[name]} for name, c in entry["sets"].items() if name in row and "tau" in c}
                line(f"{method} less the paper's {row['method']}", less, {}, ("{:+.2f}", "{:+.2f}"))
    return markdown(["", "method", *(title for name in sets for title in (name, "tau")), "average (geometric)", "tau (arithmetic)"], lines)


def pieces(header, report, sets, paper):
    """Yield the report's tables and notes."""
    yield "\n".join(f"- {key}: {value}" for key, value in header.items()) + "\n"
    yield main_table(report, sets, paper)
    if paper["rows"]:
        yield f"Rows in italics are the paper's own ({paper['source']}; {paper['setup']}), their average is over all its sets.\n"
    entries = [(setting["label"], method, entry) for setting in report for method, entry in setting["methods"].items()]
    cells = [(label, name, method, c) for label, method, entry in entries for name, c in entry["sets"].items()]
    yield markdown(["", "set", "method", *(title for title, _, _ in COLUMNS)],
                   [[*names, *(show(c.get(key), form) for _, key, form in COLUMNS)] for *names, c in cells])
    for label, method, entry in entries:
        if "by_length" in entry:
            total = sum(count for *_, count in entry["by_length"])
            shares = [(reached, accepted, count / total) for reached, accepted, count in entry["by_length"]]
            yield f"{label}, {method}, all sets:\n\n" + markdown(["k", "P(reached k)", "P(accepted k given reached)", "cycles of k tokens"],
                                                                [[str(k), *(show(share, "{:.1%}") for share in row)] for k, row in enumerate(shares, 1)])
    for label, name, method, c in cells:
        if c.get("tau", 9) < 1.2:
            yield f"warning: {label}, {name}, {method}: tau {c['tau']:.2f}, almost no draft is accepted; is it another target's drafter?"
        if c.get("speedup", 9) < 1:
            yield f"warning: {label}, {name}, {method}: a speed-up of {c['speedup']:.2f}, slower than plain decoding"


# ---------------------------------------------------------------------------------------------------------------------
# Figures

@torch.inference_mode()
def draft_times(target, drafter, context=256, rounds=11):
    """The latency law: median milliseconds, the LM head's included, of drafting g = 1 .. B - 1 tokens behind `context` others, in one block and by g
    single-token forwards through the same layers -> two lists."""
    B, device = drafter.config.block_size, target.device
    cache, masks = drafter.new_cache(context + 2 * B), torch.full((1, B), drafter.config.mask_token_id, device=device)
    drafter.extend(cache, torch.randn(1, context, drafter.fc.in_features, device=device, dtype=target.dtype))
    times = {}
    for _, g, steps in itertools.product(range(rounds), range(1, B), (False, True)):
        began, block = time.perf_counter(), masks[:, :1 if steps else g + 1]
        for _ in range(g if steps else 1):
            block = target.head(drafter.propose(cache, target.embed(block))).argmax(-1)
            cache.advance(steps)
        block.tolist()                             # a host sync
        times.setdefault((steps, g), []).append(1000 * (time.perf_counter() - began))
        cache.length = context
    return [[median(times[steps, g][1:]) for g in range(1, B)] for steps in (False, True)]


def draw(folder, report, sets, paper, latency):
    """speedups.png, histogram.png, positions.png, latency.png. `latency`: {drafter: its draft_times}"""
    import matplotlib.figure
    matplotlib.rcParams["text.parse_math"] = False             # names may hold a $

    def figure(name, x, y, series, groups=None):
        """series: {label: values over 1, 2, ...}; lines, or bars where the places have names."""
        canvas = matplotlib.figure.Figure(figsize=(9, 4.5), layout="constrained")
        axes = canvas.subplots()
        for i, (label, values) in enumerate(series.items()):
            places = np.arange(1, len(values) + 1)
            if groups:
                axes.bar(places + 0.8 * (i + 0.5) / len(series) - 0.4, values, 0.8 / len(series), label=label)
            else:
                axes.plot(places, values, "o-", label=label)
        if groups:
            axes.set_xticks(range(1, len(groups) + 1), groups)
        axes.set(xlabel=x, ylabel=y, ylim=(0, None))
        axes.legend(fontsize=8)
        canvas.savefig(folder / f"{name}.tmp", format="png", dpi=150)
        os.replace(folder / f"{name}.tmp", folder / f"{name}.png")

    entries = {f"{part['label']}, {method}": entry for part in report for method, entry in part["methods"].items() if "by_length" in entry}
    reached, accepted, counts = ({label: np.array(entry["by_length"], dtype=float)[:, i] for label, entry in entries.items()} for i in range(3))
    speedups = {label: entry["sets"] for label, entry in entries.items()}
    speedups |= {f"T = {row['temperature']:g}, paper, {paper['setup'].split(',')[0]}: {row['method']}": row for row in paper["rows"]}
    figure("speedups", "", "speed-up", {label: [of.get(name, {}).get("speedup", np.nan) for name in sets] for label, of in speedups.items()}, sets)
    figure("histogram", "tokens committed", "share of cycles", {label: count / count.sum() for label, count in counts.items()},
           [str(k) for k in range(1, 1 + max(map(len, counts.values()), default=0))])
    figure("positions", "slot k", "probability", {f"{label}: {what}": y for what, of in (("reached", reached), ("accepted if reached", accepted))
                                                  for label, y in of.items()})
    figure("latency", "tokens drafted", "ms", {f"{name}, {way}": y for name, times in latency.items()
                                               for way, y in zip(("in one block", "one by one"), times)})


# ---------------------------------------------------------------------------------------------------------------------
# Command line

def parse_args(argv=None):
    parser = Parser(description="Speed-up and tau of drafters, laid out as the paper's table 1.")
    option = parser.add_argument
    option("--target", help="checkpoint directory or hub id (default: the embedded pair)")
    option("--draft", nargs="+", default=[], help="drafter directories or hub ids; --target without any is decoded plainly")
    option("--device", help="cpu, cuda, mps (default: as speculate.py)")
    option("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16, on cpu float32 (hidden states overflow fp16)")
    option("--sets", nargs="+", help=f"default: {' '.join(SETS)}, or every task of the prompts file")
    option("--prompts", help="a file: JSON lines with prompt, messages or turns (and task), or plain text, a prompt a line")
    option("--num-prompts", type=int, help="of each set (default: the paper's number; of a file 128, for the embedded pair 16)")
    option("--context", type=int, nargs="+", default=[None], help="tokens to lengthen prompts to, with other prompts in front")
    option("--data-dir", type=Path, help="a folder with the sets' files, in place of the download")
    option("--temperature", type=float, nargs="+", help="default: 0, for the embedded pair 0 1")
    option("--block-size", type=int, nargs="+", help="default: the drafter's own")
    option("--max-new-tokens", type=int, help="default: what fits, at most 2048")
    option("--thinking", action="store_true", help="the template's thinking mode on")
    option("--seed", type=int, default=0, help="of the draws above temperature 0")
    option("--json", type=Path, metavar="FILE", help="everything, with every prompt's numbers; FILE.part keeps them while it runs")
    option("--resume", action="store_true", help="go on with FILE.part")
    option("--figures", type=Path, metavar="DIR", help="a folder for four figures")
    args = parser.parse_args(argv)
    args.temperature = list(dict.fromkeys(args.temperature or ([0.0] if args.target else [0.0, 1.0])))
    for temperature in args.temperature:
        Sampling(temperature)                      # refuses what cannot be drawn with
    for name, least in (("num_prompts", 1), ("context", 1), ("max_new_tokens", 2), ("block_size", 1)):
        for value in np.atleast_1d(getattr(args, name)):
            if value is not None and not least <= value < 2**31:
                raise InputError(f"--{name.replace('_', '-')} is {value}, but {least} or more is needed")
    for refused, why in (
        (args.block_size and args.target and not args.draft, "--block-size changes nothing without a drafter (--draft)"),
        (args.data_dir and (args.prompts or not args.target), "--data-dir changes nothing where the prompts come from a file"),
        (args.figures and (args.target and not args.draft or args.block_size == [1]), "--figures needs a drafter (--draft), and blocks of more than 1"),
        (args.prompts == "", "--prompts: the name of a file is empty"),
        (args.resume and not args.json, "--resume needs --json FILE, whose FILE.part it goes on with")):
        if refused:
            raise InputError(why)
    if args.json and (not args.json.name or args.json.exists() and not args.json.is_file()):
        raise InputError(f"--json {args.json}: not a file to write to")
    args.part = args.json and args.json.with_name(f"{args.json.name}.part{RANK or ''}")
    return args


def load_all(args):
    if args.device in (None, "cuda") and torch.cuda.is_available():
        args.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    names = list(dict.fromkeys(args.draft or ([] if args.target else [str(TINY / "drafter")])))
    target, drafter, tokenizer = load(args.target, names[0] if names else None, args.device, args.dtype and getattr(torch, args.dtype))
    if target.device.type == "cuda":
        torch.cuda.set_device(target.device)       # whose clock the loop reads
    if target.device.type == "cpu" and target.config.hidden_size * target.config.num_hidden_layers < 4096:
        torch.set_num_threads(1)                   # as speculate.py
    methods = {"plain": (None, 1)}
    for name in names:
        if name != names[0]:
            drafter = Drafter.load(name, target.device, target.dtype)
            drafter.check_fits(target, target.stop_ids)
        methods |= {f"{data.target_id(name)} ({B})": (drafter, B) for B in args.block_size or [drafter.config.block_size]}
    return target, tokenizer, methods


def describe(target, methods):
    hardware = platform.processor() or platform.machine()      # the report's header: on what, and with what, it is measured
    if target.device.type == "cuda":
        hardware = torch.cuda.get_device_name(target.device)
    elif Path("/proc/cpuinfo").exists():
        hardware = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), hardware)

    def size(model, layers):
        return f"{data.target_id(model.name)}, {sum(p.numel() for p in model.parameters()):,} parameters, {layers} layers"

    drafters = {drafter.name: drafter for drafter, _ in methods.values() if drafter}
    return {"hardware": hardware, "threads": torch.get_num_threads(), "processes": WORLD, "torch": torch.__version__,
            "dtype": str(target.dtype).removeprefix("torch."), "target": size(target, target.config.num_hidden_layers),
            "drafters": "; ".join(f"{size(d, d.config.layer.num_hidden_layers)}, block {d.config.block_size}" for d in drafters.values()) or "none",
            "learnt from conversations of at most": "; ".join(f"{d.config.training_length or '?'} tokens" for d in drafters.values())}


def open_part(path, settings, resume):
    """FILE.part: the settings, then the rows of a prompt a line -> what a cut run left in it, and the file, open for more. InputError if not ours."""
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""                    # a kill can leave half a line
    try:
        first, *measured = [json.loads(line) for line in whole.splitlines()] or [settings]
        changed = [key for key in settings if first.get(key) != settings[key]]
        itertools.chain(*(row.items() for rows in measured for row in rows))
    except (ValueError, AttributeError, TypeError):
        raise InputError(f"{path}: not a file that was written here")
    if changed or (whole and not resume):
        raise InputError(f"{path} is left of a " + (f"run with another {', '.join(changed)}" if changed else "run that was cut: --resume goes on with it"))
    write_aside(path, b"".join(json.dumps(line).encode() + b"\n" for line in (settings, *measured)))
    return list(itertools.chain(*measured)), open(path, "ab")


def run(args):
    """Measure -> header, rows, names of the sets and of the methods, draft_times of each drafter, and whether Ctrl-C came before the end."""
    sets, counts = choose_sets(args)
    target, tokenizer, methods = load_all(args)
    if max(context or 0 for context in args.context) >= (limit := target.config.max_position_embeddings):
        raise InputError(f"--context: {max(args.context)} tokens leave no room in the target's max_position_embeddings, {limit}")
    header, rows, part, latency, stopped = describe(target, methods), [], None, {}, False
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "part", "resume", "figures", "data_dir", "device")}
    settings |= header | {"prompts": hashlib.sha256(repr((sets, counts)).encode()).hexdigest()}
    if args.part:
        rows, part = open_part(args.part, settings, args.resume)
    try:
        for measured in measure_all(target, tokenizer, methods, sets, counts, args, rows):
            rows += measured
            if part:
                data.append(part, [measured])
        if args.figures and RANK == 0:
            latency = {name: draft_times(target, drafter) for name, (drafter, B) in methods.items() if B > 1}
    except InputError:
        if part and not rows:
            args.part.unlink()                     # nothing is measured: the command can be mended
        raise
    except KeyboardInterrupt:
        stopped = True
        say("stopped; the table of what was measured follows" + ("; the same command with --resume goes on" if part else ""))
    if WORLD > 1 and not stopped:
        shares = [None] * WORLD
        dist.all_gather_object(shares, rows)
        rows = list(itertools.chain(*shares))
        dist.destroy_process_group()               # else its threads may end the process by an abort
    return header, rows, list(sets), list(methods)[1:] or ["plain"], latency, stopped


def main(argv=None):
    args = parse_args(argv)
    if args.figures:
        args.figures.mkdir(parents=True, exist_ok=True)
    if WORLD > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(days=7))
    header, rows, sets, methods, latency, stopped = run(args)
    if RANK == 0:
        header["command"] = " ".join(["python bench.py", *(sys.argv[1:] if argv is None else argv)])
        report, paper = report_of(rows, methods), published(args.target, () if args.thinking else args.temperature)
        results = {"header": header, "stopped": stopped, "report": report, "published": paper, "draft_times_ms": latency}
        print(*pieces(header, report, sets, paper), sep="\n")
        if args.json and not stopped:
            write_aside(args.json, json.dumps(results | {"rows": rows}).encode())
            say(f"{args.json} is written, with every prompt's numbers")
        if args.figures and not stopped:
            draw(args.figures, report, sets, paper, latency)
            say(f"four figures are in {args.figures}")
        print(json.dumps(results, separators=(",", ":")), flush=True)
    if stopped:
        sys.exit(130)
    if args.part:
        args.part.unlink()


if __name__ == "__main__":
    command_line(main)
