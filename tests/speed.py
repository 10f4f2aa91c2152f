"""The speed rows: how fast the embedded pair and SmolLM2 decode here, beside plain decoding, transformers and the authors' package.

    python tests/speed.py                 all rows, some ten minutes on 2 cores; --quick: fewer prompts and rounds
    SMOLLM2_DIR=... python tests/speed.py with SmolLM2 (a Hugging Face directory); without it its shape, random weights, where that will do

What is compared runs in turns, in one process, on the same prompts, in fp32 on 2 threads; what is printed are medians. Rows that need transformers 5.15.0
or dflash 0.1.0 say so where these are not installed. One line a row; at the end all of it once more as one line of JSON.
"""
import argparse
import collections
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import make_golden
from draft import DraftConfig, Drafter, default_target_layer_ids
from model import Config
from speculate import Stats, TINY, generate, load
from target import Target

TASKS = ("arithmetic", "code", "story")
SMOLLM2 = dict(  # its config.json; shape alone decides the time of a forward
    model_type="llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    vocab_size=49152, rms_norm_eps=1e-5, rope_theta=100000.0, max_position_embeddings=8192, tie_word_embeddings=True, hidden_act="silu")


@dataclass
class Row:
    name: str
    value: float | None            # None: not measured, `detail` says why
    bar: float | None = None       # None: no bar, for information
    unit: str = "x"
    most: bool = False             # the bar is an upper bound
    noisy: bool = True             # a time, so that a test asks for 0.7 of the bar
    detail: dict = field(default_factory=dict)

    def holds(self, share=1.0):
        """Is the bar met, or `share` of it where the row is a time?"""
        share = share if self.noisy else 1.0
        return self.value <= self.bar / share if self.most else self.value >= self.bar * share

    def __str__(self):
        value = "skipped" if self.value is None else f"{self.value:.3g}{self.unit}"
        bar = "" if self.bar is None else f"{'<=' if self.most else '>='} {self.bar:.3g}{self.unit}"
        verdict = "" if self.value is None or self.bar is None else "yes" if self.holds() else "NO"
        shown = {key: f"{v:.3g}" if isinstance(v, float) else v for key, v in self.detail.items()}
        return f"{self.name:<62}{value:>9}  {bar:<9}{verdict:<4} {', '.join(f'{key} {v}' for key, v in shown.items())}"


def missing(*packages):
    """-> why a row is skipped, or None when all packages are here."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed" if absent else None


# ---------------------------------------------------------------------------------------------------------------------
# The authors' package (PyPI dflash 0.1.0); also used by tests/oracle/test_oracle.py

def load_authors(target_dir, draft_dir):
    """-> transformers' target and the authors' drafter, fp32."""
    import dflash.model
    import transformers
    transformers.utils.logging.disable_progress_bar()
    dflash.model._cuda_time = time.perf_counter        # its statistics call torch.cuda.synchronize
    target = make_golden.load_transformers(target_dir)
    drafter, info = dflash.model.DFlashDraftModel.from_pretrained(
        draft_dir, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True)
    assert not any(info.values()), info                # from_pretrained only warns about missing and unexpected tensors
    return target, drafter.eval()


def authors_generate(target, drafter, prompt, max_new_tokens, stop_ids=None, block_size=16):
    """-> tokens, tokens committed by each cycle"""
    import dflash.model
    out = dflash.model.dflash_generate(drafter, target, torch.tensor([prompt]), max_new_tokens, sorted(stop_ids) if stop_ids else None,
                                       block_size=block_size, return_stats=True)
    return out.output_ids[0, len(prompt):].tolist(), out.acceptance_lengths


def run(target, drafter, prompt, max_new_tokens, stop_ids=(), vocab=None):
    """Our loop to its end -> tokens, Stats"""
    stats = Stats(generate(target, drafter, prompt, max_new_tokens, stop_ids, vocab=vocab))
    return stats.output, stats


# ---------------------------------------------------------------------------------------------------------------------
# The embedded pair: speed-up, and what explains it

def read_prompts(pair, tokenizer, each):
    """heldout.jsonl -> {task: the first `each` prompts as ids}"""
    prompts = {task: [] for task in TASKS}
    for line in (pair / "heldout.jsonl").read_text().splitlines():
        row = json.loads(line)
        if len(prompts[row["task"]]) < each:
            prompts[row["task"]].append(tokenizer.chat([{"role": "user", "content": row["prompt"]}]))
    return prompts


def speedup_rows(models, prompts, rounds, bars):
    """Plain and speculative in turns -> one Row a task, and {task: plain responses}, {task: tau} for the control."""
    target, drafter, tokenizer = models
    rows, responses, taus = [], {}, {}
    for task in TASKS:
        def decode(with_drafter, prompt):
            return run(target, with_drafter, prompt, 512, target.stop_ids, tokenizer.size)

        for warm in (drafter, None):
            decode(warm, prompts[task][0])
        plain, fast = [[] for _ in prompts[task]], [[] for _ in prompts[task]]       # a list of (tokens, Stats) for each prompt, one a round
        for _, (i, prompt) in itertools.product(range(rounds), enumerate(prompts[task])):
            plain[i].append(decode(None, prompt))
            fast[i].append(decode(drafter, prompt))
        per_token = [[median(stats.seconds_per_token for _, stats in runs) for runs in side] for side in (plain, fast)]
        step, cycle = (1000 * median(c.seconds for runs in side for _, stats in runs for c in stats.cycles) for side in (plain, fast))
        taus[task] = mean(runs[0][1].tau for runs in fast)
        responses[task] = [runs[0][0] for runs in plain]
        rows.append(Row(f"speed-up, embedded pair, {task}", median(a / b for a, b in zip(*per_token)), bars[task], detail={
            "tau": taus[task], "explained (tau x step / cycle)": taus[task] * step / cycle, "plain step ms": step, "cycle ms": cycle,
            "plain ms/token": 1000 * median(per_token[0]), "speculative ms/token": 1000 * median(per_token[1]),
            "tokens": median(len(r) for r in responses[task]), "identical": f"{sum(a[0][0] == b[0][0] for a, b in zip(plain, fast))}/{len(plain)}"}))
    return rows, responses, taus


def training_responses(models, file, count=20000):
    """-> pairs of prompt ids and response ids: of a file that data.py wrote, or the reference responses of tiny/tasks.py to training prompts."""
    target, _, tokenizer = models
    if file:
        import data
        for row in data.rows(file, target.config.vocab_size, max_length=10**9):
            yield row.ids[:row.prompt_length].tolist(), row.ids[row.prompt_length:].tolist()
        return
    from tiny.tasks import examples
    stop = min(target.stop_ids)
    for row in itertools.islice(examples("train", 0), count):
        yield tokenizer.chat([{"role": "user", "content": row["prompt"]}]), tokenizer.encode(row["response"]) + [stop]


def control_row(models, prompts, responses, taus, file):
    """A 4-gram table as the drafter: the most frequent next token after the last 3, after fewer where these were never seen. Replayed over the greedy
    responses: a cycle accepts the longest correct prefix of its 15 drafts, as the loop would."""
    counts = [collections.defaultdict(collections.Counter) for _ in range(4)]
    for prompt, response in training_responses(models, file):
        ids = prompt[-3:] + response
        for i in range(len(prompt[-3:]), len(ids)):
            for n in range(4):
                counts[n][tuple(ids[i - n:i])][ids[i]] += 1
    best = [{context: counter.most_common(1)[0][0] for context, counter in table.items()} for table in counts]

    def next_token(ids):
        return next(best[n][context] for n in (3, 2, 1, 0) if (context := tuple(ids[len(ids) - n:])) in best[n])

    def tau(prompt, response):
        done, cycles = 1, 0                            # the prefill's token is in no cycle
        while done < len(response):
            ids, accepted = prompt[-3:] + response[:done], 0
            while accepted < 15 and done + accepted < len(response) and next_token(ids) == response[done + accepted]:
                ids.append(response[done + accepted])
                accepted += 1
            done, cycles = min(done + accepted + 1, len(response)), cycles + 1
        return (len(response) - 1) / cycles

    table = {task: mean(tau(p, r) for p, r in zip(prompts[task], responses[task])) for task in TASKS}
    return Row("control: tau of a 4-gram table / the drafter's, arithmetic", table["arithmetic"] / taus["arithmetic"], 0.5, most=True, noisy=False, detail={
        **{f"tau {task}": table[task] for task in TASKS}, "table from": file or "the reference responses of 20,000 training prompts"})


# ---------------------------------------------------------------------------------------------------------------------
# Against others: whole calls, prefill included, in turns

def in_turns(ours, theirs, prompts, rounds):
    """Run both on every prompt, whoever was second going first the next time -> median of theirs / ours, and both medians in seconds."""
    times = {ours: [], theirs: []}
    for f in (ours, theirs):
        f(prompts[0])
    order = [ours, theirs]
    for prompt in prompts * rounds:
        for f in order:
            began = time.perf_counter()
            f(prompt)
            times[f].append(time.perf_counter() - began)
        order.reverse()
    return median(b / a for a, b in zip(times[ours], times[theirs])), median(times[ours]), median(times[theirs])


def versus_rows(name, models, target_dir, draft_dir, prompts, new_tokens, rounds, bars):
    """No stop ids, so that every response has `new_tokens` tokens. -> two Rows"""
    names = f"plain against transformers' generate, {name}", f"speculative against the authors' package, {name}"
    if why := missing("transformers", "dflash"):
        return [Row(n, None, bar, detail={"because": why}) for n, bar in zip(names, bars)]
    target, drafter, _ = models
    their_target, their_drafter = load_authors(target_dir, draft_dir)
    their_target.generation_config.eos_token_id = None

    def plain(prompt):
        assert len(run(target, None, prompt, new_tokens)[0]) == new_tokens

    def their_plain(prompt):
        ids = torch.tensor([prompt])
        out = their_target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        assert out.shape[1] == len(prompt) + new_tokens

    def speculative(prompt):
        assert len(run(target, drafter, prompt, new_tokens)[0]) == new_tokens

    def their_speculative(prompt):
        assert len(authors_generate(their_target, their_drafter, prompt, new_tokens)[0]) == new_tokens

    rows = []
    for row_name, bar, ours, theirs in zip(names, bars, (plain, speculative), (their_plain, their_speculative)):
        ratio, a, b = in_turns(ours, theirs, prompts, rounds)
        rows.append(Row(row_name, ratio, bar, detail={"ours ms/token": 1000 * a / new_tokens, "theirs ms/token": 1000 * b / new_tokens,
                                                      "tokens": new_tokens, "runs": len(prompts) * rounds}))
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# SmolLM2's shape: what the loop itself costs, and what 16 rows cost

def random_smollm2(dtype=torch.float32):
    """SmolLM2's shape with a five-layer drafter, random weights -> target, drafter"""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        target = Target(Config.from_dict(SMOLLM2))
        layer = Config.from_dict(SMOLLM2 | dict(model_type="qwen3", num_hidden_layers=5, tie_word_embeddings=False))
        drafter = Drafter(DraftConfig(layer, 16, 16, default_target_layer_ids(30), 30))
    for module in (target, drafter):
        module.to_empty(device="cpu").to(dtype).eval().requires_grad_(False)
        for p in module.parameters():
            p.copy_(torch.ones_like(p) if p.dim() == 1 else torch.empty(p.shape).normal_(0, 0.02, generator=generator))
    return target, drafter


@torch.inference_mode()
def loop_row(target, drafter, new_tokens):
    """generate()'s cycles, each followed by the bare forwards that it stands for: 16 rows of the target, then the draft, after as many tokens."""
    B, taps = drafter.config.block_size, drafter.config.target_layer_ids
    prompt = torch.randint(target.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
    cache, draft_cache = target.new_cache(64 + new_tokens + B), drafter.new_cache(64 + new_tokens + B)
    drafter.extend(draft_cache, target(prompt, cache, taps, last_only=True)[1])
    ids = prompt[:, :B]
    feature, block = target(ids[:, :1], taps=taps)[1], target.embed(ids)
    shares, whole, verifies, drafts = [], [], [], []
    for number, cycle in enumerate(generate(target, drafter, prompt[0].tolist(), new_tokens)):
        if number < 2:                                 # the prefill, and the cycle that takes in the whole prompt's features
            continue
        before = time.perf_counter()
        drafter.extend(draft_cache, feature)
        target.head(drafter.propose(draft_cache, block)[:, 1:])
        between = time.perf_counter()
        target(ids, cache)
        after = time.perf_counter()
        cache.length -= B - 1
        whole.append(cycle.seconds)
        drafts.append(between - before)
        verifies.append(after - between)
        shares.append(1 - (after - before) / cycle.seconds)
    return Row("the loop itself: cycle less its bare forwards, SmolLM2's shape", 100 * median(shares), 5, "%", most=True, detail={
        "cycle ms": 1000 * median(whole), "target, 16 rows, ms": 1000 * median(verifies), "draft ms": 1000 * median(drafts), "cycles": len(whole)})


@torch.inference_mode()
def verify_cost_row(target, rounds):
    """16 rows against one, after 200 tokens."""
    ids = torch.randint(target.config.vocab_size, (1, 216), generator=torch.Generator().manual_seed(0))
    cache, times = target.new_cache(216), {1: [], 16: []}
    target(ids[:, :200], cache, last_only=True)
    for _ in range(rounds + 2):
        for rows in times:
            cache.length = 200
            began = time.perf_counter()
            target(ids[:, 200:200 + rows], cache)
            times[rows].append(time.perf_counter() - began)
    one, many = (1000 * median(times[rows][2:]) for rows in (1, 16))
    dtype = str(target.dtype).removeprefix("torch.")
    return Row(f"16-row verify / plain step, SmolLM2's shape, {dtype}", many / one, detail={"step ms": one, "verify ms": many})


# ---------------------------------------------------------------------------------------------------------------------
# All of it

def hardware():
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        name = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), name)
    versions = {p: importlib.metadata.version(p) for p in ("torch", "transformers", "dflash") if not missing(p)}
    return {"cpu": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "python": platform.python_version(), **versions}


def all_rows(quick=False, pair=TINY, responses=None):
    """Measure -> Row after Row."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    bars = dict(arithmetic=2.5, code=2.5, story=1.0)
    if (pair / "drafter" / "model.safetensors").exists():
        models = load(pair / "target", pair / "drafter", "cpu", torch.float32)
        prompts = read_prompts(pair, models[2], 6 if quick else 20)
        rows, plain, taus = speedup_rows(models, prompts, 1 if quick else 3, bars)
        yield from rows
        yield control_row(models, prompts, plain, taus, responses)
        some = [prompts[task][i] for i in range(1 if quick else 2) for task in TASKS]
        yield from versus_rows("embedded pair", models, pair / "target", pair / "drafter", some, 128, 1 if quick else 3, (1.5, 1.2))
    else:
        yield Row("embedded pair", None, detail={"because": f"there is no {pair / 'drafter' / 'model.safetensors'}"})

    smol = os.environ.get("SMOLLM2_DIR")
    if smol and not missing("transformers", "dflash"):
        import tempfile

        import toys
        with tempfile.TemporaryDirectory() as folder:
            toys.write_drafter(folder, smol, layers=5, mask_token_id=16)
            models = load(smol, folder, "cpu", torch.float32)
            asked = ("How do rainbows form?", "Write a Python function that reverses a list.", "What is 17 + 25, and why?")
            prompts = [models[2].chat([{"role": "user", "content": text}]) for text in asked]
            yield from versus_rows("SmolLM2 + random drafter", models, smol, folder, prompts[:2] if quick else prompts, 48 if quick else 128,
                                   1 if quick else 2, (1.0, 1.0))
        target, drafter, _ = models
    else:
        why = missing("transformers", "dflash") or "SMOLLM2_DIR is not set"
        yield Row("SmolLM2 against transformers and the authors' package", None, detail={"because": why})
        target, drafter = random_smollm2()
    yield loop_row(target, drafter, 30 if quick else 128)
    yield verify_cost_row(target, 5 if quick else 20)
    yield verify_cost_row(random_smollm2(torch.bfloat16)[0], 5 if quick else 20)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer prompts and rounds")
    parser.add_argument("--pair", type=Path, default=TINY, help="a folder with target/, drafter/ and heldout.jsonl (default: tiny)")
    parser.add_argument("--responses", help="what data.py wrote, for the 4-gram control (default: the reference responses of tiny/tasks.py)")
    args = parser.parse_args()
    torch.set_num_threads(2)
    print(", ".join(f"{key} {value}" for key, value in hardware().items()))
    print(f"{'row':<62}{'measured':>9}  {'bar':<9}{'met':<4}")
    rows = []
    for row in all_rows(args.quick, args.pair, args.responses):
        rows.append(row)
        print(row, flush=True)
    print(json.dumps({"hardware": hardware(), "quick": args.quick, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
