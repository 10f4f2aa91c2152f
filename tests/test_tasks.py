"""The three small languages: every promise of tiny/tasks.py, checked on a few thousand samples."""

import random
import re
import sys
from itertools import combinations, islice
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tiny import functions, tasks  # noqa: E402

COUNT = 1000


@pytest.fixture(scope="module")
def drawn():
    """COUNT samples of every task."""
    rng = random.Random(7)
    return {task: [tasks.sample(task, rng) for _ in range(COUNT)] for task in tasks.TASKS}


def everything(drawn):
    return [example for examples in drawn.values() for example in examples]


def assert_no_confusion(phrases):
    """No phrase can be read where another one was written."""
    for one, other in combinations(phrases, 2):
        assert not tasks.pattern(one).search(re.sub(r"\{\w+\}", "7", other)), (one, other)
        assert not tasks.pattern(other).search(re.sub(r"\{\w+\}", "7", one)), (one, other)


# ---------------------------------------------------------------- all tasks

def test_the_reference_response_is_right(drawn):
    for example in everything(drawn):
        assert tasks.grade(example["task"], example["prompt"], example["response"]), example


def test_plain_text_of_moderate_length(drawn):
    for example in everything(drawn):
        assert example["prompt"].isascii() and example["response"].isascii()
        assert 12 <= len(example["prompt"].split()) <= 90
        assert len(re.findall(r" ?[a-z]+|\d|\S|\s+", example["response"])) <= 250


def test_vocabulary_is_closed_and_small(drawn):
    text = " ".join(example["prompt"] + " " + example["response"] for example in everything(drawn))
    assert 400 <= len(set(re.findall(r"[a-z]+", text.lower()))) <= 700


def test_same_seed_same_examples():
    first = list(islice(tasks.examples("train", 3), 50))
    assert first == list(islice(tasks.examples("train", 3), 50))
    assert first != list(islice(tasks.examples("train", 4), 50))


def test_splits_are_disjoint():
    train = list(islice(tasks.examples("train", 0), 1500))
    heldout = list(islice(tasks.examples("heldout", 0), 100))
    assert {e["task"] for e in heldout} == set(tasks.TASKS)
    assert not any(tasks.is_heldout(e["prompt"]) for e in train)
    assert all(tasks.is_heldout(e["prompt"]) for e in heldout)
    with pytest.raises(ValueError):
        next(tasks.examples("test", 0))


def test_about_one_prompt_in_sixteen_is_held_out(drawn):
    share = sum(tasks.is_heldout(e["prompt"]) for e in everything(drawn)) / (3 * COUNT)
    assert 0.04 < share < 0.09


def test_tasks_and_weights_are_respected():
    assert {e["task"] for e in islice(tasks.examples("train", 0, ("code",)), 20)} == {"code"}
    assert {e["task"] for e in islice(tasks.examples("train", 0, weights=(0, 0, 1)), 20)} == {"story"}


def test_prompts_hardly_repeat(drawn):
    for examples in drawn.values():
        assert len({e["prompt"] for e in examples}) > 0.99 * COUNT


# ---------------------------------------------------------------- arithmetic

def test_numbers_stay_in_range_and_every_equation_holds(drawn):
    for example in drawn["arithmetic"]:
        assert all(1 <= int(n) <= 999 for n in re.findall(r"\d+", example["prompt"] + example["response"]))
        for line in example["response"].split("\n")[:-1]:
            chain = re.search(r"\d+ [-+x/] .*\d", line).group().replace("x", "*").split(" = ")
            assert len({eval(part) for part in chain}) == 1, line


def test_two_to_five_steps_and_the_answer(drawn):
    lengths = set()
    for example in drawn["arithmetic"]:
        *steps, last = example["response"].split("\n")
        lengths.add(len(steps))
        assert last == f"The answer is {example['answer']}."
        assert steps[-1].split(" = ")[-1].split()[0].rstrip(".") == example["answer"]
    assert lengths == {2, 3, 4, 5}


def test_factors_and_divisors_are_small(drawn):
    for example in drawn["arithmetic"]:
        for a, op, b in re.findall(r"(\d+) ([x/]) (\d+)", example["response"]):
            assert 2 <= int(b) <= 9
            assert op == "x" or int(a) % int(b) == 0


def test_at_least_six_forms_per_operation_are_used(drawn):
    text = "\n".join(example["prompt"] for example in drawn["arithmetic"])
    for forms in tasks.FORMS.values():
        assert len(forms) >= 6
        assert all(tasks.pattern(problem).search(text) for problem, _ in forms)


def test_forms_cannot_be_confused():
    assert_no_confusion([problem for forms in tasks.FORMS.values() for problem, _ in forms])


def test_partial_work():
    assert tasks.work("+", 268, 47) == "268 + 47 = 308 + 7 = 315"
    assert tasks.work("+", 457, 268) == "457 + 268 = 657 + 68 = 717 + 8 = 725"
    assert tasks.work("-", 268, 40) == "268 - 40 = 228"
    assert tasks.work("x", 47, 6) == "47 x 6 = 240 + 42 = 282"
    assert tasks.work("/", 282, 6) == "282 / 6 = 47"


def test_a_wrong_answer_is_wrong(drawn):
    for example in drawn["arithmetic"]:
        wrong = f"The answer is {int(example['answer']) + 1}."
        assert not tasks.grade("arithmetic", example["prompt"], wrong)
        assert not tasks.grade("arithmetic", example["prompt"], "")


# ---------------------------------------------------------------- code

def test_phrases_cannot_be_confused():
    for kind in functions.ARGUMENTS:
        tables = [functions.SOURCES, functions.TESTS[kind], functions.CHANGES[kind], functions.GUARDS]
        phrases = [p for table in tables for options in table.values() for p in options]
        phrases += [p for aggregate in functions.AGGREGATES.values() for p in aggregate.phrases]
        for endings in functions.ENDINGS.values():
            assert_no_confusion(phrases + [p for options in endings.values() for p in options])


def test_code_is_composed_not_listed(drawn):
    bodies = {example["response"].split(":", 1)[1] for example in drawn["code"]}
    assert len(bodies) > 0.95 * COUNT
    numbers = [a for a in functions.AGGREGATES.values() if "numbers" in a.takes]
    combinations_without_k = (len(functions.SOURCES) + 1) * (len(functions.TESTS["numbers"]) + 1) * (
        len(functions.CHANGES["numbers"]) + 1) * sum(len(functions.ENDINGS[a.gives]) + 1 for a in numbers) * 3
    assert combinations_without_k > 40_000


def test_code_has_every_part(drawn):
    text = "\n".join(example["response"] for example in drawn["code"])
    for part in ("def change(", "\"\"\"Return", "# sum_", "[::-1]:", " % 2 == 0:", "startswith", "sorted(", "return 5"):
        assert part in text


@pytest.mark.parametrize("wrong", [
    "", "def", "def sum_ages(ages):\n    return 0", "def sum_ages(ages):\n    return sum(age)",
    "def sum_ages(ages):\n    for a in ages:\n        ages.append(a)",
    "def sum_ages(ages):\n    while 1:\n        x = 1",
    "def sum_ages(ages):\n    return sum_ages(ages)", "import os", "def add(ages):\n    return sum(ages)"])
def test_wrong_or_endless_code_is_wrong(wrong):
    prompt = "Write a Python function called sum_ages that takes a list of numbers called ages. Return the sum."
    assert tasks.grade("code", prompt, "def sum_ages(ages):\n    return sum(ages)")
    assert not tasks.grade("code", prompt, wrong)


def test_another_functions_code_is_wrong(drawn):
    pairs = zip(drawn["code"], drawn["code"][1:])
    assert not any(tasks.grade("code", a["prompt"], b["response"]) for a, b in pairs if
                   a["prompt"].split("_")[0] != b["prompt"].split("_")[0])


# ---------------------------------------------------------------- story

def test_outlines_read_back(drawn):
    for example in drawn["story"]:
        people, things, events = tasks.read_outline(example["prompt"])
        assert 2 <= len(people) <= 3 and 2 <= len(things) <= 3 and 3 <= len(events) <= 5
        assert len(set(events)) == len(events)


def test_stories_have_six_to_ten_distinct_sentences(drawn):
    for example in drawn["story"]:
        assert 6 <= len(example["response"].split(". ")) <= 10
        assert tasks.distinct_sentences(example["response"]) == 1.0


def test_events_out_of_order_or_missing_are_wrong(drawn):
    for example in drawn["story"]:
        sentences = example["response"].split(". ")
        assert not tasks.grade("story", example["prompt"], ". ".join(reversed(sentences)))
        assert not tasks.grade("story", example["prompt"], ". ".join(sentences[:-2]))


def test_stories_vary_for_one_prompt():
    prompt = tasks.write_outline(random.Random(1))
    stories = {tasks.tell_story(prompt, random.Random(seed)) for seed in range(50)}
    assert len(stories) == 50


def test_distinct_sentences():
    assert tasks.distinct_sentences("It rained. It rained. They ran. They hid.") == 0.75
    assert tasks.distinct_sentences("") == 0.0


@pytest.mark.parametrize("content", [None, "no JSON\nno JSON\n", '{"format": 1}\n{"line": 7, "task": "poems"}\n', '{"format": 1}\n[]\n'])
def test_a_file_that_cannot_be_graded_is_refused_in_one_line(content, tmp_path, monkeypatch, capsys):
    if content:
        (tmp_path / "responses.jsonl").write_text(content)
    monkeypatch.setattr(sys, "argv", ["tasks", "grade", str(tmp_path / "responses.jsonl")])
    with pytest.raises(SystemExit) as left:
        tasks.main()
    out, err = capsys.readouterr()
    assert left.value.code == 2 and not out and err.startswith("error: ") and err.count("\n") == 1
