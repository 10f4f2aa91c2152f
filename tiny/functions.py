"""The code language: a Python function from its description.

A function is composed of a source, a test, a change, an aggregate and an ending, each with phrases that ask for it. Descriptions are drawn; the
code is worked out by reading the description back, so that it is a function of the prompt, and any answer can be judged by running it.
"""
import random
import sys
from typing import NamedTuple

from tiny.templates import capital, listing, pattern

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
