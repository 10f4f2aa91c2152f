"""tokenizer.py. First with small tokenizers made by hand, ids worked out by hand; then against Hugging Face's `tokenizers` and the real files of
Qwen3 and SmolLM2, where they are there (../shared, `pip install tokenizers`); templates against transformers, too, where it is installed."""
import copy
import json
import random
import unicodedata
from pathlib import Path

import pytest

from checkpoint import InputError
from tokenizer import BYTE, Tokenizer

SHARED = Path(__file__).parents[2] / "shared" / "tokenizers"
QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LETTER = {byte: letter for letter, byte in BYTE.items()}


# ---------------------------------------------------------------------------------------------------------------------
# By hand. Byte b has the id b; tokens made by merging come from 256 on in the order of MORE, which is not the order of the merges.

MORE = ["ab", "bc", "ĠĠ", "!!", "Ġt", "the", "he", "Ãī"]  # the last is É
MERGES = ["b c", "a b", "h e", "t he", "Ġ t", "! !", ["Ġ", "Ġ"], "Ã ī"]
SPECIAL = ["<|end|>", "<|start|>", "<think>"]  # 264, 265, 266; the last with special: false
CHATML = ("{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n"
          "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n{% endif %}{% endif %}")


def added(content, i, special=True, **flags):
    return dict(id=i, content=content, single_word=False, lstrip=False, rstrip=False, normalized=False, special=special) | flags


def split(pattern=QWEN_SPLIT, **other):
    return dict(type="Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False) | other


def byte_level(**other):
    return dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False) | other


def sequence(*steps):
    return dict(type="Sequence", pretokenizers=list(steps))


def by_hand(without=(), more=MORE, merges=MERGES, special=SPECIAL, **model):
    """-> tokenizer.json as a dict. A byte in `without` has no token: its id belongs to a token that nothing leads to."""
    vocab = {f"no {byte}" if byte in without else LETTER[byte]: byte for byte in range(256)} | {token: 256 + i for i, token in enumerate(more)}
    tokens = [added(token, len(vocab) + i, special=token != "<think>") for i, token in enumerate(special)]
    return dict(
        version="1.0", truncation=None, padding=None, added_tokens=tokens, normalizer={"type": "NFC"}, pre_tokenizer=sequence(split(), byte_level()),
        post_processor=byte_level(), decoder=byte_level(),
        model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=False,
                   byte_fallback=False, ignore_merges=False, vocab=vocab, merges=merges) | model)


def load(folder, raw, **config):
    """Write and load. config: keys of tokenizer_config.json."""
    config = dict(bos_token=None, eos_token="<|end|>", chat_template=CHATML) | config
    (folder / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.load(folder)


@pytest.fixture
def hand(tmp_path):
    return load(tmp_path, by_hand())


def test_merges_go_by_their_order_not_by_id(hand):
    assert hand.encode("abc") == [97, 257]  # "b c" is listed first, though "ab" has the lower id
    assert hand.encode("ab") == [256]
    assert hand.encode("the the to") == [261, 32, 261, 260, 111]  # "t he" comes before "Ġ t"
    assert hand.encode("   x") == [258, 32, 120]


def test_every_byte_round_trips(hand):
    text = "".join(map(chr, range(0x250))) + "🙂 中\r\n\x00"
    assert hand.decode(hand.encode(text)) == text
    assert hand.encode("\x00é") == [0, 0xC3, 0xA9]
    assert hand.encode("") == []


def test_special_tokens_in_text(hand):
    assert hand.encode("a<|end|>a<think>") == [97, 264, 97, 266]
    assert hand.encode("<|end|>", special=False) == list(b"<|end|>")
    assert hand.encode("<think>", special=False) == [266]  # special: false is matched all the same, as in `tokenizers`
    assert hand.decode([97, 264, 266, 98]) == "a<think>b"
    assert hand.decode([97, 264, 266, 98], skip_special=False) == "a<|end|><think>b"


def test_normalisation_stays_between_added_tokens(hand):
    assert hand.encode("E\u0301") == [263]  # É, composed and merged
    assert hand.encode("<|end|>\u0301") == [264, 0xCC, 0x81]
    assert hand.encode("<|end|>\u0338") == [264, 0xCC, 0xB8]  # "> + U+0338" would compose to "not greater than"
    assert hand.encode("<|end|>\u0338", special=False) == list("<|end|>\u0338".replace(">\u0338", "\u226f").encode())


def test_the_longest_added_token_wins(tmp_path):
    hand = load(tmp_path, by_hand(special=["<|end|>", "<|end|>>"]))
    assert hand.encode("<|end|>><|end|>") == [265, 264]


def test_normalized_added_tokens_match_after_normalisation(tmp_path):
    raw = by_hand()
    raw["added_tokens"].append(added("é!", 267, special=False, normalized=True))
    hand = load(tmp_path, raw)
    assert hand.encode("e\u0301!") == [267] and hand.encode("é!") == [267]
    assert hand.decode([267]) == "é!"


def test_bytes_without_a_token_disappear_and_their_neighbours_merge(tmp_path):
    hand = load(tmp_path, by_hand(without=(0x04, 0xF1)))
    assert hand.encode("\x04") == []
    assert hand.encode("a\x04b") == [97, 98]  # three pieces: letters, the rest, letters
    assert hand.encode("!\x04! ab") == [259, 32, 256]  # one piece
    assert hand.encode("\U00050000") == [0x90, 0x80, 0x80]  # UTF-8 starts with 0xF1
    assert hand.decode(hand.encode("x\x04<|end|>\x04y")) == "xy"


def test_digits_split(tmp_path):
    raw = by_hand(more=["12", "ĠĠ", "Ġ1", "Ġx"], merges=["1 2", "Ġ Ġ", "Ġ 1", "Ġ x"])
    raw["pre_tokenizer"] = sequence(dict(type="Digits", individual_digits=True), byte_level(use_regex=True))
    hand = load(tmp_path, raw)
    assert hand.encode("12") == [49, 50]
    assert hand.encode("  12") == [257, 49, 50]  # the spaces stay together before a digit,
    assert hand.encode("   x") == [257, 259]     # the last one leaves them before a letter
    assert hand.encode("x  ²") == [120, 257, 0xC2, 0xB2]  # every number, not only 0-9


def test_a_million_spaces(hand):
    n = 1_200_000  # tiktoken's own splitting panics here
    assert hand.encode(" " * n + "x") == [258] * (n // 2 - 1) + [32, 32, 120]


def test_half_a_surrogate_pair_is_no_crash(hand):
    assert hand.encode("a\ud83d") == hand.encode("a\ufffd")


def test_post_processor(tmp_path):
    template = dict(type="TemplateProcessing", single=[{"SpecialToken": {"id": "<|start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                    pair=[], special_tokens={"<|start|>": {"id": "<|start|>", "ids": [265], "tokens": ["<|start|>"]}})
    for post, before in ((None, []), (byte_level(), []), (template, [265]), (dict(type="Sequence", processors=[byte_level(), template]), [265])):
        hand = load(tmp_path, by_hand() | dict(post_processor=post))
        assert hand.encode_raw("ab") == before + [256]
        assert hand.encode("ab") == [256]
    template["single"].reverse()
    assert load(tmp_path, by_hand() | dict(post_processor=template)).encode_raw("ab") == [256, 265]


def test_ignore_merges_takes_whole_pieces_only(tmp_path):
    raw = by_hand(more=["ab", "xyz"], merges=["a b"])
    assert load(tmp_path, raw).encode("xyz ab") == [120, 121, 122, 32, 256]
    raw["model"]["ignore_merges"] = True
    assert load(tmp_path, raw).encode("xyz xyzx") == [257, *b" xyzx"]


def test_size_and_stop_ids(tmp_path):
    assert load(tmp_path, by_hand()).size == 267
    assert load(tmp_path, by_hand()).stop_ids == {264}
    assert load(tmp_path, by_hand(), eos_token=added("<|start|>", 265)).stop_ids == {265}
    assert load(tmp_path, by_hand(), eos_token=None).stop_ids == frozenset()
    with pytest.raises(InputError, match="tokenizer_config.json.*<eos>"):
        load(tmp_path, by_hand(), eos_token="<eos>")


def test_stream_gives_whole_characters(hand):
    stream = hand.stream()
    ids = hand.encode("a🙂") + [264] + hand.encode("é👩‍🚀")
    assert [stream.push(i) for i in ids[:6]] == ["a", "", "", "", "🙂", ""]
    rest = "".join(stream.push(i) for i in ids[6:])
    assert rest + stream.flush() == "é👩‍🚀" and stream.flush() == ""


def test_stream_equals_decode_on_broken_text(hand):
    for seed in range(200):
        ids = random.Random(seed).choices([97, 0xF0, 0x9F, 0x99, 0x82, 0xC3, 0xA9, 0xFF, 0xED, 0xA0, 264, 263], k=12)
        stream = hand.stream()
        assert "".join(stream.push(i) for i in ids) + stream.flush() == hand.decode(ids)
    stream = hand.stream()
    assert [stream.push(0xF0), stream.push(0x9F), stream.flush()] == ["", "", "\ufffd"]


# ---------------------------------------------------------------------------------------------------------------------
# What is refused

def change(*path, to):
    def apply(raw):
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = to
    return apply


DIGITS = dict(type="Digits", individual_digits=True)
REFUSED = [
    (change("model", "type", to="Unigram"), "Unigram"),
    (change("model", "byte_fallback", to=True), "byte_fallback"),
    (change("model", "dropout", to=0.1), "dropout"),
    (change("model", "unk_token", to="<|end|>"), "unk_token"),
    (change("model", "end_of_word_suffix", to="</w>"), "end_of_word_suffix"),
    (change("model", "continuing_subword_prefix", to="##"), "continuing_subword_prefix"),
    (change("model", "merges", to=["a zz"]), "'a zz' needs the token 'zz'"),
    (change("model", "merges", to=["a b", "a b"]), "twice"),
    (change("model", "vocab", "a", to=98), "ids"),
    (change("model", "vocab", to=None), "expected format"),
    (change("normalizer", to={"type": "NFKC"}), "normalizer NFKC"),
    (change("normalizer", to={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}), "normalizer NFC . Lowercase"),
    (change("decoder", to={"type": "Metaspace"}), "decoder Metaspace"),
    (change("decoder", to=None), "decoder None"),
    (change("pre_tokenizer", to=None), "pre_tokenizer None"),
    (change("pre_tokenizer", to={"type": "Whitespace"}), "pre_tokenizer Whitespace"),
    (change("pre_tokenizer", to=sequence(DIGITS, split(), byte_level())), "Digits . Split . ByteLevel"),
    (change("pre_tokenizer", to=sequence(split(behavior="Removed"), byte_level())), "Removed"),
    (change("pre_tokenizer", to=sequence(split(invert=True), byte_level())), "invert"),
    (change("pre_tokenizer", to=sequence(split(pattern=" ") | {"pattern": {"String": " "}}, byte_level())), "String"),
    (change("pre_tokenizer", to=sequence(split(pattern="(a"), byte_level())), "pattern can't be read"),
    (change("pre_tokenizer", to=sequence(split(pattern=r"\p{L}+|\p{N}+|\s+"), byte_level())), "leaves out"),
    (change("pre_tokenizer", to=sequence(split(), byte_level(use_regex=True))), "use_regex"),
    (change("pre_tokenizer", to=sequence(split(), byte_level(add_prefix_space=True))), "add_prefix_space"),
    (change("pre_tokenizer", to=sequence(DIGITS | dict(individual_digits=False), byte_level(use_regex=True))), "individual_digits"),
    (change("post_processor", to={"type": "BertProcessing"}), "BertProcessing"),
    (change("added_tokens", 0, "lstrip", to=True), r"<\|end\|>.* lstrip"),
    (change("added_tokens", 0, "rstrip", to=True), "rstrip"),
    (change("added_tokens", 0, "single_word", to=True), "single_word"),
    (change("added_tokens", 0, "id", to=300), "300"),
    (change("added_tokens", 0, "content", to=""), "empty"),
]


@pytest.mark.parametrize("apply, message", REFUSED, ids=[message for _, message in REFUSED])
def test_refused_by_name(tmp_path, apply, message):
    raw = copy.deepcopy(by_hand())
    apply(raw)
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path, raw)
    assert str(tmp_path) in str(caught.value)


def test_a_token_that_its_bytes_do_not_merge_to_is_refused(tmp_path):
    # "abc" always ends as "ab" + "c", which `tokenizers` leaves and tiktoken would join.
    with pytest.raises(InputError, match="'abc' is not made by merges in an order"):
        load(tmp_path, by_hand(more=["ab", "bc", "abc"], merges=["a b", "b c", "a bc"]))
    with pytest.raises(InputError, match="'bbb'"):  # all ways to it are listed, but far apart: tiktoken has one rank for it
        load(tmp_path, by_hand(more=["bb", "bbb"], merges=["bb b", "b b", "b bb"], ignore_merges=True))
    load(tmp_path, by_hand(more=["ab", "bc", "abc"], merges=["b c", "a b", "a bc"]))
    load(tmp_path, by_hand(more=["ab", "bc", "abc"], merges=["a b", "b c", "ab c", "a bc"]))


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(InputError, match="tokenizer.json: no such file"):
        Tokenizer.load(tmp_path)
    load(tmp_path, by_hand())
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="tokenizer_config.json: no such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {')
    with pytest.raises(InputError, match="tokenizer.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="tokenizer.json"):
        load(tmp_path, {})


# ---------------------------------------------------------------------------------------------------------------------
# Chat templates

USER = [{"role": "user", "content": "Hi"}]


def test_chat_by_hand(hand):
    assert hand.has_template and hand.has_thinking
    assert hand.render(USER, thinking=True) == "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    assert hand.render(USER) == "<|start|>user\nHi<|end|>\n<|start|>assistant\n<think>\n\n"
    assert hand.chat(USER, thinking=True) == [265, *b"user\nHi", 264, 10, 265, *b"assistant\n"]


def test_template_without_a_switch_and_no_template(tmp_path):
    hand = load(tmp_path, by_hand(), chat_template="{{ messages[0].content }}")
    assert hand.has_template and not hand.has_thinking and hand.render(USER) == "Hi"
    with pytest.raises(InputError, match="no switch for thinking"):
        hand.render(USER, thinking=True)
    hand = load(tmp_path, by_hand(), chat_template=None)
    assert not hand.has_template and not hand.has_thinking
    with pytest.raises(InputError, match="no chat template"):
        hand.chat(USER)


def test_template_sources(tmp_path):
    named = [dict(name="tools", template="tools"), dict(name="default", template="default")]
    assert load(tmp_path, by_hand(), chat_template=named).render(USER) == "default"
    (tmp_path / "chat_template.jinja").write_text("own file: {{ eos_token }}{{ bos_token }}")
    assert load(tmp_path, by_hand(), chat_template=named).render(USER) == "own file: <|end|>"


def test_template_settings_and_helpers(tmp_path):
    def render(template):
        return load(tmp_path, by_hand(), chat_template=template).render([{"role": "user", "content": "<é>"}])

    assert render("{% if true %}\n  {% set x = 1 %}\n{% endif %}\nend\n") == "end"  # trim_blocks, lstrip_blocks
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "<é>"}]'  # not escaped for HTML or ASCII
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    with pytest.raises(InputError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match="tokenizer_config.json.*template"):
        render("{% if %}")
    with pytest.raises(InputError, match="does not take"):
        render("{{ messages.append(1) }}")  # the sandbox
    with pytest.raises(InputError, match="does not take"):
        render("{{ messages[0].content + 1 }}")


TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Was ist 2+2? <b>&\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nVier."}, {"role": "user", "content": "Danke\u0301"}]
SMOL_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
TALK_START = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWas ist 2+2? <b>&\n<|im_end|>\n<|im_start|>assistant\n"
TALK_END = "<|im_end|>\n<|im_start|>user\nDanke\u0301<|im_end|>\n<|im_start|>assistant\n"
GOLDEN = [  # written by transformers 5.15.0
    ("qwen3", USER, True, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
    ("qwen3", USER, False, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ("qwen3", TALK, True, TALK_START + "Vier." + TALK_END),
    ("qwen3", TALK, False, TALK_START + "Vier." + TALK_END + "<think>\n\n</think>\n\n"),
    ("smollm2", USER, False, SMOL_SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
    ("smollm2", TALK, False, TALK_START + "<think>\nhm\n</think>\n\nVier." + TALK_END),
]


# ---------------------------------------------------------------------------------------------------------------------
# The real files

@pytest.fixture(scope="module", params=["qwen3", "smollm2"])
def real(request):
    if not (SHARED / request.param).is_dir():
        pytest.skip(f"{SHARED / request.param} is not here")
    tokenizer = Tokenizer.load(SHARED / request.param)
    tokenizer.name = request.param
    return tokenizer


@pytest.fixture(scope="module")
def oracle(real):
    return pytest.importorskip("tokenizers").Tokenizer.from_file(str(SHARED / real.name / "tokenizer.json"))


def test_real_facts(real):
    facts = (real.size, real.stop_ids, real.has_template, real.has_thinking, len(real.no_token))
    assert facts == dict(qwen3=(151669, {151645}, True, True, 0), smollm2=(49152, {2}, True, False, 21))[real.name]


def test_real_templates_golden(real):
    for name, messages, thinking, text in GOLDEN:
        if name == real.name:
            assert real.render(messages, thinking) == text
            assert real.chat(messages, thinking) == real.encode(text)


def test_real_templates_live(real):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(SHARED / real.name)
    answered = [*TALK, {"role": "assistant", "content": "Bitte."}]
    for messages in (USER, TALK, answered, [*answered, USER[0]], [USER[0], {"role": "assistant", "content": "\n</think>\nx", "reasoning_content": "r"}]):
        for thinking in (False, True)[:1 + real.has_thinking]:
            wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking)
            assert real.render(messages, thinking) == wanted


ATOMS = ["the", " of", "Hello", "WORLD", "don't", "I'LL", "we've ", "'s", "'", " ", "  ", "   ", " " * 17, "\n", "\n\n", "\r\n", "\t", "\t\t ", "\u00a0",
         "\u3000", "\u2028", "\x85", "0", "7", "12", "2024", "3.14", "½", "²", "٣٤", "Ⅷ", "一", "中文字", "こんにちは", "カタカナ", "한국어", "привет",
         "Ελλάδα", "שלום", "مرحبا", "नमस्ते", "ไทย", "é", "e\u0301", "E\u0301", "\u0301", "\u0338", "\u0323\u0307", "ﬁ", "ß", "İ", "ſ", "K", "Å", "가",
         "\u1100\u1161", "🙂", "👩‍👩‍👧", "🇩🇪", "👍🏽", "\u200d", "\ufe0f", "\u200b", "\ufeff", "\ufffd", "\x00", "\x04", "\x06", "\x13", "\x1b", "\x1d",
         "\x7f", "\x80", "\U00050000", "\U000abcde", "\U0010ffff", "!", "!!", "...", "—", "“q”", "->", "==", "def f(x):\n    return x", "#include <a>",
         "{\"a\": [1, 2]}", "<br/>", "\\n", "https://x.y/z?a=1&b=2", "_snake_case", "CamelCase", "a" * 60, "=" * 80, "ab" * 40, "9" * 30, ">", "<", "<|", "|>",
         "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "<|im_end", "<file_sep>", "<|im_start|><|im_end|>"]


def mixed_strings(n, seed):
    rng = random.Random(seed)
    atoms = ATOMS + [chr(c) for c in rng.sample([*range(0xD800), *range(0xE000, 0x3134F)], 200) if not unicodedata.combining(chr(c))]
    return ["".join(rng.choices(atoms, k=rng.randint(1, 25))) for _ in range(n)]


@pytest.mark.parametrize("special", [True, False])
def test_mixed_strings(real, oracle, special):
    oracle.encode_special_tokens = not special
    texts = mixed_strings(2000, seed=1) + [" " * 5000, "a" * 20000, "!" * 5000 + "\n" * 5000, "\x04" * 3000 + "!", "ab" * 5000, "1" * 3000, "\u0301" * 3000]
    for text, theirs in zip(texts, oracle.encode_batch(texts)):
        assert real.encode(text, special) == theirs.ids, repr(text)


def test_decode_and_stream(real, oracle):
    for text in mixed_strings(300, seed=2):
        ids, stream = real.encode(text), real.stream()
        assert real.decode(ids) == oracle.decode(ids) == "".join(map(stream.push, ids)) + stream.flush()
        assert real.decode(ids, skip_special=False) == oracle.decode(ids, skip_special_tokens=False)
    for i in range(real.size):
        assert real.decode([i]) == oracle.decode([i])


def test_every_code_point(real, oracle):
    """Each after a letter, after a digit and before a space, 100 to a text."""
    oracle.encode_special_tokens = False
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    texts = ["".join(f"a{c} 1{c} x" for c in points[k:k + 100]) for k in range(0, len(points), 100)]
    for start in range(0, len(texts), 500):
        for text, theirs in zip(texts[start:start + 500], oracle.encode_batch(texts[start:start + 500])):
            assert real.encode(text) == theirs.ids, repr(text)


# ---------------------------------------------------------------------------------------------------------------------
# Other vocabularies, against `tokenizers`

def test_random_vocabularies_are_the_same_or_refused(tmp_path):
    """Merges drawn at random: many lists no training would give. What loads must agree, and some of each kind must come up."""
    tokenizers = pytest.importorskip("tokenizers")
    rng, loaded, refused = random.Random(0), 0, 0
    for _ in range(300):
        tokens, merges = ["a", "b", "c"], []
        for _ in range(rng.randint(1, 7)):
            pair = rng.choices(tokens, k=2)
            if pair not in merges:
                merges.append(pair)
                tokens += [] if "".join(pair) in tokens else ["".join(pair)]
        merges = rng.sample(merges, len(merges)) if rng.random() < 0.2 else merges
        raw = by_hand(more=tokens[3:], merges=merges, ignore_merges=rng.random() < 0.5)
        try:
            ours = load(tmp_path, raw)
        except InputError:
            refused += 1
            continue
        loaded += 1
        theirs = tokenizers.Tokenizer.from_str(json.dumps(raw))
        for text in ["".join(rng.choices("abc"[:rng.randint(1, 3)], k=rng.randint(1, 30))) for _ in range(30)] + tokens:
            assert ours.encode(text) == theirs.encode(text).ids, (merges, text)
    assert loaded > 50 and refused > 50


@pytest.mark.parametrize("every_split", [False, True], ids=["trained", "every split listed"])
def test_in_the_manner_of_llama_3(tmp_path, every_split):
    """Split + ByteLevel, ignore_merges, a first token from TemplateProcessing; merges as trained, or as converted from tiktoken's ranks."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    theirs = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    theirs.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(LLAMA_SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    theirs.decoder = decoders.ByteLevel()
    theirs.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    theirs.add_special_tokens(["<|begin_of_text|>", "<|im_end|>"])
    start = ("<|begin_of_text|>", theirs.token_to_id("<|begin_of_text|>"))
    theirs.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
        single=f"{start[0]} $A", pair=f"{start[0]} $A {start[0]}:1 $B:1", special_tokens=[start])])
    raw = json.loads(theirs.to_str())
    if every_split:
        vocab = raw["model"]["vocab"]
        halves = {token: [(token[:k], token[k:]) for k in range(1, len(token)) if token[:k] in vocab and token[k:] in vocab] for token in vocab}
        raw["model"]["merges"] = [list(pair) for token in sorted(vocab, key=vocab.get) for pair in halves[token]]
        theirs = tokenizers.Tokenizer.from_str(json.dumps(raw))
    ours = load(tmp_path, raw, eos_token=None)
    for text in mixed_strings(500, seed=3) + [Path(__file__).read_text(encoding="utf-8")]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, repr(text)
        assert ours.encode_raw(text) == theirs.encode(text).ids
    assert ours.encode_raw("") == [start[1]]
