"""Three small languages, generated from a seed: arithmetic, code and story.

Nothing here is downloaded. Every prompt is drawn from a small grammar with a closed vocabulary, so that
a model of a few million parameters can learn it on a CPU, and a drafter can then learn to speculate on it.

    arithmetic   a word problem, answered step by step      the response follows from the prompt
    code         a description of a Python function         the response follows from the prompt
    story        people, things and events to tell about    the response is freely worded

For arithmetic and code the sampler writes a prompt only; the response is worked out by *reading the prompt
back*. That makes the response a function of the prompt, and lets `grade` judge any answer from the prompt alone.

A prompt is held out if and only if its SHA-256, read as an integer, is divisible by 16. The split depends on
the prompt and on nothing else, so the train and heldout prompts are disjoint by construction.
"""

import hashlib
import random
import re
import sys
from functools import lru_cache
from typing import Iterator, NamedTuple

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


# ---------------------------------------------------------------- templates, written and read

@lru_cache(maxsize=None)
def pattern(template: str) -> re.Pattern:
    """The regular expression that reads a template back: each {slot} becomes a named one-word group."""
    parts = re.split(r"\{(\w+)\}", template)
    for i, part in enumerate(parts):
        parts[i] = f"(?P<{part}>\\w+)" if i % 2 else re.escape(part)
    return re.compile(r"\b" + "".join(parts) + r"\b", re.IGNORECASE)


def capital(sentence: str) -> str:
    """The sentence with its first letter in upper case."""
    return sentence[:1].upper() + sentence[1:]


def listing(items: list) -> str:
    """The items as English lists them: a, b and c."""
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))


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


# ---------------------------------------------------------------- code

# Each table maps a piece of code to the phrases that ask for it. {a} is the argument, {x} the item of the
# loop, {r} the result, and {k} a number from 2 to 9 or, between quotes, a letter.

ARGUMENTS = {"numbers": ("numbers", "values", "scores", "prices", "ages"),
             "words": ("words", "names", "labels", "titles", "lines")}
ITEMS = {"numbers": "number", "words": "word"}
LETTERS = "abcdehilmnoprst"

SOURCES = {"{a}[1:]": ("skip the first item", "leave out the item at the front"),
           "{a}[:-1]": ("skip the last item", "leave out the item at the end"),
           "{a}[::2]": ("take every second item", "look at every other item"),
           "{a}[::-1]": ("go through the list backwards", "start from the end of the list"),
           "{a}[:{k}]": ("look only at the first {k} items", "stop after {k} items")}

TESTS = {
    "numbers": {"{x} % 2 == 0": ("keep only even numbers", "ignore all that are not even"),
                "{x} % 2 == 1": ("keep only odd numbers", "ignore all that are not odd"),
                "{x} > 0": ("keep only positive numbers", "ignore all that are not positive"),
                "{x} < 0": ("keep only negative numbers", "ignore all that are not negative"),
                "{x} > {k}": ("keep only numbers greater than {k}", "ignore all up to {k}"),
                "{x} < {k}": ("keep only numbers less than {k}", "ignore all from {k} up"),
                "{x} != {k}": ("leave out each {k}", "ignore all that are equal to {k}"),
                "{x} % {k} == 0": ("keep only numbers divisible by {k}", "ignore all but multiples of {k}")},
    "words": {"len({x}) > {k}": ("keep only words longer than {k}", "ignore all up to length {k}"),
              "len({x}) < {k}": ("keep only words shorter than {k}", "ignore all of length {k} or more"),
              "len({x}) == {k}": ("keep only words of length {k}", "ignore all but those with {k} letters"),
              "len({x}) % 2 == 0": ("keep only words of even length", "ignore all of odd length"),
              "\"{k}\" in {x}": ("keep only words with the letter {k}", "ignore all without the letter {k}"),
              "\"{k}\" not in {x}": ("leave out words that have {k}", "ignore all that contain {k}"),
              "{x}.startswith(\"{k}\")": ("keep only words starting with {k}", "ignore all not starting in {k}"),
              "{x}.endswith(\"{k}\")": ("keep only words ending with {k}", "ignore all not ending in {k}")}}

CHANGES = {
    "numbers": {"{x} * {x}": ("square each one", "take the square of each"),
                "{x} * {k}": ("multiply each by {k}", "make each {k} times as large"),
                "{x} + {k}": ("add {k} to each", "increase each by {k}"),
                "{x} - {k}": ("subtract {k} from each", "decrease each by {k}"),
                "{x} % {k}": ("take each modulo {k}", "take what is left of each after division by {k}"),
                "{x} // {k}": ("divide each by {k} and round down", "take each divided by {k} without rest"),
                "abs({x})": ("take the absolute value of each", "drop the sign of each"),
                "-{x}": ("negate each one", "flip the sign of each")},
    "words": {"{x}.upper()": ("turn each into upper case", "write each in capital letters"),
              "{x}[::-1]": ("reverse each one", "spell each backwards"),
              "{x}[:{k}]": ("cut each to {k} letters", "shorten each to {k} letters"),
              "{x} * {k}": ("repeat each {k} times", "write each {k} times in a row"),
              "{x} + \"{k}\"": ("put {k} after each", "append the letter {k} to each"),
              "\"{k}\" + {x}": ("put {k} before each", "put the letter {k} in front of each"),
              "len({x})": ("take the length of each", "measure how long each is"),
              "{x}.count(\"{k}\")": ("count each {k} in them", "find how often each has {k}")}}
CHANGE_GIVES_NUMBERS = ("len({x})", "{x}.count(\"{k}\")")


class Aggregate(NamedTuple):
    """What a loop gathers: from items of type `takes`, a result of type `gives`. {y} is the changed item."""
    takes: tuple
    gives: str
    start: str
    update: str
    result: str
    phrases: tuple


NUMBERS, WORDS, EITHER = ("numbers",), ("words",), ("numbers", "words")
AGGREGATES = {
    "sum": Aggregate(NUMBERS, "number", "total = 0", "total += {y}", "total",
                     ("return the sum", "return the total")),
    "product": Aggregate(NUMBERS, "number", "product = 1", "product *= {y}", "product",
                         ("return the product", "return all of them multiplied together")),
    "count": Aggregate(EITHER, "number", "count = 0", "count += 1", "count",
                       ("return how many there are", "return the count")),
    "largest": Aggregate(NUMBERS, "number", "best = 0", "if {y} > best:\n    best = {y}", "best",
                         ("return the largest, or 0 if none is above 0", "return the maximum, at least 0")),
    "smallest": Aggregate(NUMBERS, "number", "best = 100", "if {y} < best:\n    best = {y}", "best",
                          ("return the smallest, or 100 if none is below 100", "return the minimum, at most 100")),
    "list": Aggregate(EITHER, "list", "result = []", "result.append({y})", "result",
                      ("return a list of them", "return them in a new list")),
    "unique": Aggregate(EITHER, "list", "result = []", "if {y} not in result:\n    result.append({y})", "result",
                        ("return a list without repeats", "return the different ones as a list")),
    "any": Aggregate(NUMBERS, "truth", "", "if {y} > {k}:\n    return True", "False",
                     ("return whether any is greater than {k}", "tell if at least one is above {k}")),
    "all": Aggregate(NUMBERS, "truth", "", "if {y} <= {k}:\n    return False", "True",
                     ("return whether all are greater than {k}", "tell if every one is above {k}")),
    "join": Aggregate(WORDS, "text", "parts = []", "parts.append({y})", "\" \".join(parts)",
                      ("return them joined by spaces", "return one text with spaces between them")),
    "dash": Aggregate(WORDS, "text", "parts = []", "parts.append({y})", "\"-\".join(parts)",
                      ("return them joined by dashes", "return one text with dashes between them")),
    "longest": Aggregate(WORDS, "text", "best = \"\"", "if len({y}) > len(best):\n    best = {y}", "best",
                         ("return the longest", "return the one with the most letters")),
    "length": Aggregate(WORDS, "number", "total = 0", "total += len({y})", "total",
                        ("return their total length", "return the number of letters in all")),
}

ENDINGS = {
    "number": {"{r} * 2": ("double the result", "return twice the result"),
               "{r} + {k}": ("add {k} to the result", "increase the result by {k}"),
               "{r} - {k}": ("subtract {k} from the result", "decrease the result by {k}"),
               "{r} % {k}": ("return the result modulo {k}", "take the result modulo {k}")},
    "list": {"sorted({r})": ("sort the result", "put the result in order"),
             "{r}[::-1]": ("reverse the result", "return the result from back to front"),
             "{r}[:{k}]": ("return at most {k} of the results", "cut the result after {k} items"),
             "{r} * 2": ("repeat the result twice", "return the result two times in a row")},
    "text": {"{r}.upper()": ("make the result upper case", "return the result in capital letters"),
             "{r} + \"!\"": ("add an exclamation mark to the result", "end the result with an exclamation mark"),
             "{r}[::-1]": ("reverse the result", "return the result from back to front")},
    "truth": {}}

GUARDS = {"if not {a}:\n    return {k}": ("if the list is empty, return {k}", "for an empty list return {k}"),
          "if len({a}) < 3:\n    return {k}": ("if there are fewer than 3 items, return {k}",
                                               "for less than 3 items return {k}")}

INTROS = ("Write a Python function called {name} that takes a list of {kind} called {argument}.",
          "Define the function {name} with a list of {kind} named {argument}.",
          "I need a function {name} for a list of {kind} called {argument}.")
HELPER = "Use a helper function called change."
DOCSTRING = "Add a docstring."
EXAMPLE = "End with an example call."

INPUTS = {"numbers": ([], [4], [3, -8, 5, 12, 7, 0, -1, 9], [9, 30, 2, 2, 15, 6, -6, 8, 21, 5, 10, 11], [-7, -2, -3]),
          "words": ([], ["tree"], ["apple", "sun", "moonlight", "in", "bread", "salad", "sun"],
                    ["stone", "cat", "hill", "planet", "to", "emerald", "ocean", "oh", "lamp", "pearl", "dish"])}
EXAMPLES = {"numbers": "[3, 8, -5, 12]", "words": "[\"apple\", \"sun\", \"stone\"]"}


def phrase_for(code: str, phrases: tuple, rng: random.Random) -> str:
    """One of the phrases that ask for a piece of code, with its number or letter filled in."""
    k = rng.choice(LETTERS) if "\"{k}\"" in code else rng.randint(2, 9)
    return rng.choice(phrases).format(k=k)


def pick(table: dict, rng: random.Random) -> tuple:
    """A piece of code from a table, and a phrase that asks for it."""
    code = rng.choice(list(table))
    return code, phrase_for(code, table[code], rng)


def write_description(rng: random.Random) -> str:
    """The description of a function composed of a source, a test, a change, an aggregate and an ending."""
    kind = rng.choice(list(ARGUMENTS))
    argument = rng.choice(ARGUMENTS[kind])
    change, change_phrase = pick(CHANGES[kind], rng) if rng.random() < 0.75 else ("", "")
    changed_kind = "numbers" if change in CHANGE_GIVES_NUMBERS else kind
    label = rng.choice([name for name, a in AGGREGATES.items() if changed_kind in a.takes])
    aggregate = AGGREGATES[label]
    if label == "count":
        change, change_phrase = "", ""          # a change does not alter how many there are

    steps = [pick(SOURCES, rng)[1] if rng.random() < 0.4 else "",
             pick(TESTS[kind], rng)[1] if rng.random() < 0.8 else "",
             change_phrase,
             phrase_for(aggregate.update, aggregate.phrases, rng)]
    sentences = [listing([step for step in steps if step])]
    if ENDINGS[aggregate.gives] and rng.random() < 0.5:
        sentences.append(pick(ENDINGS[aggregate.gives], rng)[1])
    if rng.random() < 0.5:
        sentences.append(pick(GUARDS, rng)[1])

    intro = rng.choice(INTROS).format(name=f"{label}_{argument}", kind=kind, argument=argument)
    wishes = [HELPER] if change and rng.random() < 0.4 else []
    wishes += [wish for wish in (DOCSTRING, EXAMPLE) if rng.random() < 0.5]
    return " ".join([intro] + [capital(sentence) + "." for sentence in sentences] + wishes)


def read_option(table: dict, prompt: str, **names) -> str:
    """The piece of code from a table that a prompt asks for, filled in; empty if it asks for none."""
    for code, phrases in table.items():
        for phrase in phrases:
            match = pattern(phrase).search(prompt)
            if match:
                return code.format(**names, **match.groupdict())
    return ""


def read_description(prompt: str) -> dict:
    """The parts of the function that a prompt describes, as pieces of code."""
    intro = next(m for m in (pattern(i[:-1]).match(prompt) for i in INTROS) if m)
    kind, argument, name = intro["kind"], intro["argument"], intro["name"]
    item = ITEMS[kind]
    label = name.split("_")[0]
    aggregate = AGGREGATES[label]
    change = read_option(CHANGES[kind], prompt, x=item)
    helper = HELPER in prompt
    changed = f"change({item})" if helper else change or item
    reassign = bool(change) and aggregate.update.count("{y}") > 1      # name a value that is used twice
    update = {aggregate.update: aggregate.phrases}
    return {"name": name, "kind": kind, "label": label, "argument": argument, "item": item, "change": change,
            "helper": helper, "start": aggregate.start,
            "source": read_option(SOURCES, prompt, a=argument) or argument,
            "test": read_option(TESTS[kind], prompt, x=item),
            "reassign": f"{item} = {changed}" if reassign else "",
            "update": read_option(update, prompt, y=item if reassign else changed),
            "result": read_option(ENDINGS[aggregate.gives], prompt, r=aggregate.result) or aggregate.result,
            "guard": read_option(GUARDS, prompt, a=argument),
            "docstring": DOCSTRING in prompt, "example": EXAMPLE in prompt}


def indent(lines: list) -> list:
    """The lines, moved right by one level."""
    return ["    " + line for line in lines]


def write_code(parts: dict) -> str:
    """The Python code of a function, from its parts."""
    loop = [parts["reassign"]] if parts["reassign"] else []
    loop += parts["update"].split("\n")
    if parts["test"]:
        loop = [f"if {parts['test']}:"] + indent(loop)

    body = []
    if parts["docstring"]:
        body.append(f"\"\"\"Return the {parts['label']} for a list of {parts['kind']}.\"\"\"")
    if parts["guard"]:
        body += parts["guard"].split("\n")
    if parts["start"]:
        body.append(parts["start"])
    body += [f"for {parts['item']} in {parts['source']}:"] + indent(loop)
    body.append(f"return {parts['result']}")

    lines = [f"def {parts['name']}({parts['argument']}):"] + indent(body)
    if parts["helper"]:
        lines = [f"def change({parts['item']}):", f"    return {parts['change']}", ""] + lines
    if parts["example"]:
        lines += ["", f"# {parts['name']}({EXAMPLES[parts['kind']]})"]
    return "\n".join(lines)


SAFE_BUILTINS = {f.__name__: f for f in (abs, all, any, len, list, max, min, range, reversed, set, sorted, str, sum)}
FORBIDDEN = ("__", "**", "<<", "while", "import", "try", "format")
STEP_LIMIT = 1000


def limited_tracer():
    """A trace function that stops code after STEP_LIMIT events, or when one of its variables grows too large."""
    steps = 0

    def trace(frame, event, arg):
        nonlocal steps
        steps += 1
        for value in frame.f_locals.values():
            if isinstance(value, int) and value.bit_length() > 1000:
                raise OverflowError("number too large")
            if isinstance(value, (str, list)) and len(value) > 10000:
                raise OverflowError("text or list too long")
        if steps > STEP_LIMIT:
            raise TimeoutError("too many steps")
        return trace

    return trace


def run_function(code: str, name: str, inputs) -> str:
    """What a function returns for each of the inputs, in writing, so that 1 and True differ."""
    if any(word in code for word in FORBIDDEN):
        raise ValueError("code outside the small language")
    scope = {"__builtins__": SAFE_BUILTINS}
    previous = sys.gettrace()
    try:
        compiled = compile(code, "<response>", "exec")
        results = []
        sys.settrace(limited_tracer())
        exec(compiled, scope)
        for value in inputs:
            sys.settrace(limited_tracer())
            results.append(scope[name](list(value)))
    finally:
        sys.settrace(previous)
    return repr(results)


def grade_code(prompt: str, response: str) -> bool:
    """Whether the response behaves like the function that the prompt describes."""
    parts = read_description(prompt)
    inputs = INPUTS[parts["kind"]]
    wanted = run_function(write_code(parts), parts["name"], inputs)
    try:
        return run_function(response, parts["name"], inputs) == wanted
    except Exception:                           # whatever a wrong program does, it is wrong
        return False


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
