"""Sentences that are written from a template and read back with it. What the three languages of tasks.py share."""
import re
from functools import lru_cache

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
