"""The paper's ablations on the embedded target: what each choice of the method is worth, ours beside what the paper printed (DFlash, arXiv 2602.06036).

    python -m paper.ablations depth                        or taps, block-size, loss, anchors, conditioning, optimizer; several of them, or all
    python -m paper.ablations all --figures figures        every training is kept in --out, and none is made twice

Each variant is BASE with one thing changed, trained for the same number of steps by train.py's own functions, from each of three seeds. tau and speed-up
come from the real loop: the same held-out prompts are decoded plainly and speculatively, in turns, and counted by bench.py. Over tasks tau is averaged
arithmetically, speed-up geometrically, the paper's as ours; over seeds the mean is shown, and the least and the greatest.

Losses and optimisers want learning rates of their own: each gets the best of three, chosen on a seed that counts for nothing else.
For CPUs: the two other ways of conditioning have a dense mask.
"""
import argparse
import contextlib
import hashlib
import json
import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import geometric_mean, mean

import torch
from tqdm import tqdm

import bench
import data
import run
import train
from checkpoint import InputError, Parser, command_line, read_json
from draft import Drafter, default_target_layer_ids
from sets import read_prompts
from speculate import TINY, load, say
from target import keep

PUBLISHED = Path(__file__).with_name("published.json")
BASE = {"layers": run.EMBEDDED["layers"], "taps": 5, "block_size": 16, "conditioning": "kv", "placing": "random", "loss": run.EMBEDDED["loss"],
        "optimizer": run.EMBEDDED["optimizer"], "lr": 0.04}       # a run of 160 steps wants larger steps than one of 1,800
BLOCKS, BUDGET = (4, 8, 16), 256               # new tokens of a response, as train.real_tau has it
RATES, RATE_SEED = {"adamw": (6e-4, 2e-3, 6e-3), "muon": (0.02, 0.04, 0.08)}, 100
SPREAD = {"tau": 0.15, "speedup": 1.04}        # the paper's own, from run to run (published.json's note): a difference of taus, a ratio of speed-ups
RULE = ("two of ours differ where their ranges over the seeds do not touch, and are within noise otherwise; two of the paper's differ by more than its own "
        f"spread from run to run, {SPREAD['tau']} of tau or {SPREAD['speedup'] - 1:.0%} of speed-up, or have no order")


@dataclass(frozen=True)
class Ablation:
    title: str
    variants: dict                 # by the paper's name of it, where it has one: what is changed; `test`: block size to decode with; `share`: of --anchors
    reference: str                 # the variant that those which the paper has not are compared with
    table: str | None = None       # in published.json
    rates: bool = False            # whether each variant has a learning rate of its own
    remark: str = ""


ABLATIONS = {
    "depth": Ablation("layers of the drafter", {str(n): {"layers": n} for n in (1, 2, 3, 5)}, "3", "layers"),
    "taps": Ablation("tapped layers of the target", {str(n): {"taps": n} for n in (1, 3, 5)}, "5", "features"),
    "block-size": Ablation("block size in training -> in decoding", {f"{a}->{b}": {"block_size": a, "test": b} for a in BLOCKS for b in BLOCKS}, "16->16",
                           "block_size train->test", remark="The anchors of a sequence are as many for each block size."),
    "loss": Ablation("weights of the slots in the loss", {
        "exponential decay": {"loss": "decay", "optimizer": "muon"}, "uniform": {"loss": "uniform", "optimizer": "muon"},
        "D-PACE": {"loss": "dpace", "optimizer": "muon"}}, "exponential decay", "loss weights (chart read, approximate)", rates=True,
        remark="The paper's is tau after its first epoch, nearest to so short a training; after nine both are at 6.4. D-PACE is arXiv 2605.18810."),
    "anchors": Ablation("where blocks begin in training", {
        "random anchors": {}, "random anchors, a quarter as many": {"share": 0.25}, "contiguous blocks": {"placing": "contiguous"}}, "random anchors", "anchors",
        remark="Contiguous blocks are no more than random ones, and the same each epoch."),
    "conditioning": Ablation("how the drafter gets to know the target's features", {
        "block, KV injection": {"conditioning": "kv"}, "block, input fusion": {"conditioning": "input"}, "no target features": {"conditioning": "none"}},
        "block, KV injection", "conditioning (tau, speedup order swapped in the paper)",
        remark="The paper's row without features is another table's (5 layers, T = 0); ours reads the context's tokens in place of features."),
    "optimizer": Ablation("optimiser of the matrices", {"adamw": {"optimizer": "adamw"}, "muon": {"optimizer": "muon"}}, "adamw", rates=True,
                          remark="The paper trains with AdamW and prints no other.")}


# ---------------------------------------------------------------------------------------------------------------------
# What variants change outside train.py's options

class InputDrafter(Drafter):
    """Features at the drafter's input, as EAGLE-3 has them: a decided token is a row of its own, its embedding plus fc(features), that passes all layers
    causally, and a block sees the keys and values which the layers make of it. Without features (`share` 0) it is a small language model that fills blocks.

    features (batch, T, H + n * H): the token's embedding first (`tap_embeddings`), then the tapped layers.
    """

    def __init__(self, config, share):
        super().__init__(config)
        self.share = share

    def context(self, features):
        H = self.config.layer.hidden_size
        return features[..., :H] + super().context(self.share * features[..., H:])

    def extend(self, cache, features):
        rows, T = self.context(features), features.shape[1]
        rotary = self.rotary(torch.arange(cache.length, cache.length + T, device=rows.device), rows.dtype)
        for i, layer in enumerate(self.layers):
            rows = layer(rows, rotary, cache.at(i), cache.bias(T))
        cache.advance(T)

    def forward(self, blocks, features, positions, mask):
        features = features.repeat_interleave(len(blocks) // len(features), 0)
        batch, S = features.shape[:2]
        places = torch.arange(S, device=blocks.device)
        rotary = self.rotary(torch.cat((places.expand(batch, S), positions), 1), blocks.dtype)
        causal = (places[:, None] >= torch.arange(mask.shape[-1], device=blocks.device)).expand(batch, 1, -1, -1)
        rows, mask = torch.cat((self.context(features), blocks), 1), torch.cat((causal, mask), 2)
        for layer in self.layers:
            rows = layer(rows, rotary, keep, mask)
        return self.norm(rows[:, S:])


def tap_embeddings(target, args, output):
    """A forward hook of the target: the tokens' embeddings stand before the tapped layers, for a drafter that has to read tokens."""
    logits, features = output
    return logits, features if features is None else torch.cat((target.embed(args[0]), features), -1)


def contiguous(B):
    """In place of train.draw_anchors: the response cut into blocks of B from its first token on, always the same (as many as there is room for)."""
    return lambda candidates, N, *_: list(candidates)[::B][:N]


@contextlib.contextmanager
def circumstances(target, settings):
    """While a variant is trained and measured: its way to draw anchors, and for a drafter with other inputs the embeddings among the features."""
    draw, hook = train.draw_anchors, None
    if settings["placing"] == "contiguous":
        train.draw_anchors = contiguous(settings["block_size"])
    if settings["conditioning"] != "kv":
        hook = target.register_forward_hook(tap_embeddings)
    try:
        yield
    finally:
        train.draw_anchors = draw
        if hook:
            hook.remove()


def new_drafter(target, tokenizer, settings):
    """Fresh weights, from the variant's seed."""
    taps = default_target_layer_ids(target.config.num_hidden_layers, settings["taps"])
    drafter = run.new_drafter(target, argparse.Namespace(**settings | {"taps": taps}, init=None, mask_token_id=None), tokenizer)
    if settings["conditioning"] != "kv":
        torch.manual_seed(settings["seed"])
        drafter = InputDrafter(drafter.config, float(settings["conditioning"] == "input")).initialise().train()
    return drafter


# ---------------------------------------------------------------------------------------------------------------------
# Training and measuring, each variant and seed once

class Lab:
    """The embedded target, data and prompts, and the trainings that are done: a file each in args.out, found again by all the settings that matter."""

    def __init__(self, args, stopping=()):
        self.args, self.base, self.stopping, self.used, self.made = args, BASE | {"anchors": args.anchors}, stopping, set(), 0
        self.target, _, self.tokenizer = load(None, None, "cpu")
        self.rows = data.rows(args.data, self.target.config.vocab_size, run.PAPER["max_length"], self.target.name)
        self.encoded, _ = run.eval_prompts(args, self.target, self.tokenizer, self.rows)       # which refuses prompts that do not fit
        self.prompts = [(task, prompt) for task, prompts in read_prompts(args.eval_prompts).items() for prompt in prompts[:args.eval_each]]
        self.shared = {"steps": args.steps, "batch_size": args.batch_size, "data_sha256": sha256(args.data.read_bytes()), "torch": torch.__version__,
                       "target_sha256": sha256((TINY / "target" / "model.safetensors").read_bytes()), "prompts_sha256": sha256(repr(self.prompts).encode())}
        args.out.mkdir(parents=True, exist_ok=True)

    def result(self, changes, seed):
        """Of the base with these changes and this seed -> {settings, curve, scores}: read, if it is there, or else trained and measured now."""
        settings = self.base | {name: value for name, value in changes.items() if name not in ("test", "share")}
        settings["anchors"] = max(1, round(self.base["anchors"] * changes.get("share", 1)))
        name = "-".join(f"{key}-{value}" for key, value in settings.items() if value != self.base[key]) or "base"
        settings |= self.shared | {"seed": seed}
        path = self.args.out / f"{name}-seed-{seed}-{sha256(json.dumps(settings, sort_keys=True).encode())[:12]}.json"
        self.used.add(path)
        found = read_json(path) if path.exists() else {}
        if found.get("settings") != settings or not {"curve", "scores"} <= found.keys():
            with circumstances(self.target, settings):
                drafter, curve = self.train(settings, f"{name}, seed {seed}")
                run.write_aside(path, json.dumps({"settings": settings, "curve": curve, "scores": self.measure(drafter, settings)}) + "\n")
            found, self.made = read_json(path), self.made + 1
        return found

    def train(self, settings, title):
        """-> the drafter, and loss and simulated tau of every step. Ctrl-C ends it after the step under way."""
        drafter = new_drafter(self.target, self.tokenizer, settings)
        optimisers = train.make_optimisers(drafter, settings["optimizer"], settings["lr"])
        options = argparse.Namespace(**settings, gamma=train.default_gamma(settings["block_size"]), accumulate=1, compile=False)
        run.check_memory(self.target, drafter, options, max(len(row.ids) for row in self.rows))
        curve = {"loss": [], "simulated_tau": []}
        with tqdm(total=options.steps, desc=title, unit="step", mininterval=1, file=sys.stderr) as bar:
            for record in train.fit(self.target, drafter, optimisers, self.rows, options):
                for key in curve:
                    curve[key].append(round(record[key], 4))
                bar.set_postfix_str(f"loss {record['loss']:.3f}, tau~ {record['simulated_tau']:.2f}", refresh=False)
                bar.update()
                if self.stopping and record["step"] < options.steps:
                    raise KeyboardInterrupt
        return drafter.eval(), curve

    def measure(self, drafter, settings):
        """tau and speed-up -> {block size decoded with: {task: numbers}}. A drafter with nothing but its block size changed tries the other sizes, too; one
        that is there to choose a learning rate has its tau alone measured."""
        own, threads = settings["block_size"], torch.get_num_threads()
        if settings.get("seed") == RATE_SEED:
            taus = train.real_tau(self.target, drafter, self.encoded, self.tokenizer.size, BUDGET)
            return {str(own): {task: {"tau": tau} for task, tau in taus.items()}}
        blocks = BLOCKS if all(settings[key] == self.base[key] for key in self.base if key != "block_size") and own in BLOCKS else (own,)
        methods = {"plain": (None, 1)} | {str(B): (drafter, B) for B in blocks}
        options, rows = argparse.Namespace(thinking=False, max_new_tokens=BUDGET, seed=0), []
        torch.set_num_threads(1)                   # as speculate.py: matrices this small are not worth waking a second thread
        for number, (task, prompt) in enumerate(tqdm(self.prompts, desc="tau", unit="prompt", leave=False, file=sys.stderr)):
            rows += bench.measure(self.target, self.tokenizer, methods, prompt, {"set": task, "temperature": 0.0}, options, number, number == 0)
        torch.set_num_threads(threads)
        scores = {str(B): {task: bench.summarise([row for row in rows if row["set"] == task], str(B)) for task, _ in self.prompts} for B in blocks}
        kept = ("tau", "speedup", "responses", "tokens_out", "plain_ms_a_token", "ms_a_token", "identical", "largest_gap")
        if not all("tau" in numbers for tasks in scores.values() for numbers in tasks.values()):
            raise InputError(f"{self.args.eval_prompts}: a task without an answer of two tokens, so nothing to draft")
        return {B: {task: {key: numbers[key] for key in kept} for task, numbers in tasks.items()} for B, tasks in scores.items()}


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def average(numbers, key):
    """Of several tasks: arithmetic of taus, geometric of speed-ups."""
    return (mean if key == "tau" else geometric_mean)(task[key] for task in numbers.values())


def choose_rate(lab, changes):
    """-> {learning rate: tau} of three, on one seed. One that diverges is out of the race."""
    taus = {}
    for lr in RATES[changes["optimizer"]]:
        try:
            taus[lr] = average(lab.result(changes | {"lr": lr}, RATE_SEED)["scores"][str(BASE["block_size"])], "tau")
        except InputError as error:
            say(f"learning rate {lr:g} is passed over: {error}")
            taus[lr] = 0.0
    return taus


def study(lab, name, seeds):
    """One ablation -> {rows: {variant: its numbers}, rates, pairs, paper}, and every variant's curves."""
    ablation, rows, rates, curves = ABLATIONS[name], {}, {}, {}
    for label, changes in ablation.variants.items():
        if ablation.rates:
            rates[label] = choose_rate(lab, changes)
            changes = changes | {"lr": max(rates[label], key=rates[label].get)}
        results = [lab.result(changes, seed) for seed in seeds]
        block = changes.get("test", results[0]["settings"]["block_size"])
        scores = [result["scores"][str(block)] for result in results]
        rows[label] = {"changes": changes, "tau": [average(s, "tau") for s in scores], "speedup": [average(s, "speedup") for s in scores],
                       "tau_by_task": {task: mean(s[task]["tau"] for s in scores) for task in scores[0]}}
        rows[label] |= {key: sum(numbers[key] for s in scores for numbers in s.values()) for key in ("identical", "responses")}
        curves[label.split("->")[0]] = [result["curve"]["simulated_tau"] for result in results]      # of a training, however it is decoded with
    paper = published(ablation.table)
    return {"rows": rows, "rates": rates, "pairs": compare(rows, paper["rows"], ablation.reference), "paper": paper}, curves


# ---------------------------------------------------------------------------------------------------------------------
# The paper's side, and the verdict

def published(table):
    """A table of the paper's, as printed -> {source, setup, rows: {variant: {task: {speedup, tau}}}}"""
    paper = read_json(PUBLISHED)
    tables, source = paper["ablations"], f"{paper['source'].split(';')[0]}, its main table being of: {paper['table1']['setup']}"
    if table is None:
        return {"source": source, "setup": None, "rows": {}}
    rows = tables[table]["rows"]
    if table.startswith("loss"):
        rows = {label: {"math500, epoch 1": (None, taus[0])} for label, taus in rows.items()}
    if table.startswith("conditioning"):
        rows = rows | {"no target features": tables["no target features"]["rows"]["T=0"]}
    rows = {label: {task: dict(zip(("speedup", "tau"), pair)) for task, pair in tasks.items()} for label, tasks in rows.items()}
    return {"source": source, "setup": tables[table]["setup"], "rows": rows}


def difference(first, second, key):
    return first - second if key == "tau" else first / second


def our_order(first, second):
    """Which of two variants is ahead, from a number of each seed -> 1 the first, -1 the second, 0 neither; None where there is no spread to go by."""
    if min(len(first), len(second)) < 2:
        return None
    return (min(first) > max(second)) - (max(first) < min(second))


def their_order(gap, key):
    """From a difference that the paper printed -> 1, -1, or 0 where it is within the paper's own spread; None where it printed none."""
    if gap is None:
        return None
    low, high = (-SPREAD[key], SPREAD[key]) if key == "tau" else (1 / SPREAD[key], SPREAD[key])
    return (gap > high) - (gap < low)


def verdict(ours, theirs):
    """On the paper's order of two variants."""
    if ours is None:
        return "one seed, no verdict"
    if theirs:
        return "within noise" if ours == 0 else "agrees" if ours == theirs else "disagrees"
    return ("not in the paper" if theirs is None else "no order in the paper") + {1: "; ours: ahead", 0: "; ours: within noise", -1: "; ours: behind"}[ours]


def compare(rows, paper, reference):
    """Every pair that the paper has, and each other variant against the reference -> [{first, second, tau: {ours, theirs, verdict}, speedup: ...}]"""
    pairs = list(combinations([label for label in rows if label in paper], 2))
    pairs += [(label, reference) for label in rows if label not in paper and label != reference]
    found = []
    for first, second in pairs:
        pair = {"first": first, "second": second}
        for key in ("tau", "speedup"):
            both = [task for task, numbers in paper.get(first, {}).items() if task in paper.get(second, {}) and numbers[key]]
            theirs = difference(*(average({task: paper[label][task] for task in both}, key) for label in (first, second)), key) if both else None
            pair[key] = {"ours": difference(mean(rows[first][key]), mean(rows[second][key]), key), "theirs": theirs,
                         "verdict": verdict(our_order(rows[first][key], rows[second][key]), their_order(theirs, key))}
        found.append(pair)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The report

def spread(values, form):
    """Mean, and where there are several, the least and the greatest."""
    return form.format(mean(values)) + (f" ({form.format(min(values))} to {form.format(max(values))})" if len(values) > 1 else "")


def printed(tasks):
    """The paper's own numbers, task by task."""
    return "; ".join(f"{task} " + (f"{pair['speedup']}x, {pair['tau']}" if pair["speedup"] else f"{pair['tau']}") for task, pair in tasks.items()) or "-"


def pieces(name, found):
    """Yield the Markdown of one ablation."""
    ablation, rows, theirs = ABLATIONS[name], found["rows"], found["paper"]["rows"]
    yield f"### {name}: {ablation.title}\n"
    tasks = list(next(iter(rows.values()))["tau_by_task"])
    lines = [[label, spread(row["tau"], "{:.2f}"), spread(row["speedup"], "{:.2f}x"), *(f"{row['tau_by_task'][task]:.2f}" for task in tasks),
              printed(theirs.get(label, {}))] for label, row in rows.items()]
    lines += [[f"*{label}*", *"-" * (2 + len(tasks)), printed(row)] for label, row in theirs.items() if label not in rows]
    yield bench.markdown(["variant", "tau", "speed-up", *(f"tau, {task}" for task in tasks), "*the paper's speed-up, tau*"], lines)
    if found["rates"]:
        best = {label: max(taus.values()) for label, taus in found["rates"].items()}
        yield bench.markdown(["learning rate", f"tau on seed {RATE_SEED}, the best in bold"], [
            [label, ", ".join(f"{lr:g}: " + ("**{:.2f}**" if tau == best[label] else "{:.2f}").format(tau) for lr, tau in taus.items())]
            for label, taus in found["rates"].items()])
    yield bench.markdown(["", "tau", "*the paper's*", "verdict", "speed-up", "*the paper's*", "verdict"], [
        [f"{pair['first']} against {pair['second']}", *(cell for key, form in (("tau", "{:+.2f}"), ("speedup", "x {:.2f}"))
         for cell in (form.format(pair[key]["ours"]), bench.show(pair[key]["theirs"], form), pair[key]["verdict"]))] for pair in found["pairs"]])
    same, count = (sum(row[key] for row in rows.values()) for key in ("identical", "responses"))
    yield f"{same} of {count} responses are plain decoding's, token by token. {ablation.remark}".rstrip()
    if theirs:
        yield f"The paper's: {found['paper']['source']}; this one: {found['paper']['setup']}. Its differences are over the tasks that both rows have."
    yield ""


def draw(path, title, curves):
    """Simulated tau against the step, smoothed: of each variant the mean over the seeds, and the band between the least and the greatest."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for label, runs in curves.items():
        taus = torch.tensor(runs, dtype=torch.double)      # (seeds, steps)
        window = max(1, taus.shape[1] // 20)
        taus = taus.unfold(1, window, 1).mean(-1)
        steps = range(window, window + taus.shape[1])
        line, = axes.plot(steps, taus.mean(0), label=label)
        axes.fill_between(steps, taus.min(0).values, taus.max(0).values, color=line.get_color(), alpha=0.2, lw=0)
    axes.set(title=title, xlabel="step", ylabel="simulated tau, in training")
    axes.legend(fontsize=8)
    figure.savefig(path.with_suffix(".tmp"), format="png", dpi=130)
    os.replace(path.with_suffix(".tmp"), path)


# ---------------------------------------------------------------------------------------------------------------------
# Command line

def parse_args(argv=None):
    parser = Parser(prog="python -m paper.ablations", description="The paper's ablations on the embedded target, beside what the paper printed.")
    parser.add_argument("ablations", nargs="+", choices=[*ABLATIONS, "all"], metavar="ABLATION", help=", ".join(ABLATIONS) + ", or all")
    parser.add_argument("--steps", type=int, default=160, help="of every training (default: 160)")
    parser.add_argument("--batch-size", type=int, default=4, help="conversations a step (default: 4)")
    parser.add_argument("--anchors", type=int, default=12, help="blocks of a conversation (default: 12)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help=f"default: 0 1 2; seed {RATE_SEED} chooses learning rates")
    parser.add_argument("--data", type=Path, help="responses that data.py wrote (default: the embedded target's own, made where they are missing)")
    parser.add_argument("--eval-prompts", type=Path, default=TINY / "heldout.jsonl", help="prompts to measure on (default: tiny/heldout.jsonl)")
    parser.add_argument("--eval-each", type=int, default=4, help="how many of each task (default: 4)")
    parser.add_argument("--out", type=Path, default=Path("runs", "ablations"), help="where results are kept, and found again (default: runs/ablations)")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="a folder for the curves of each ablation, ablation-NAME.png")
    args = parser.parse_args(argv)
    args.command = shlex.join(["python", "-m", "paper.ablations", *(sys.argv[1:] if argv is None else argv)])
    args.ablations = list(ABLATIONS) if "all" in args.ablations else list(dict.fromkeys(args.ablations))
    args.seeds = list(dict.fromkeys(args.seeds))
    for name in ("steps", "batch_size", "anchors", "eval_each"):
        if not 1 <= getattr(args, name) < 2**31:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(args, name)}, but 1 or more is needed")
    if RATE_SEED in args.seeds or not all(-2**63 <= seed < 2**63 for seed in args.seeds):
        raise InputError(f"--seeds: {RATE_SEED} is the seed that learning rates are chosen on, and a seed has to fit 64 bits")
    return args


def main(argv=None):
    """-> exit code. Every finished training is on the disk; tables are printed as they are done, and the last line of stdout is all of it in JSON."""
    args, stopping, began = parse_args(argv), [], time.perf_counter()
    if args.figures:
        args.figures.mkdir(parents=True, exist_ok=True)
    args.data = args.data or run.own_responses()
    lab = Lab(args, stopping)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os._exit(130) if stopping else stopping.append(number))       # the second time at once
    machine = {key: value for key, value in bench.describe(lab.target, {}).items() if key in ("hardware", "threads", "torch", "dtype", "target")}
    seeds = " ".join(map(str, args.seeds))
    header = {"command": args.command, **machine,
              "trainings": f"{args.steps} steps of {args.batch_size} conversations with {args.anchors} anchors each, seeds {seeds}",
              "measured on": f"{args.eval_prompts.name}, greedy, prompts: {len(lab.prompts)}", "verdicts": RULE}
    print("\n".join(f"- {key}: {value}" for key, value in header.items()) + "\n", flush=True)
    results, complete = {}, False
    try:
        for name in args.ablations:
            results[name], curves = study(lab, name, args.seeds)
            for piece in pieces(name, results[name]):
                print(piece, flush=True)
            if args.figures:
                draw(args.figures / f"ablation-{name}.png", ABLATIONS[name].title, curves)
        complete = True
    except KeyboardInterrupt:
        say(f"stopped; {args.out} keeps the trainings that are finished, {lab.made} of them made now, and the same command goes on from there")
    minutes = (time.perf_counter() - began) / 60
    if complete:
        say(f"{len(lab.used)} trainings, {lab.made} of them made now, in {minutes:.1f} minutes")
    header |= {"complete": complete, "trained": lab.made, "minutes": round(minutes, 2)}
    print(json.dumps(header | {"ablations": results}, separators=(",", ":")), flush=True)
    return 0 if complete else 130


if __name__ == "__main__":
    command_line(main)
