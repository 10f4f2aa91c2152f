"""target.py (with model.py's loader, layers and cache) against transformers, against itself in other shapes, and against broken checkpoints.

The golden files come from make_golden.py; where transformers is installed the same comparisons run live, with other weights and prompts.
"""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import make_golden
import toys
from checkpoint import InputError
from model import Config, inverse_frequencies
from target import Target

KINDS = sorted(toys.KINDS)
IDS = torch.tensor([[5, 77, 260, 31, 8, 199, 264, 100, 42, 11, 281, 90]])


@pytest.fixture
def broken(checkpoint, tmp_path):
    """broken(kind, **options) -> a copy that a test may damage."""
    return lambda kind, **options: shutil.copytree(checkpoint(kind, **options), tmp_path / "broken")


def greedy(target, prompt, n):
    """prompt (T) -> the next n tokens (n), one row at a time through a cache"""
    cache = target.new_cache(len(prompt) + n)
    ids, out = prompt[None], []
    for _ in range(n):
        logits, _ = target(ids, cache, last_only=True)
        ids = logits[:, -1].argmax(-1, keepdim=True)
        out.append(ids)
    return torch.cat(out, 1)[0]


def close(a, b):
    """Equal but for fp32's rounding: within 1e-5 of the largest value."""
    torch.testing.assert_close(a, b, atol=1e-5 * max(1.0, b.abs().max().item()), rtol=0)


def refused(*words):
    """The error must hold every word: the file, the key, the values. One line, too: no (?s)."""
    return pytest.raises(InputError, match="^" + "".join(f"(?=.*{word})" for word in words))


# ---------------------------------------------------------------------------------------------------------------------
# Against transformers

def agrees(target, expected):
    prompt, hidden = expected["prompt"], target.config.hidden_size
    logits, features = target(prompt[None], taps=make_golden.TAPS)
    assert (logits[0] - expected["logits"]).abs().max() < 1e-4
    for n, layer in enumerate(make_golden.TAPS):
        close(features[0, :, n * hidden:(n + 1) * hidden], expected[f"tap{layer}"])
    # the last tap is the raw stream: transformers' last hidden state is that, normed
    assert make_golden.TAPS[-1] == target.config.num_hidden_layers - 1
    close(target.norm(features[0, :, -hidden:]), expected["normed"])
    assert not torch.allclose(features[0, :, -hidden:], expected["normed"], atol=0.1)
    assert greedy(target, prompt, make_golden.N_GREEDY).tolist() == expected["greedy"].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_golden(target_of, kind):
    expected = load_file(make_golden.GOLDEN / f"{kind}.safetensors")
    assert len(set(expected["greedy"].tolist())) > 3
    agrees(target_of(kind), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_text(checkpoint, kind):
    tokenizer = pytest.importorskip("tokenizer").Tokenizer.load(checkpoint(kind))
    expected = load_file(make_golden.GOLDEN / f"{kind}.safetensors")
    assert tokenizer.encode(make_golden.PROMPT) == expected["prompt"].tolist()
    assert tokenizer.decode(expected["greedy"].tolist(), skip_special=False) == bytes(expected["text"].tolist()).decode()


@pytest.mark.parametrize("kind", KINDS)
def test_live(checkpoint, target_of, kind):
    pytest.importorskip("transformers")
    agrees(target_of(kind, seed=1), make_golden.reference(checkpoint(kind, seed=1)))
    stored = load_file(make_golden.GOLDEN / f"{kind}.safetensors")  # the files are what make_golden.py would write today
    for name, tensor in make_golden.reference(checkpoint(kind)).items():
        close(tensor, stored[name])


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
OTHERS = {
    "qwen3 with yarn": ("qwen3-tied", dict(rope_scaling=YARN, rope_theta=10000, max_position_embeddings=256)),
    "qwen3 with yarn, old spelling": ("qwen3-tied", dict(rope_scaling=dict(type="yarn", factor=2.0, original_max_position_embeddings=32), rope_theta=10000)),
    "qwen3 with yarn, all its numbers": ("qwen3-untied", dict(rope_theta=10000, rope_scaling=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=4096, beta_fast=16.0, beta_slow=4.0, attention_factor=1.3))),
    "qwen3 with rope_parameters": ("qwen3-tied", dict(rope_theta=toys.DROP, rope_scaling=toys.DROP, rope_parameters=dict(rope_type="default", rope_theta=5000))),
    "llama with rope_parameters": ("llama", dict(rope_theta=toys.DROP, rope_scaling=toys.DROP, rope_parameters=dict(
        toys.KINDS["llama"]["rope_scaling"], rope_theta=10000.0))),
    "llama without scaling": ("llama", dict(rope_scaling=None)),
    "llama, tied, head_dim stated": ("llama", dict(head_dim=24, tie_word_embeddings=True)),
    "qwen3 with attention_bias": ("qwen3-untied", dict(attention_bias=True)),
    "llama with attention_bias": ("llama", dict(attention_bias=True)),
    "one K/V head for all": ("qwen3-untied", dict(num_key_value_heads=1)),
    "a K/V head for each": ("qwen2", dict(num_key_value_heads=4)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_live_other_configs(checkpoint, target_of, case):
    pytest.importorskip("transformers")
    kind, options = OTHERS[case]
    directory, target = checkpoint(kind, **options), target_of(kind, **options)
    model = make_golden.load_transformers(directory)
    theirs = model.model.rotary_emb
    assert torch.allclose(target.rotary.inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert target.rotary.scale == pytest.approx(theirs.attention_scaling, rel=1e-6)
    ids = torch.randint(toys.N_TOKENS, (1, 100), generator=torch.Generator().manual_seed(0))  # past yarn's and llama3's original 64
    logits, streams, normed = make_golden.transformers_forward(model, ids)
    ours, features = target(ids, taps=range(8))
    assert (ours[0] - logits).abs().max() < 1e-4
    close(features[0].unflatten(-1, (8, -1)).transpose(0, 1), streams)


# ---------------------------------------------------------------------------------------------------------------------
# Against itself

@pytest.mark.parametrize("kind", KINDS)
def test_block_equals_single_rows(target_of, kind):
    """A verify of B rows after a cache gives what B plain steps give, and what a fresh forward over everything gives."""
    target = target_of(kind)
    whole, taps = target(IDS, taps=(1, 7))
    for prefill in (1, 4):
        blocks, steps = target.new_cache(12), target.new_cache(12)
        for start, end in ((0, prefill), (prefill, 8), (8, 12)):
            logits, features = target(IDS[:, start:end], blocks, taps=(1, 7))
            close(logits, whole[:, start:end])
            close(features, taps[:, start:end])
            assert blocks.length == end
        for i in range(12):
            logits, features = target(IDS[:, i:i + 1], steps, taps=(1, 7))
            close(logits[:, 0], whole[:, i])
            close(features[:, 0], taps[:, i])
        close(blocks.k, steps.k)
        close(blocks.v, steps.v)


def test_rollback_by_length_equals_fresh_prefill(target_of):
    target = target_of("qwen3-tied")
    cache = target.new_cache(24)
    target(IDS, cache)
    for keep, rejected in ((9, 7), (4, 5), (1, 9)):  # reject, decide otherwise, reject again
        cache.length = keep
        target(torch.full((1, rejected), 3), cache)
        cache.length = keep
        logits, features = target(IDS[:, keep:], cache, taps=(5,))
        fresh = target.new_cache(24)
        expected, expected_features = target(IDS, fresh, taps=(5,))
        close(logits, expected[:, keep:])
        close(features, expected_features[:, keep:])
        close(cache.k[..., :12, :], fresh.k[..., :12, :])
        close(cache.v[..., :12, :], fresh.v[..., :12, :])


def test_blocks_of_changing_size_after_each_other(target_of):
    """The mask is kept between forwards: growing, shrinking and rolled-back blocks must not see a stale one."""
    target = target_of("qwen2")
    whole, _ = target(IDS)
    cache = target.new_cache(16)
    for start, end in ((0, 2), (2, 6), (3, 7), (7, 9), (4, 8), (8, 12), (2, 12), (5, 7)):
        cache.length = start
        close(target(IDS[:, start:end], cache)[0], whole[:, start:end])


def test_last_row_only(target_of):
    target = target_of("qwen3-untied")
    whole, taps = target(IDS, taps=(2,))
    last, same_taps = target(IDS, last_only=True, taps=(2,))
    assert last.shape == (1, 1, target.config.vocab_size)
    close(last, whole[:, -1:])
    assert torch.equal(taps, same_taps)


def test_taps_only_runs_no_layer_behind_the_last_tap(target_of, monkeypatch):
    target = target_of("qwen3-untied")
    _, taps = target(IDS, taps=(1, 3))
    for layer in target.layers[4:]:
        monkeypatch.setattr(layer, "forward", None)
    logits, same_taps = target(IDS, taps=(1, 3), taps_only=True)
    assert logits is None and torch.equal(taps, same_taps)
    with pytest.raises(TypeError):
        target(IDS, taps=(1, 3))


def test_taps_are_as_asked(target_of):
    target = target_of("qwen3-tied")
    assert target(IDS)[1] is None
    _, each = target(IDS, taps=range(8))
    _, some = target(IDS, taps=(1, 4, 6))
    H = target.config.hidden_size
    assert torch.equal(some, torch.cat([each[..., i * H:(i + 1) * H] for i in (1, 4, 6)], -1))
    assert torch.allclose(target.head(target.norm(each[..., -H:])), target(IDS)[0], atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama"])
def test_left_padded_batch_equals_single_runs(target_of, kind):
    target = target_of(kind)
    lengths, T = (12, 3, 7), 12
    ids = torch.zeros(3, T, dtype=torch.long)
    real = torch.zeros(3, T, dtype=torch.bool)
    for row, n in enumerate(lengths):
        ids[row, T - n:], real[row, T - n:] = IDS[0, :n] + row, True
    positions = (real.cumsum(1) - 1).clamp(min=0)
    cache = target.new_cache(T + 6, batch=3)
    logits, features = target(ids, cache, taps=(0, 7), positions=positions, key_mask=real)
    assert logits.isfinite().all()
    singles = [target.new_cache(n + 6) for n in lengths]
    for row, n in enumerate(lengths):
        expected, expected_features = target(ids[row:row + 1, T - n:], singles[row], taps=(0, 7))
        close(logits[row, T - n:], expected[0])
        close(features[row, T - n:], expected_features[0])
    for new in (1, 4, 1):  # and on, with one token and with several
        ids = torch.randint(toys.N_TOKENS, (3, new), generator=torch.Generator().manual_seed(new))
        positions = positions[:, -1:] + torch.arange(1, new + 1)
        real = torch.cat((real, torch.ones(3, new, dtype=torch.bool)), 1)
        logits, _ = target(ids, cache, positions=positions, key_mask=real)
        for row in range(3):
            close(logits[row], target(ids[row:row + 1], singles[row])[0][0])


def test_bfloat16_keeps_long_positions(checkpoint):
    """Keys at 0 seen from position 30,000: frequencies or angles in bf16 would turn them anywhere. (A common shift of all positions would show nothing.)"""
    directory = checkpoint("qwen3-tied", num_hidden_layers=2)
    exact, rough = Target.load(directory), Target.load(directory, dtype=torch.bfloat16)
    for parameter, rounded in zip(exact.parameters(), rough.parameters(), strict=True):
        parameter.data.copy_(rounded.data)
    assert rough.rotary.inv_freq.dtype == torch.float32 and rough(IDS)[0].dtype == torch.bfloat16

    def error(positions):
        expected = exact(IDS, positions=positions)[0]
        return ((rough(IDS, positions=positions)[0] - expected).norm() / expected.norm()).item()
    near = torch.arange(12)[None]
    far = torch.where(near < 6, near, near + 30000)
    assert error(far) < 2 * error(near) < 0.1
    rough.rotary.inv_freq = rough.rotary.inv_freq.bfloat16().float()
    assert error(far) > 4 * error(near)  # the fault this guards against is visible in this test


def test_tied_and_untied(target_of, broken):
    tied, untied = target_of("qwen3-tied"), target_of("qwen3-untied")
    assert torch.equal(tied.head(torch.eye(64)), tied.embed_tokens.weight.T)
    assert not torch.equal(untied.head(torch.eye(48)), untied.embed_tokens.weight.T)
    directory = broken("qwen3-tied")  # some tied checkpoints store the head again
    weights = load_file(directory / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, directory / "model.safetensors")
    assert torch.equal(Target.load(directory)(IDS)[0], tied(IDS)[0])


def test_padded_vocabulary(target_of):
    target = target_of("qwen3-padded")
    logits, _ = target(IDS)
    assert logits.shape[-1] == target.config.vocab_size == toys.N_TOKENS + 20
    cut, _ = target(IDS, vocab=toys.N_TOKENS)
    close(cut, logits[..., :toys.N_TOKENS])
    assert target.embed(torch.tensor([[toys.N_TOKENS]])).shape == (1, 1, 64)  # the mask token's row


def test_sharded_equals_single(checkpoint, target_of):
    for kind in ("qwen3-untied", "qwen2"):
        assert not (checkpoint(kind, shards=2) / "model.safetensors").exists()
        assert torch.equal(target_of(kind, shards=2)(IDS)[0], target_of(kind)(IDS)[0])


def test_rope_theta_in_both_spellings(checkpoint, target_of):
    new = dict(rope_theta=toys.DROP, rope_scaling=toys.DROP, rope_parameters=dict(rope_type="default", rope_theta=1000000))
    old = target_of("qwen3-tied")
    assert torch.equal(target_of("qwen3-tied", **new).rotary.inv_freq, old.rotary.inv_freq)
    assert torch.equal(target_of("qwen3-tied", **new)(IDS)[0], old(IDS)[0])
    expected = 1000000.0 ** (-torch.arange(16, dtype=torch.float64) / 16)
    assert torch.allclose(old.rotary.inv_freq.double(), expected, rtol=1e-6)


def test_frozen_and_whole(target_of):
    target = target_of("llama")
    assert not target.training
    assert not any(p.requires_grad or p.is_meta for p in target.parameters())
    assert target.stop_ids == {toys.SPECIAL_IDS["<|im_end|>"], toys.SPECIAL_IDS["<|endoftext|>"]}


def test_stop_ids_of_config_where_generation_config_is_missing(broken):
    directory = broken("qwen3-tied")
    (directory / "generation_config.json").unlink()
    assert Target.load(directory).stop_ids == {toys.SPECIAL_IDS["<|im_end|>"]}


def test_a_full_cache_is_an_error(target_of):
    target = target_of("qwen3-tied")
    cache = target.new_cache(12)
    target(IDS, cache)
    with pytest.raises(ValueError, match="12.*13"):
        target(IDS[:, :1], cache)
    with pytest.raises(ValueError):
        target(IDS, target.new_cache(11))


# ---------------------------------------------------------------------------------------------------------------------
# Broken checkpoints: one sentence that names the file, the key and the values

def change(path, **changes):
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not toys.DROP}))


REFUSED = {
    "mixture of experts": (dict(model_type="qwen3_moe"), ["model_type", "qwen3_moe"]),
    "another family": (dict(model_type="gemma3_text"), ["model_type", "gemma3_text"]),
    "no rope_theta": (dict(rope_theta=toys.DROP), ["rope_theta"]),
    "rope_theta null": (dict(rope_theta=None), ["rope_theta"]),
    "no rope_theta in rope_parameters": (dict(rope_theta=toys.DROP, rope_parameters=dict(rope_type="default")), ["rope_theta"]),
    "rope type": (dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), ["rope_type", "dynamic"]),
    "rope type, old spelling": (dict(rope_scaling=dict(type="linear", factor=2.0)), ["rope_type", "linear"]),
    "yarn without factor": (dict(rope_scaling=dict(rope_type="yarn")), ["yarn", "factor"]),
    "llama3 without a bound": (dict(rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, original_max_position_embeddings=64)),
                               ["llama3", "high_freq_factor"]),
    "sliding layers": (dict(layer_types=["full_attention"] * 4 + ["sliding_attention"] * 4), ["layer_types", "sliding_attention"]),
    "linear layers": (dict(layer_types=["linear_attention"] * 8), ["layer_types", "linear_attention"]),
    "sliding window": (dict(use_sliding_window=True, sliding_window=8), ["use_sliding_window"]),
    "biases in the MLP": (dict(mlp_bias=True), ["mlp_bias"]),
    "activation": (dict(hidden_act="gelu"), ["hidden_act", "gelu"]),
    "heads no multiple": (dict(num_key_value_heads=3), ["num_attention_heads", "4", "num_key_value_heads", "3"]),
    "no head_dim that fits": (dict(head_dim=toys.DROP, hidden_size=66), ["head_dim", "66", "4"]),
    "hidden size": (dict(hidden_size=60), ["model.safetensors", "60", "64"]),
    "head_dim": (dict(head_dim=16), ["model.safetensors", "_norm", "16", "32"]),
    "vocabulary": (dict(vocab_size=500), ["embed_tokens", "500", str(toys.N_TOKENS)]),
    "fewer layers": (dict(num_hidden_layers=7), ["layers.7", "model.safetensors"]),
    "more layers": (dict(num_hidden_layers=9), ["layers.8", "missing"]),
    "untied without a head": (dict(tie_word_embeddings=False), ["lm_head.weight", "missing"]),
    "a bias that is not there": (dict(attention_bias=True), ["bias", "missing"]),
    "another norm": (dict(model_type="llama"), ["_norm", "model.safetensors"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_config_refused(broken, case):
    changes, words = REFUSED[case]
    directory = broken("qwen3-tied")
    change(directory / "config.json", **changes)
    with refused(str(directory), *words):
        Target.load(directory)


@pytest.mark.parametrize("key", ["model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                 "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "hidden_act", "rope_theta"])
def test_missing_key(broken, key):
    directory = broken("qwen2")
    change(directory / "config.json", **{key: toys.DROP})
    with refused("config.json", f"'{key}'", "missing"):
        Target.load(directory)


@pytest.mark.parametrize("key, value", [
    ("hidden_size", "64"), ("hidden_size", 0), ("num_hidden_layers", -1), ("num_hidden_layers", 2.5), ("num_key_value_heads", 0), ("vocab_size", [290]),
    ("rms_norm_eps", "small"), ("head_dim", 15), ("head_dim", -16), ("rope_theta", 0), ("rope_theta", [10000.0]), ("rope_scaling", "yarn"),
    ("layer_types", "full_attention"), ("layer_types", 3), ("max_position_embeddings", "long"), ("model_type", ["qwen3"]), ("tie_word_embeddings", "false"),
    ("eos_token_id", "x")])
def test_nonsense_values(broken, key, value):
    """A value of the wrong kind is refused like a missing one: no other exception, and no model that computes something else."""
    directory = broken("qwen3-tied")
    (directory / "generation_config.json").unlink()
    change(directory / "config.json", **{key: value})
    with refused("config.json", key):
        Target.load(directory)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "null", "\ufeff{}"])
def test_config_that_is_no_json_object(broken, content):
    directory = broken("qwen3-tied")
    (directory / "config.json").write_text(content)
    with refused("config.json"):
        Target.load(directory)
    (directory / "config.json").write_bytes(b"\xff\xfe\x00")
    with refused("config.json"):
        Target.load(directory)


def test_missing_files(broken, tmp_path):
    directory = broken("qwen3-tied")
    (directory / "model.safetensors").unlink()
    with refused("model.safetensors", "no such file"):
        Target.load(directory)
    (directory / "config.json").unlink()
    with refused("config.json", "no such file"):
        Target.load(directory)
    with refused("nowhere", "no such directory"):
        Target.load(tmp_path / "nowhere" / "at" / "all")
    with refused("config.json"):
        Target.load(tmp_path)


def test_missing_shard(broken):
    directory = broken("qwen3-untied", shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with refused("model-00002-of-00002.safetensors", "no such file"):
        Target.load(directory)


def test_index_and_shards_disagree(broken):
    directory = broken("qwen3-untied", shards=2)
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name = "model.layers.3.mlp.up_proj.weight"
    other = {"model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors", "model-00002-of-00002.safetensors": "model-00001-of-00002.safetensors"}
    change(index, weight_map=weight_map | {name: other[weight_map[name]]})  # the tensor is not in the file that the index names
    with refused("model-0000[12]-of-00002.safetensors", name):         # whichever shard is read first
        Target.load(directory)
    change(index, weight_map={key: file for key, file in weight_map.items() if key != name})
    with refused(name.removeprefix("model.")):
        Target.load(directory)
    change(index, weight_map=weight_map | {"model.layers.99.mlp.up_proj.weight": weight_map[name]})
    with refused("layers.99"):
        Target.load(directory)
    change(index, weight_map=toys.DROP)
    with refused("index.json", "weight_map"):
        Target.load(directory)
    change(index, weight_map={name: 7})
    with refused("index.json|model"):
        Target.load(directory)


def test_a_tensor_that_only_a_shard_knows(broken):
    directory = broken("qwen3-untied", shards=2)
    shard = directory / "model-00001-of-00002.safetensors"
    save_file(load_file(shard) | {"model.layers.0.self_attn.sinks": torch.zeros(4)}, shard)
    with refused("model-00001-of-00002.safetensors", "sinks"):
        Target.load(directory)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.3.self_attn.q_proj.bias", "model.layers.7.mlp.down_proj.weight"])
def test_tensor_missing_leftover_or_of_wrong_shape(broken, name):
    directory = broken("qwen2")
    file = directory / "model.safetensors"
    weights = load_file(file)
    ours = name.removeprefix("model.")

    save_file({key: tensor for key, tensor in weights.items() if key != name}, file)
    with refused(str(directory), ours, "missing"):
        Target.load(directory)

    leftover = name.replace("weight", "scale").replace("bias", "zero_point")
    save_file(weights | {leftover: torch.zeros(3)}, file)
    with refused(str(file), leftover):
        Target.load(directory)

    shape = weights[name].shape
    for wrong in (torch.zeros(shape[0] + 1, *shape[1:]), torch.zeros(1), torch.zeros(*shape, 1)):
        save_file(weights | {name: wrong}, file)
        with refused(str(file), name, *map(str, wrong.shape), *map(str, shape)):
            Target.load(directory)

    save_file(weights | {name: torch.zeros(shape, dtype=torch.int8)}, file)
    with refused(str(file), name, "int8"):
        Target.load(directory)


@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, -1])
def test_truncated_safetensors(broken, keep):
    directory = broken("qwen3-tied")
    file = directory / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:int(keep * len(content)) if isinstance(keep, float) else keep])
    with refused(str(file)):
        Target.load(directory)


def test_safetensors_that_is_something_else(broken):
    directory = broken("qwen3-tied")
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with refused("model.safetensors"):
        Target.load(directory)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8])
def test_other_dtypes_are_refused(checkpoint, dtype):
    with refused(str(dtype).removeprefix("torch."), "float32"):
        Target.load(checkpoint("qwen3-tied"), dtype=dtype)


def test_a_real_config(checkpoint):
    """Qwen3-4B and Llama-3.1-8B as released: the numbers that the layers are built from."""
    qwen = Config.from_dict(toys.KINDS["qwen3-tied"] | dict(hidden_size=2560, num_attention_heads=32, num_key_value_heads=8, head_dim=128))
    assert (qwen.group, qwen.head_dim, qwen.qk_norm, qwen.qkv_bias) == (4, 128, True, False)
    llama = Config.from_dict(toys.KINDS["llama"] | dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, rope_theta=500000.0, rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)))
    assert (llama.head_dim, llama.qk_norm, llama.qkv_bias, llama.o_bias) == (128, False, False, False)
    inv_freq, scale = inverse_frequencies(llama.rope, llama.head_dim)
    assert scale == 1.0 and inv_freq[0] == 1 and inv_freq[-1].item() == pytest.approx(500000 ** (-126 / 128) / 8)
