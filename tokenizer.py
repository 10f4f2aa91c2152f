"""Text to token ids and back, read from a checkpoint's tokenizer.json: byte-level BPE as Qwen3, Qwen2.5, Llama-3 and SmolLM2 use it.

    Tokenizer.load(directory)      reads tokenizer.json, tokenizer_config.json and, where there is one, chat_template.jinja
    .encode(text)  .decode(ids)    text with special tokens in it -> ids -> text
    .chat(messages)                the chat template around messages, as ids, ready for the assistant's turn
    .stream()                      ids one at a time -> text as soon as its characters are whole

The byte pairs are merged by tiktoken; what lies around it (added tokens, normalisation, the split of digits, bytes without a token) is done here.
A tokenizer.json can ask for much more. What is not supported is refused by name: no id may differ in silence.
Checked in tests/test_tokenizer.py: ids equal to those of Hugging Face's `tokenizers` for every code point and for thousands of mixed strings,
with the tokenizer.json of Qwen3 and of SmolLM2 and a small one in the manner of Llama-3; templates equal to transformers'.
Not the same, as the Unicode tables differ in age: some fifty combining marks of rare scripts, younger than Unicode 9, where NFC would reorder
them, and the 13 digits new in Unicode 17 right beside punctuation, under SmolLM2's split.
"""
import codecs
import json
import re
import unicodedata
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.sandbox
import regex  # tiktoken's own dependency
import tiktoken

from checkpoint import InputError, read_json


# ---------------------------------------------------------------------------------------------------------------------
# Bytes: tokenizer.json writes each byte as a printable letter (GPT-2's table): "Ġthe" is b" the".

def byte_letters():
    """-> {letter: byte}. Printable Latin-1 characters stand for themselves, the other 68 bytes for the letters from chr(256) on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    other = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(other)}


BYTE = byte_letters()


def spell(token):
    """A token as the vocabulary writes it -> its bytes."""
    try:
        return bytes([BYTE[letter] for letter in token])
    except KeyError:  # not written in byte letters (an added token with a space in it): it stands for itself
        return token.encode("utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# Merges. tokenizer.json lists pairs: "apply the first listed pair that occurs, leftmost first". tiktoken has no pairs: it joins whichever two
# neighbours spell the token of the lowest rank, and takes a piece of text that is a token as a whole at once. Ranked by merge order, the two
# agree exactly if no two tokens that spell a third one can ever stand side by side, except the pair that is listed for it.
# They can't where each token is what merging makes of its own bytes: merging inside a stretch of text never depends on what is around it.
# Every vocabulary that BPE has learnt is so. One made by hand may not be, therefore it is checked.

def rank_tokens(file, vocab, merges, whole_first):
    """-> ids in the order of tiktoken's ranks. The first 256 are the bytes; None is a byte without a token.

    whole_first: a piece that is in the vocabulary is taken whole even if no merges lead to it (ignore_merges, as in Llama-3)."""
    pairs, results = [], []
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge  # both spellings are in use
        try:
            pairs.append((vocab[left], vocab[right]))
            results.append(vocab[left + right])
        except KeyError as error:
            raise InputError(f"{file}: the merge {merge!r} needs the token {error}, which is not in the vocabulary")
    number = {pair: place for place, pair in enumerate(pairs)}
    if len(number) < len(pairs):
        raise InputError(f"{file}: a merge is listed twice, which is not supported")

    byte_ids = [vocab.get(letter) for letter in sorted(BYTE, key=BYTE.get)]
    made = {i: -1 for i in byte_ids if i is not None}  # id -> number of the merge that makes it, alone among its bytes
    parts = {}                                         # id -> the pair it is made of

    def apart(left, right, due):
        """Side by side, do left and right both get complete without merging across the seam, until merge number `due`?"""
        while number.get((left, right), due) >= due:
            if made[left] > made[right]:  # go back in time: take apart the one that was completed last
                due, left = made[left], parts[left][1]
            elif made[right] >= 0:  # on a tie (twice the same token) that is the right one, as merging goes from left to right
                due, right = made[right] + 1, parts[right][0]
            else:
                return True  # back at the bytes
        return False

    for place, (pair, token) in enumerate(zip(pairs, results)):
        if token not in made and pair[0] in made and pair[1] in made and apart(*pair, place):
            made[token], parts[token] = place, pair

    rank = {i: place for i, place in made.items() if place >= 0}
    for token, i in vocab.items():
        if i in made or not all(letter in BYTE for letter in token):
            continue
        # Its own bytes don't merge to this one, or by merges listed out of order. Taken whole it can still occur, and then tiktoken is right if
        # each way to put it together is a listed merge, all of them in a row, as in a vocabulary that was tiktoken's before (Llama-3).
        halves = [(vocab.get(token[:k]), vocab.get(token[k:])) for k in range(1, len(token))]
        places = [number.get(pair, -1) for pair in halves if None not in pair]
        if whole_first and (not places or min(places) >= 0 and max(places) - min(places) < len(places)):
            rank[i] = min(places, default=len(merges))
        elif whole_first or any(place >= 0 for place in places):
            raise InputError(f"{file}: the token {token!r} is not made by merges in an order that training gives, which is not supported")
    return byte_ids + sorted(rank, key=rank.get)


# ---------------------------------------------------------------------------------------------------------------------
# The other parts of a tokenizer.json: supported or refused.

LONG_SPACE = re.compile(r"\s{500000}")  # tiktoken's own splitting crashes at about a million
SPLIT_GPT2_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s++(?=\p{N})|\s+(?!\S)|\s+"


def kinds(part, key):
    """A part of tokenizer.json, null, alone or a Sequence -> list of its steps."""
    return [] if part is None else part[key] if part["type"] == "Sequence" else [part]


def split_pattern(file, part):
    """The pre_tokenizer -> one regular expression whose matches are the pieces that merging stays within."""
    steps = kinds(part, "pretokenizers")
    names = [step["type"] for step in steps]
    if names not in (["Split", "ByteLevel"], ["Digits", "ByteLevel"]):
        raise InputError(f"{file}: pre_tokenizer {' + '.join(names) or None} is not supported, only Split + ByteLevel and Digits + ByteLevel are")
    first, letters = steps
    needs = [(letters, "add_prefix_space", False)]
    if names[0] == "Split":
        needs += [(first, "behavior", "Isolated"), (first, "invert", False), (letters, "use_regex", False)]
    else:
        needs += [(first, "individual_digits", True), (letters, "use_regex", True)]
    for step, key, wanted in needs:
        if step.get(key) != wanted:
            raise InputError(f"{file}: pre_tokenizer {step['type']} with {key} {step.get(key)!r} is not supported, only {wanted!r} is")
    if names[0] == "Digits":
        # Every digit is cut out before GPT-2's pattern runs, so spaces before one are at the end of their text and stay together.
        return SPLIT_GPT2_DIGITS
    if "Regex" not in first["pattern"]:
        raise InputError(f"{file}: pre_tokenizer Split by {first['pattern']!r} is not supported, only by a Regex")
    return first["pattern"]["Regex"]


def build_encoding(file, pattern, ranks):
    """-> tiktoken.Encoding, once it is known that the pattern leaves no text out: tiktoken would drop it."""
    try:
        encoding = tiktoken.Encoding(file.parent.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except ValueError as error:
        raise InputError(f"{file}: the pre_tokenizer's pattern can't be read ({error})")
    of_each_category = {unicodedata.category(chr(c)): chr(c) for c in range(0x3000)}
    for letter in [*of_each_category.values(), *"\t\r\n"]:
        if not encoding.encode_ordinary(letter):
            raise InputError(f"{file}: the pre_tokenizer's pattern leaves out text such as {letter!r}, which is not supported")
    return encoding


def around(file, part):
    """The post_processor -> ids that it puts before and after a text."""
    before, after = [], []
    for step in kinds(part, "processors"):
        if step["type"] == "TemplateProcessing":
            ids = [None if "Sequence" in item else step["special_tokens"][item["SpecialToken"]["id"]]["ids"] for item in step["single"]]
            text = ids.index(None)
            before, after = sum(ids[:text], []) + before, after + sum(ids[text + 1:], [])
        elif step["type"] != "ByteLevel":  # that one moves offsets, no ids
            raise InputError(f"{file}: post_processor {step['type']} is not supported, only ByteLevel and TemplateProcessing are")
    return before, after


def check(file, raw):
    """Refuse what would give other ids."""
    model = raw["model"]
    if model.get("type") != "BPE":
        raise InputError(f"{file}: the model type {model.get('type')!r} is not supported, only 'BPE' is")
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise InputError(f"{file}: the model's {key} {model[key]!r} is not supported")
    for part, key, wanted in (("normalizer", "normalizers", "NFC"), ("decoder", "decoders", "ByteLevel")):
        names = [step["type"] for step in kinds(raw[part], key)]
        if set(names) - {wanted} or part == "decoder" and not names:
            raise InputError(f"{file}: {part} {' + '.join(names) or None} is not supported, only {wanted} is")
    next_id = len(model["vocab"])
    if sorted(model["vocab"].values()) != list(range(next_id)):
        raise InputError(f"{file}: the vocabulary's ids don't run from 0 to {next_id - 1}")
    for token in raw["added_tokens"]:
        for key in ("single_word", "lstrip", "rstrip"):
            if token.get(key) or not token["content"]:
                raise InputError(f"{file}: the added token {token['content']!r} is empty or has {key}, which is not supported")
        wanted = model["vocab"].get(token["content"], next_id)  # `tokenizers` counts on from the vocabulary, whatever the file says
        if token["id"] != wanted:
            raise InputError(f"{file}: the added token {token['content']!r} has the id {token['id']}, but {wanted} is its turn")
        next_id += wanted == next_id


class Added:
    """Added tokens, found in text from left to right, at one place the longest one."""

    def __init__(self, ids):
        self.ids = ids  # {content: id}
        self.pattern = re.compile("|".join(re.escape(content) for content in sorted(ids, key=len, reverse=True)) or r"(?!)")

    def cut(self, text, left_as_text):
        """-> the stretches of text (str) and the added tokens between them (id), in order. Tokens in left_as_text are no tokens here."""
        start = 0
        for match in self.pattern.finditer(text):
            if self.ids[match.group()] not in left_as_text:
                yield text[start:match.start()]
                yield self.ids[match.group()]
                start = match.end()
        yield text[start:]


# ---------------------------------------------------------------------------------------------------------------------
# The chat template: Jinja, in a sandbox with the same settings and helpers as transformers'.

def read_template(directory, config):
    """-> (file it comes from, source or None, compiled or None). chat_template.jinja goes before the key in tokenizer_config.json."""
    file = directory / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    file = file if file.exists() else directory / "tokenizer_config.json"
    if isinstance(source, list):  # several, by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is None:
        return file, None, None

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):  # Jinja's own would escape for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals |= {"raise_exception": raise_exception, "strftime_now": lambda format: datetime.now().strftime(format)}
    try:
        return file, source, env.from_string(source)
    except jinja2.TemplateError as error:
        raise InputError(f"{file}: the chat template can't be read ({error})")


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer

class Stream:
    """Token ids in, one at a time; text out, whole characters only."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id):
        """-> the text that is complete by now: '' in the midst of a character, and for special tokens."""
        if token_id in self.tokenizer.special_ids:
            return ""
        return self.decoder.decode(self.tokenizer.bytes[token_id])

    def flush(self):
        """-> what is left at the end: U+FFFD for a character that was never completed."""
        return self.decoder.decode(b"", final=True)


class Tokenizer:
    """Made by Tokenizer.load.

    size          1 + the highest id; a model's embedding may have more rows, which stand for no token
    stop_ids      the tokenizer's own end token, a set of one id or none
    special_ids   ids that decode() and stream() leave out
    has_template, has_thinking   is there a chat template, and has it a switch for thinking?"""

    @classmethod
    def load(cls, directory):
        directory = Path(directory)
        raw, config = read_json(directory / "tokenizer.json"), read_json(directory / "tokenizer_config.json")
        try:
            return cls(directory, raw, config)
        except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
            raise InputError(f"{directory}: tokenizer.json or tokenizer_config.json is not in the expected format ({error!r})")

    def __init__(self, directory, raw, config):
        file = directory / "tokenizer.json"
        check(file, raw)
        vocab, added = raw["model"]["vocab"], raw["added_tokens"]
        self.nfc = bool(kinds(raw["normalizer"], "normalizers"))
        self.before, self.after = around(file, raw["post_processor"])

        # ids and bytes
        spelled = {i: spell(token) for token, i in vocab.items()}
        self.bytes = spelled | {token["id"]: token["content"].encode("utf-8") for token in added}
        self.size = 1 + max(self.bytes)
        self.special_ids = frozenset(token["id"] for token in added if token["special"])
        # Most added tokens are looked for in the text as it came, the `normalized` ones between those, after normalisation.
        self.added = Added({token["content"]: token["id"] for token in added if not token["normalized"]})
        self.added_normalized = Added({self.normalize(token["content"]): token["id"] for token in added if token["normalized"]})

        # tiktoken knows ranks only; self.ids turns them into ids
        self.ids = rank_tokens(file, vocab, raw["model"]["merges"], raw["model"].get("ignore_merges", False))
        self.no_token = bytes(byte for byte in range(256) if self.ids[byte] is None)  # without a rank, tiktoken would crash on them
        self.pattern = split_pattern(file, raw["pre_tokenizer"])
        ranks = {bytes([rank]) if rank < 256 else spelled[i]: rank for rank, i in enumerate(self.ids)}
        self.encoding = build_encoding(file, self.pattern, ranks)

        # chat
        self.template_file, source, self.template = read_template(directory, config)
        self.has_template, self.has_thinking = source is not None, "enable_thinking" in (source or "")
        names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
        self.named = {name: config[name]["content"] if isinstance(config[name], dict) else config[name] for name in names if config.get(name)}
        known = vocab | {token["content"]: token["id"] for token in added}
        stop = {self.named[name] for name in ("eos_token",) if name in self.named}
        if not stop <= known.keys():
            raise InputError(f"{directory / 'tokenizer_config.json'}: eos_token {self.named['eos_token']!r} is not in tokenizer.json")
        self.stop_ids = frozenset(known[token] for token in stop)

    def normalize(self, text):
        return unicodedata.normalize("NFC", text) if self.nfc else text

    def encode(self, text, special=True):
        """Text -> ids. special=False: special tokens in the text are plain text; other added tokens (Qwen3's <think>) stay tokens."""
        if not text.isascii():  # halves of surrogate pairs are no text: U+FFFD
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        left_as_text = () if special else self.special_ids
        ids = []
        for part in self.added.cut(text, left_as_text):
            if isinstance(part, int):
                ids.append(part)
                continue
            # Only now: over the whole text, a combining mark would melt into the last character of the token before it.
            for piece in self.added_normalized.cut(self.normalize(part), left_as_text):
                ids += [piece] if isinstance(piece, int) else self._merge(piece)
        return ids

    def _merge(self, text):
        """Text without added tokens -> ids."""
        data = text.encode("utf-8")
        if data == data.translate(None, self.no_token) and not LONG_SPACE.search(text):
            return [self.ids[rank] for rank in self.encoding.encode_ordinary(text)]
        # Bytes without a token disappear, after the text was split into pieces and before anything is merged: their neighbours may merge.
        pieces = [match.group().encode("utf-8").translate(None, self.no_token) for match in regex.finditer(self.pattern, text)]
        return [self.ids[rank] for piece in pieces if piece for rank in self.encoding._encode_single_piece(piece)]

    def encode_raw(self, text):
        """Text that is no chat -> ids, with what the model expects around it (Llama-3: a first token)."""
        return self.before + self.encode(text) + self.after

    def decode(self, ids, skip_special=True):
        """Ids -> text; U+FFFD for bytes that are no character."""
        return b"".join(self.bytes[i] for i in ids if not (skip_special and i in self.special_ids)).decode("utf-8", "replace")

    def stream(self):
        return Stream(self)

    def render(self, messages, thinking=False):
        """Messages [{"role": ..., "content": ...}, ...] -> the text that the assistant's turn continues."""
        if self.template is None:
            raise InputError(f"{self.template_file}: there is no chat template")
        if thinking and not self.has_thinking:
            raise InputError(f"{self.template_file}: the chat template has no switch for thinking (enable_thinking)")
        try:
            return self.template.render(messages=messages, tools=None, documents=None, add_generation_prompt=True, enable_thinking=thinking,
                                        **self.named)
        except Exception as error:       # a template is a program, and can fail in any way
            raise InputError(f"{self.template_file}: the chat template does not take these messages ({error})")

    def chat(self, messages, thinking=False):
        """Messages -> ids. The template writes special tokens as text, the first one too, so nothing is added around it."""
        return self.encode(self.render(messages, thinking))
