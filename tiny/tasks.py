"""Three small languages, generated from a seed: arithmetic, code and story.

Nothing here is downloaded. Every prompt is drawn from a small grammar with a closed vocabulary, so that
a model of a few million parameters can learn it on a CPU, and a drafter can then learn to speculate on it.

    arithmetic   a word problem, answered step by step      the response follows from the prompt
    code         a description of a Python function         the response follows from the prompt
    story        people, things and events to tell about    the response is freely worded

For arithmetic and code the sampler writes a prompt only; the response is worked out by *reading the prompt
back*. That makes the response a function of the prompt, and lets `grade` judge any answer from the prompt alone.

    python -m tiny.tasks train 20000 > prompts.jsonl            prompts for data.py, one JSON object a line
    python -m tiny.tasks grade responses.jsonl                  how many of the target's responses, in data.py's format, are right

A prompt is held out if and only if its SHA-256, read as an integer, is divisible by 16. The split depends on
the prompt and on nothing else, so the train and heldout prompts are disjoint by construction.
"""

import argparse
import hashlib
import itertools
import json
import random
import re
import sys
from pathlib import Path
from typing import Iterator

from tiny.functions import grade_code, read_description, write_code, write_description
from tiny.templates import capital, listing, pattern

TASKS = ("arithmetic", "code", "story")

WOMEN = "Mia Anna Lily Rosa Ella Nora Ivy Zoe Ruth Clara Hana Sara".split()
MEN = "Tom Ben Leo Max Sam Omar Finn Jack Luca Noah Hugo Adam".split()
NAMES = WOMEN + MEN


# ---------------------------------------------------------------- the public interface

def sample(task: str, rng: random.Random) -> dict:
    """One example of a task: its prompt and a right response (and, for arithmetic, the bare answer)."""
    if task == "arithmetic":
        prompt = write_problem(rng)
        response, answer = solve(prompt)
        return {"task": task, "prompt": prompt, "response": response, "answer": str(answer)}
    if task == "code":
        prompt = write_description(rng)
        return {"task": task, "prompt": prompt, "response": write_code(read_description(prompt))}
    prompt = write_outline(rng)
    return {"task": task, "prompt": prompt, "response": tell_story(prompt, rng)}


def is_heldout(prompt: str) -> bool:
    """Whether a prompt belongs to the heldout split: a property of the prompt's text alone."""
    return int(hashlib.sha256(prompt.encode()).hexdigest(), 16) % 16 == 0


def examples(split: str, seed: int, tasks=TASKS, weights=None) -> Iterator[dict]:
    """An endless stream of examples of one split ("train" or "heldout"), the same for the same seed."""
    if split not in ("train", "heldout"):
        raise ValueError(f"unknown split: {split}")
    rng = random.Random(f"{split} {seed}")
    while True:
        task = rng.choices(tasks, weights)[0]
        example = sample(task, rng)
        if is_heldout(example["prompt"]) == (split == "heldout"):
            yield example


def grade(task: str, prompt: str, response: str) -> bool:
    """Whether a response does what its prompt asks."""
    if task == "arithmetic":
        found = re.findall(r"The answer is (\d+)\.", response)
        return bool(found) and int(found[-1]) == solve(prompt)[1]
    if task == "code":
        return grade_code(prompt, response)
    people, things, events = read_outline(prompt)
    return in_order(people + things + [past for _, past in events], response)


def distinct_sentences(text: str) -> float:
    """The share of a text's sentences that are distinct."""
    sentences = [s.strip().lower() for s in re.split(r"[.!?\n]+", text) if s.strip()]
    return len(set(sentences)) / max(1, len(sentences))


# ---------------------------------------------------------------- arithmetic

OBJECTS = ("shells cards coins stickers beads marbles buttons stamps pencils stones books apples pears nuts "
           "cookies ribbons tickets toys balls flowers bottles feathers").split()

OPENINGS = ("{name} has {k} {things}", "{name} starts the day with {k} {things}", "{name} owns {k} {things}",
            "One morning {name} counts {k} {things}", "There are {k} {things} in the box of {name}",
            "On Monday {name} brings {k} {things} to school")
LINKS = ("", "", "then ", "next, ", "later, ", "after lunch, ", "the next day, ")
QUESTIONS = ("How many {things} does {name} have now?", "How many {things} are there in the end?",
             "What is the number of {things} now?", "Find out how many {things} {name} has at the end.",
             "Count the {things} that {name} has now.")

# For each operation, the sentence of the problem and the sentence of the answer.
FORMS = {
    "+": (("{she} finds {k} more", "After finding more, {she} has {work} {things}."),
          ("{she} buys {k} {things} at the market", "The market brings the number to {work}."),
          ("a friend gives {her} {k} {things}", "The friend's gift makes {work} {things}."),
          ("a brother adds {k} {things} to the pile", "With the brother's part there are {work}."),
          ("{she} wins {k} {things} in a game", "Winning the game gives {her} {work} {things}."),
          ("{k} new {things} come in the mail", "The mail raises the count to {work}."),
          ("{she} picks up {k} {things} on the way home", "Back home, {she} has {work} {things}.")),
    "-": (("{she} loses {k} of them", "After losing some, {she} has {work} {things}."),
          ("{she} gives {k} {things} to a friend", "Giving to the friend leaves {work} {things}."),
          ("{she} sells {k} {things} at the market", "Selling brings the number down to {work}."),
          ("{she} drops {k} {things} in the river", "Without the ones in the river, there are {work}."),
          ("{she} puts {k} aside for a sister and keeps the rest", "The sister's part leaves {work}."),
          ("a dog runs off with {k} {things}", "Because of the dog, {she} has only {work}."),
          ("{she} trades away {k} {things}", "After the trade {she} has {work} {things}.")),
    "x": (("the pile grows to {k} times its size", "The pile has grown to {work} {things}."),
          ("{she} works hard until the pile is {k} times as big", "Hard work makes the pile {work}."),
          ("{she} swaps each one for {k} new ones", "After the swap {she} has {work} {things}."),
          ("a magic box turns each one into {k}", "The magic box turns them into {work}."),
          ("{she} makes {k} equal piles of that size in all", "The equal piles hold {work} {things}."),
          ("a machine makes it {k} times as many", "Using the machine gives {work} {things}."),
          ("{she} wins a bet and now has {k} times that number", "The bet pays off with {work}.")),
    "/": (("{she} packs them into {k} equal bags and keeps one bag", "One bag holds {work} {things}."),
          ("{she} shares them in a group of {k} and keeps one equal share", "One share is {work} {things}."),
          ("{she} cuts the pile into {k} equal parts and gives away all but one", "One part has {work}."),
          ("{she} lays them in {k} equal rows and keeps only the first row", "The first row has {work}."),
          ("{she} fills {k} equal boxes and sells all but one box", "The last box holds {work} {things}."),
          ("{she} deals them to {k} players and plays with one equal hand", "One hand has {work} {things}."),
          ("{she} keeps only one out of every {k}", "Keeping only those leaves {her} {work} {things}.")),
}


def write_problem(rng: random.Random) -> str:
    """A word problem of 2 to 5 steps; every number, on the way too, lies between 2 and 999."""
    name = rng.choice(NAMES)
    words = dict(name=name, things=rng.choice(OBJECTS), **pronouns(name))
    value = rng.randint(2, 99) if rng.random() < 0.7 else rng.randint(100, 600)
    sentences = [rng.choice(OPENINGS).format(k=value, **words)]
    used = []
    for _ in range(rng.randint(2, 5)):
        op, k = choose_step(value, rng)
        form = rng.choice([problem for problem, _ in FORMS[op] if problem not in used])
        used.append(form)
        sentences.append(capital(rng.choice(LINKS) + form.format(k=k, **words)))
        value = compute(op, value, k)
    question = rng.choice(QUESTIONS).format(**words)
    return ". ".join(sentences) + ". " + question


def pronouns(name: str) -> dict:
    """The pronouns of a person, under the names that the sentence forms use."""
    return {"she": "she", "her": "her"} if name in WOMEN else {"she": "he", "her": "him"}


def choose_step(value: int, rng: random.Random) -> tuple:
    """An operation and its second operand, such that the result is a whole number from 2 to 999."""
    largest = 999 if rng.random() < 0.15 else 99
    operands = {"+": range(2, min(largest, 999 - value) + 1),
                "-": range(2, min(largest, value - 2) + 1),
                "x": [k for k in range(2, 10) if value * k <= 999],
                "/": [k for k in range(2, 10) if value % k == 0 and value > k]}
    op = rng.choice([op for op in operands if len(operands[op])])
    return op, rng.choice(operands[op])


def compute(op: str, a: int, b: int) -> int:
    """The result of one step."""
    return {"+": a + b, "-": a - b, "x": a * b, "/": a // b}[op]


def places(n: int) -> list:
    """The hundreds, tens and ones of a number, without the zeros: 207 is 200 and 7."""
    return [part for part in (n // 100 * 100, n // 10 % 10 * 10, n % 10) if part]


def work(op: str, a: int, b: int) -> str:
    """A step worked out place by place, as a pupil writes it: 268 + 47 = 308 + 7 = 315."""
    chain = [f"{a} {op} {b}"]
    if op == "x" and len(places(a)) > 1:
        chain.append(" + ".join(str(part * b) for part in places(a)))
    if op in "+-":
        for part in places(b)[:-1]:
            a = compute(op, a, part)
            b -= part
            chain.append(f"{a} {op} {b}")
    chain.append(str(compute(op, a, b)))
    return " = ".join(chain)


def solve(prompt: str) -> tuple:
    """Read a word problem and work it out: the response, step by step, and the answer."""
    opening, *steps = prompt.split(". ")
    words = next(m.groupdict() for m in map(lambda t: pattern(t).fullmatch(opening), OPENINGS) if m)
    value = int(words.pop("k"))
    words.update(pronouns(words["name"]))
    lines = []
    for sentence in steps[:-1]:
        op, answer, k = read_step(sentence)
        lines.append(capital(answer.format(work=work(op, value, k), **words)))
        value = compute(op, value, k)
    lines.append(f"The answer is {value}.")
    return "\n".join(lines), value


def read_step(sentence: str) -> tuple:
    """The operation, the sentence of the answer, and the second operand of one sentence of a problem."""
    for op, forms in FORMS.items():
        for problem, answer in forms:
            match = pattern(problem).search(sentence)
            if match:
                return op, answer, int(match["k"])
    raise ValueError(f"not a step: {sentence}")


# ---------------------------------------------------------------- story

THINGS = ("lantern map rope drum kite ladder blanket basket whistle mirror compass flute crown hammer cup "
          "candle").split()

# An event as the prompt lists it, and as the story tells it.
EVENTS = {
    "it rains": "it rained", "they get lost": "they got lost", "{a} finds a cave": "{a} found a cave",
    "they lose the {t}": "they lost the {t}", "an owl helps them": "an owl helped them",
    "{a} climbs a tree": "{a} climbed a tree", "a storm damages the {t}": "a storm damaged the {t}",
    "{a} falls into the lake": "{a} fell into the lake", "they cross a bridge": "they crossed a bridge",
    "a fox steals the {t}": "a fox stole the {t}", "the moon rises": "the moon rose",
    "{a} hears music": "{a} heard music", "they build a fire": "they built a fire",
    "{a} repairs the {t}": "{a} repaired the {t}", "a dog follows them": "a dog followed them",
    "they meet a king": "they met a king", "{a} tells a joke": "{a} told a joke",
    "they share some bread": "they shared some bread", "snow covers the road": "snow covered the road",
    "{a} hides the {t}": "{a} hid the {t}", "a bell rings": "a bell rang", "they open a door": "they opened a door",
    "{a} sings a song": "{a} sang a song", "{a} sees a dragon": "{a} saw a dragon",
    "they row a boat": "they rowed a boat", "a giant wakes up": "a giant woke up",
    "{a} loses a shoe": "{a} lost a shoe", "they plant a seed": "they planted a seed",
    "the sun sets": "the sun set", "a witch wants the {t}": "a witch wanted the {t}",
}

OUTLINES = ("Write a story with {people}, {things}. Events: {events}.",
            "Tell a tale about {people} with {things}. This happens: {events}.",
            "Make up a story for {people} and use {things}. In this order: {events}.")

PLACES = ("near the forest", "by the sea", "in a small village", "on a green hill", "at the old mill",
          "behind the castle", "beside the river", "in the garden", "under the stars", "along the path")
ADJECTIVES = "old little bright golden heavy strange lovely broken shiny wooden blue red dusty precious".split()
FEELINGS = "happy brave tired proud afraid calm curious excited hungry glad".split()

STARTS = ("One {adj} morning, {people} met {place}", "Long ago, {people} lived {place}",
          "Early one day, {people} set out from a house {place}", "{people} were walking {place}",
          "Once upon a time, {people} were friends {place}", "It was a cold day when {people} came together {place}")
THING_LINES = ("{a} carried the {adj} {t} in a bag", "{a} brought a {t} that looked {adj} and rather {adj2}",
               "With great care, {a} held the {adj} {t}", "{a} had found the {adj} {t} {place}",
               "The {adj} {t} belonged to {a}, who felt {feeling}", "On the ground lay the {adj} {t} of {a}",
               "{a} also took the {adj} {t} from home", "Nobody but {a} knew about the {adj} {t}")
OPENERS = {"first": ("soon", "before long", "at first", "that same day", "a moment later"),
           "middle": ("then", "after a while", "suddenly", "next", "a little later", "meanwhile", "without warning"),
           "last": ("finally", "at the end of the day", "when it was almost over", "in the end", "late that night")}
TAILS = ("", " {place}", ", and {a} felt {feeling}", ", so {a} held the {t} close", ", but {a} only laughed",
         " while {a} was looking at the {t}", ", which made {a} {feeling}", ", and {a} dropped the {adj} {t}",
         " just as {a} had hoped", " because nobody was {feeling}", ", although {a} did not feel {feeling}",
         " {place}, where everything seemed {adj}")
CLOSINGS = ("{a} took the {t} home and was {feeling} for many years", "From that day on, {a} kept the {t} {place}",
            "Everyone thanked {a}, and the {adj} {t} became famous", "They all slept well, and {a} dreamed of the {t}")


def write_outline(rng: random.Random) -> str:
    """A prompt that lists 2 or 3 people, 2 or 3 things and 3 to 5 events."""
    people = rng.sample(NAMES, rng.randint(2, 3))
    things = rng.sample(THINGS, rng.randint(2, 3))
    events = [event.format(a=rng.choice(people), t=rng.choice(things))
              for event in rng.sample(list(EVENTS), rng.randint(3, 5))]
    return rng.choice(OUTLINES).format(people=listing(people), things=listing(["a " + t for t in things]),
                                       events=", ".join(events))


def read_outline(prompt: str) -> tuple:
    """The people, the things and the events (listed and told) of a story prompt."""
    head, _, tail = prompt.rpartition(": ")
    words = re.findall(r"\w+", head)
    events = [(event, told(event)) for event in tail.rstrip(".").split(", ")]
    return [w for w in words if w in NAMES], [w for w in words if w in THINGS], events


def told(event: str) -> str:
    """An event as the story tells it: "it rains" becomes "it rained"."""
    for listed, past in EVENTS.items():
        match = pattern(listed).fullmatch(event)
        if match:
            return past.format(**match.groupdict())
    raise ValueError(f"not an event: {event}")


def tell_story(prompt: str, rng: random.Random) -> str:
    """A story of 6 to 10 sentences; each one is about the next thing or event, so that none repeats."""
    people, things, events = read_outline(prompt)

    def fill(template, **fixed):
        """The template as a sentence part, its open slots filled at random."""
        adj, adj2 = rng.sample(ADJECTIVES, 2)
        slots = dict(a=rng.choice(people), t=rng.choice(things), adj=adj, adj2=adj2, place=rng.choice(PLACES),
                     feeling=rng.choice(FEELINGS), people=listing(people))
        return template.format(**{**slots, **fixed})

    sentences = [fill(rng.choice(STARTS))]
    sentences += [fill(line, t=thing) for line, thing in zip(rng.sample(THING_LINES, len(things)), things)]
    for i, (_, past) in enumerate(events):
        position = "first" if i == 0 else "last" if i == len(events) - 1 else "middle"
        opener = rng.choice(OPENERS[position]) + ", " if rng.random() < 0.7 else ""
        sentences.append(opener + past + fill(rng.choice(TAILS)))
    if rng.random() < 0.6:
        sentences.append(fill(rng.choice(CLOSINGS)))
    return " ".join(capital(sentence) + "." for sentence in sentences)


def in_order(phrases: list, text: str) -> bool:
    """Whether all the phrases occur in the text, one after another."""
    position = 0
    for phrase in phrases:
        match = pattern(phrase).search(text, position)
        if not match:
            return False
        position = match.end()
    return True


# ---------------------------------------------------------------- the command line

def write_prompts(split: str, count: int, seed: int = 1):
    """Print `count` prompts of a split as JSON lines, the three tasks in turn; no responses, since those are to be the target's own."""
    streams = [examples(split, seed, (task,)) for task in TASKS]
    seen = set()
    for stream in itertools.islice(itertools.cycle(streams), count):
        example = next(e for e in stream if e["prompt"] not in seen)
        seen.add(example["prompt"])
        print(json.dumps({"task": example["task"], "prompt": example["prompt"]}))


def grade_responses(path: str):
    """Print the share of right responses of each task in a file that data.py wrote, and for stories the least share of distinct sentences."""
    from tokenizer import Tokenizer
    tokenizer = Tokenizer.load(Path(__file__).parent / "target")
    right, distinct = {task: [] for task in TASKS}, []
    for line in Path(path).read_text().splitlines()[1:]:
        row = json.loads(line)
        if row.get("task") not in TASKS:
            raise ValueError(f"line {row.get('line')} of the prompts has no task of {', '.join(TASKS)}")
        text = tokenizer.decode(row["response_ids"])
        right[row["task"]].append(grade(row["task"], row["prompt"], text))
        if row["task"] == "story":
            distinct.append(distinct_sentences(text))
    for task, marks in right.items():
        if marks:
            print(f"{task}: {sum(marks)} of {len(marks)} right, {sum(marks) / len(marks):.1%}")
    if distinct:
        print(f"story: sentences distinct, mean {sum(distinct) / len(distinct):.1%}, least {min(distinct):.1%}")


def main():
    parser = argparse.ArgumentParser(prog="python -m tiny.tasks", description="Three small languages: prompts, and the grading of answers.")
    commands = parser.add_subparsers(dest="command", required=True)
    for split in ("train", "heldout"):
        prompts = commands.add_parser(split, help=f"print prompts of the {split} split, one JSON object a line")
        prompts.add_argument("count", type=int)
        prompts.add_argument("seed", type=int, nargs="?", default=1)
    commands.add_parser("grade", help="print how many responses of a file are right").add_argument("file", help="what data.py regenerate wrote")
    args = parser.parse_args()
    if args.command == "grade":
        try:
            grade_responses(args.file)
        except (OSError, ValueError, KeyError, AttributeError) as error:       # not there, not JSON, not data.py's
            print(f"error: {args.file}: not a file of responses that can be read ({type(error).__name__}: {error})", file=sys.stderr)
            sys.exit(2)
    elif args.count < 0:
        parser.error(f"{args.count} prompts cannot be printed")
    else:
        write_prompts(args.command, args.count, args.seed)


if __name__ == "__main__":
    main()
