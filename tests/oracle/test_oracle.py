"""The whole of it against other people's code: SmolLM2 against transformers, and our loop against the authors' package (PyPI dflash 0.1.0), all greedy.

Two forwards of different shape round differently, so even in fp32 the two best logits may change places: a difference counts as no fault where they lie
within 1e-5 of their size, and is listed as a warning at the end of pytest's output.
Needs transformers 5.15.0 and dflash 0.1.0; SMOLLM2_DIR names SmolLM2-135M-Instruct in Hugging Face layout (see .ci/run).
"""
import gzip
import json
import os
import random
import warnings
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("dflash")
import make_golden
import speculate
import toys
from speculate import TINY, load
from speed import TASKS, authors_generate, load_authors, read_prompts, run

DATA = Path(__file__).parents[3] / "shared" / "data"
B = 16
DRAFT = speculate.draft


@pytest.fixture(scope="module")
def smollm2():
    directory = os.environ.get("SMOLLM2_DIR")
    if not directory:
        pytest.skip("SMOLLM2_DIR is not set")
    return directory


class Pair:
    """One checkpoint of a target and one of a drafter, loaded by us and by the authors' package."""

    def __init__(self, target_dir, draft_dir):
        self.target, self.drafter, self.tokenizer = load(target_dir, draft_dir, "cpu", torch.float32)
        self.theirs = load_authors(target_dir, draft_dir)
        self.compute_logits = self.theirs[1].compute_logits

    def compare(self, prompt, budget, stop_ids=()):
        """Hold our run to theirs: every token, and for each cycle its 15 drafts and the number of tokens committed -> our Stats, how many cycles were compared.

        Near the budget's end the authors cut the block short, and a shorter block drafts differently: cycles count while anchor + B is inside it.
        """
        my_drafts, their_drafts = [], []                # for each cycle the two best logits and ids of each slot

        def my_spy(logits, *rest):
            my_drafts.append(logits[0].topk(2))
            return DRAFT(logits, *rest)

        def their_spy(hidden, head):
            their_drafts.append(self.compute_logits(hidden, head)[0].topk(2))
            return self.compute_logits(hidden, head)

        self.theirs[1].compute_logits = their_spy
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(speculate, "draft", my_spy)
            ours, stats = run(self.target, self.drafter, prompt, budget, stop_ids)
        theirs, lengths = authors_generate(*self.theirs, prompt, budget, stop_ids, B)

        agreed = same_tokens(self.target, prompt, ours, theirs)
        anchor, compared = 0, 0                         # the anchor's place in the response
        for cycle, length, mine, other in zip(stats.cycles, lengths, my_drafts, their_drafts):
            if anchor + B > budget or anchor + max(len(cycle.tokens), length) > agreed:
                break
            for slot in (mine.indices[:, 0] != other.indices[:, 0]).nonzero()[:, 0].tolist():
                near_tie(mine.values[slot], f"cycle {compared + 1}, draft {slot + 1}: {mine.indices[slot, 0]} and {other.indices[slot, 0]}")
            if len(cycle.tokens) != length:             # one more draft was accepted at a near-tie: from here on the anchors differ
                assert (mine.indices[:, 0] != other.indices[:, 0]).any(), f"cycle {compared + 1}: {len(cycle.tokens)} and {length} tokens committed"
                break
            anchor, compared = anchor + length, compared + 1
        return stats, compared


def same_tokens(target, prompt, ours, theirs):
    """-> how many tokens from the start on are the same: all of them, or those before a near-tie."""
    if ours == theirs:
        return len(ours)
    i = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    assert i is not None, f"{len(ours)} and {len(theirs)} tokens, one the beginning of the other"
    with torch.inference_mode():
        logits, _ = target(torch.tensor([prompt + ours[:i]]), last_only=True)
    near_tie(logits[0, 0].topk(2).values, f"token {i}: {ours[i]} and {theirs[i]}")
    return i


def near_tie(two_best, where):
    best, second = two_best.tolist()
    assert best - second < 1e-5 * abs(best), f"{where}; the two best logits there are {best:.6g} and {second:.6g}"
    warnings.warn(f"near-tie: {where}; logits {best:.7g} and {second:.7g}", stacklevel=2)


# ---------------------------------------------------------------------------------------------------------------------
# SmolLM2 against transformers

def twenty_questions():
    """-> [(name, text)] from five of the benchmarks"""
    if not DATA.is_dir():
        return []

    def lines(name, key):
        raw = (DATA / name).read_bytes()
        return [row[key] for row in map(json.loads, (gzip.decompress(raw) if name.endswith(".gz") else raw).splitlines())]

    sets = {
        "gsm8k": (5, lines("gsm8k_test.jsonl", "question")),
        "humaneval": (4, lines("HumanEval.jsonl.gz", "prompt")),
        "mt-bench": (5, [turns[0] for turns in lines("mt_bench_question.jsonl", "turns")]),
        "math500": (3, lines("math500_test.jsonl", "problem")),
        "mbpp": (3, [row["prompt"] for row in json.loads((DATA / "sanitized-mbpp.json").read_text())])}
    return [(f"{name} {i}", texts[i]) for name, (n, texts) in sets.items() for i in sorted(random.Random(0).sample(range(len(texts)), n))]


QUESTIONS = twenty_questions()


@pytest.fixture(scope="module")
def smollm2_both(smollm2):
    import tokenizers
    target, _, tokenizer = load(smollm2, None, "cpu", torch.float32)
    return (target, tokenizer), (make_golden.load_transformers(smollm2), transformers.AutoTokenizer.from_pretrained(smollm2),
                                 tokenizers.Tokenizer.from_file(str(Path(smollm2) / "tokenizer.json")))


@pytest.mark.parametrize("text", [text for _, text in QUESTIONS] or [None], ids=[name for name, _ in QUESTIONS] or ["../shared/data is not here"])
def test_smollm2_equals_transformers(smollm2_both, text):
    """From a question to the answer's text: template, ids, 64 greedy tokens, text."""
    if text is None:
        pytest.skip("../shared/data is not here")
    (target, tokenizer), (their_target, their_tokenizer, their_encoding) = smollm2_both
    messages = [{"role": "user", "content": text}]
    rendered = their_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render(messages) == rendered
    prompt = tokenizer.chat(messages)
    assert prompt == their_encoding.encode(rendered, add_special_tokens=False).ids
    ours, _ = run(target, None, prompt, 64, target.stop_ids)
    ids = torch.tensor([prompt])
    theirs = their_target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)[0, len(prompt):].tolist()
    same_tokens(target, prompt, ours, theirs)
    assert tokenizer.decode(theirs) == their_tokenizer.decode(theirs, skip_special_tokens=True)
    assert tokenizer.decode(theirs, skip_special=False) == their_tokenizer.decode(theirs)


# ---------------------------------------------------------------------------------------------------------------------
# Against the authors' package

PROMPTS = ([5, 77, 260, 31, 8, 199, 264, 100, 42, 11, 281, 90], [7], [262, 40, 9] * 15)


@pytest.mark.parametrize("kind", sorted(toys.KINDS))
def test_toys(tmp_path, kind):
    """A drafter that is nearly always refused, and two parrots that are accepted in runs; budgets around the block size; stop ids within a block.

    The parrots hardly look at the context; it is the first one whose drafts show wrong taps, positions or cached keys."""
    target_dir = toys.write_target(tmp_path / "target", kind)
    target, _, _ = load(target_dir, None, "cpu", torch.float32)
    texts = [run(target, None, prompt, 96)[0] for prompt in PROMPTS]
    repeated = [a for text in texts for a, b in zip(text, text[1:]) if a == b]
    parrots = sorted(set(repeated), key=repeated.count)[-2:]
    accepted, refused, whole, compared = 0, 0, 0, 0
    for number, parrot in enumerate((None, *parrots)):
        pair = Pair(target_dir, toys.write_drafter(tmp_path / f"drafter{number}", target_dir, seed=number, parrot=parrot))
        for prompt, text in zip(PROMPTS, texts):
            runs = [(budget, ()) for budget in (1, 2, 15, 16, 17, 18, 96)] + [(96, {text[i], text[i + 20]}) for i in (5, 30)]
            for budget, stop_ids in runs:
                stats, n = pair.compare(prompt, budget, stop_ids)
                compared += n
                accepted += sum(cycle.accepted for cycle in stats.cycles)
                refused += sum(cycle.accepted < cycle.drafted for cycle in stats.cycles)
                whole += sum(cycle.accepted == cycle.drafted for cycle in stats.cycles)
    print(f"{kind}: {compared} cycles compared; {accepted} drafts accepted, {refused} cycles with a refusal, {whole} accepted whole")
    assert compared > 100 and accepted > 50 and refused > 50


@pytest.fixture(scope="module")
def embedded():
    if not (TINY / "drafter" / "model.safetensors").exists():
        pytest.skip("tiny/drafter is not made yet")
    return Pair(TINY / "target", TINY / "drafter")


@pytest.mark.parametrize("task", TASKS)
def test_embedded_pair(embedded, task):
    accepted, refused, compared = 0, 0, 0
    for number, prompt in enumerate(read_prompts(TINY, embedded.tokenizer, 6)[task]):
        # the last prompts run on past the end of the answer
        stats, n = embedded.compare(prompt, 320, embedded.target.stop_ids if number < 4 else ())
        compared += n
        accepted += sum(cycle.accepted for cycle in stats.cycles)
        refused += sum(cycle.accepted < cycle.drafted for cycle in stats.cycles)
    print(f"{task}: {compared} cycles compared; {accepted} drafts accepted, {refused} cycles with a refusal")
    assert compared > 20 and accepted > 0 and refused > 0


def test_smollm2(smollm2, tmp_path):
    pair = Pair(smollm2, toys.write_drafter(tmp_path / "random", smollm2, layers=5, mask_token_id=16))
    for text in ("How do rainbows form?", "Write a Python function that reverses a list."):
        prompt = pair.tokenizer.chat([{"role": "user", "content": text}])
        stats, compared = pair.compare(prompt, 48, pair.target.stop_ids)
        assert compared >= 16


def test_smollm2_with_drafts_accepted(smollm2, tmp_path):
    """Counting on in a row of the same word is within its reach, and within a parrot's."""
    tokenizer = load(smollm2, None, "cpu", torch.float32)[2]
    prompt = tokenizer.encode("no no no no yes no no no no yes no no no no yes no no no no yes no no")
    pair = Pair(smollm2, toys.write_drafter(tmp_path / "parrot", smollm2, layers=5, mask_token_id=16, parrot=tokenizer.encode(" no")[0]))
    stats, compared = pair.compare(prompt, 64)
    assert compared > 3 and sum(c.accepted for c in stats.cycles) > 10 and any(c.accepted < c.drafted for c in stats.cycles)
