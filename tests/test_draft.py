"""draft.py: the checkpoint's format (the released one, read strictly), what the drafter may see, and training's forward against inference's."""
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import toys
from checkpoint import InputError
from draft import DraftConfig, Drafter, default_target_layer_ids

CONFIGS = Path(__file__).resolve().parents[2] / "shared" / "configs"
needs_configs = pytest.mark.skipif(not CONFIGS.is_dir(), reason="no ../shared/configs: the released drafter's config.json and tensor names are there")
B = 5


@pytest.fixture(scope="module")
def target(target_of):
    return target_of("qwen3-tied")


@pytest.fixture(scope="module")
def drafter_dir(tmp_path_factory, checkpoint):
    return toys.write_drafter(tmp_path_factory.mktemp("drafter"), checkpoint("qwen3-tied"), block_size=B)


@pytest.fixture(scope="module")
def drafter(drafter_dir):
    return Drafter.load(drafter_dir)


@pytest.fixture
def broken(drafter_dir, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(drafter_dir, tmp_path / "broken")


def change(directory, place=None, **changes):
    """Change config.json, or the object under its key `place`."""
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    holder = raw[place] if place else raw
    holder.update(changes)
    for key in [key for key, value in holder.items() if value is toys.DROP]:
        del holder[key]
    path.write_text(json.dumps(raw))


def refused(*words):
    """One line that holds every word: the file, the key, the values."""
    return pytest.raises(InputError, match="^" + "".join(rf"(?=.*{word})" for word in words) + r".*\Z")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def features_of(drafter, T, seed=0):
    return random(1, T, drafter.fc.in_features, seed=seed)


# ---------------------------------------------------------------------------------------------------------------------
# config.json

@pytest.mark.parametrize("place, key", [(None, "dflash_config"), (None, "block_size"), (None, "num_target_layers"), ("dflash_config", "mask_token_id"),
                                        ("dflash_config", "target_layer_ids")])
@pytest.mark.parametrize("value", [toys.DROP, None, "7", 2.5, -1, True, [True]])
def test_nothing_is_guessed(broken, place, key, value):
    change(broken, place, **{key: value})
    with refused(str(broken / "config.json"), key):
        Drafter.load(broken)


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps", "hidden_size", "vocab_size", "num_hidden_layers", "model_type"])
def test_missing_layer_key(broken, key):
    change(broken, **{key: toys.DROP})
    with refused(str(broken / "config.json"), f"'{key}'", "missing"):
        Drafter.load(broken)


def test_block_size_below_one(broken):
    change(broken, block_size=0)
    with refused("config.json", "block_size", "0"):
        Drafter.load(broken)


@pytest.mark.parametrize("ids", [[], [1, 3, 2, 4, 5], [1, 2, 3, 4, 4], [1, 2, 3, 4, 8], [-1, 2, 3, 4, 5], [1, 2, 3, 4, 5.0], "12345", {"1": 2}])
def test_layer_ids_are_ascending_layers_of_the_target(broken, ids):
    change(broken, "dflash_config", target_layer_ids=ids)
    with refused("config.json", "target_layer_ids", "0 and 7"):
        Drafter.load(broken)


def test_another_slot_convention_is_refused(broken):
    change(broken, "dflash_config", layout="fill-in")
    Drafter.load(broken)
    change(broken, "dflash_config", layout="anchor-first")
    with refused("config.json", "layout", "anchor-first", "fill-in"):
        Drafter.load(broken)


def test_training_length_is_kept(broken, tmp_path):
    assert Drafter.load(broken).config.training_length is None          # released drafters do not say
    assert "training_length" not in Drafter.load(broken).config.to_dict()["dflash_config"]
    change(broken, "dflash_config", training_length=300)
    Drafter.load(broken).save(tmp_path / "saved")
    assert Drafter.load(tmp_path / "saved").config.training_length == 300
    change(broken, "dflash_config", training_length="long")
    with refused("config.json", "training_length", "long"):
        Drafter.load(broken)


def test_other_layers_are_refused(broken):
    change(broken, layer_types=["full_attention", "sliding_attention"])
    with refused("config.json", "layer_types", "sliding_attention"):
        Drafter.load(broken)
    change(broken, layer_types=["full_attention"] * 2, model_type="llama")
    with refused("config.json", "model_type", "llama", "qwen3"):
        Drafter.load(broken)


def test_default_layer_ids():
    assert default_target_layer_ids(36) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(28) == (1, 7, 13, 19, 25)
    assert default_target_layer_ids(36, 1) == (18,)
    assert default_target_layer_ids(28, 1) == (14,)
    assert default_target_layer_ids(16) == (1, 4, 7, 10, 13)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors

def names_of(layers):
    of_layer = ["input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm", "self_attn.k_norm", "self_attn.k_proj",
                "self_attn.o_proj", "self_attn.q_norm", "self_attn.q_proj", "self_attn.v_proj"]
    return {f"{name}.weight" for name in ["fc", "hidden_norm", "norm"] + [f"layers.{i}.{name}" for i in range(layers) for name in of_layer]}


@needs_configs
@pytest.mark.parametrize("size, config", [("8B", "config.json"), ("4B", "config.SPECFORGE-MIRROR.json")])
def test_the_released_drafters_fit_tensor_by_tensor(size, config):
    raw = json.loads((CONFIGS / f"z-lab_Qwen3-{size}-DFlash-b16.{config}").read_text())
    config = DraftConfig.from_dict(raw)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids, config.num_target_layers) == (16, 151669, (1, 9, 17, 25, 33), 36)
    header, = CONFIGS.glob(f"z-lab_Qwen3-{size}-DFlash-b16.safetensors_header*.json")
    stored = {name: tuple(entry["shape"]) for name, entry in json.loads(header.read_text()).items() if name != "__metadata__"}
    with torch.device("meta"):
        drafter = Drafter(config)
    assert {name: tuple(p.shape) for name, p in drafter.named_parameters()} == stored
    written = config.to_dict()                              # and what we would write says the same
    assert all(written[key] == raw[key] for key in raw if key not in ("dflash_config", "bos_token_id", "eos_token_id", "transformers_version"))
    assert raw["dflash_config"].items() <= written["dflash_config"].items()


def test_save_and_load(drafter, drafter_dir, tmp_path):
    drafter.save(tmp_path / "deep" / "saved")
    saved = tmp_path / "deep" / "saved"
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert (saved / "model.safetensors").stat().st_mode == (saved / "config.json").stat().st_mode     # (safetensors' own save_file lets no one else read it)
    tensors = load_file(saved / "model.safetensors")
    assert tensors.keys() == names_of(layers=2)             # the released names, without a prefix; no embedding, no head
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    again = Drafter.load(saved)
    assert again.config == drafter.config
    for (name, ours), theirs in zip(drafter.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours.bfloat16().float(), theirs), name
    raw, was = (json.loads((directory / "config.json").read_text()) for directory in (saved, drafter_dir))
    assert raw["dflash_config"]["layout"] == "fill-in"      # named in ours
    for key in ("block_size", "num_target_layers", "rope_theta", "rms_norm_eps", "head_dim", "vocab_size", "layer_types"):
        assert raw[key] == was[key]
    again.save(saved)                                       # over itself, which is the checkpoint it came from
    assert torch.equal(load_file(saved / "model.safetensors")["fc.weight"], tensors["fc.weight"])


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from draft import Drafter

source, base, kills = Drafter.load(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
rng, ended = random.Random(0), set()
os.fsync = lambda number: None          # a process that waits for the disk most of its time is seldom killed while it writes

def fill(value):
    for p in source.parameters():
        p.fill_(value)
    return source

for kill in range(kills):
    directory = base / str(kill)
    fill(0).save(directory)
    child = os.fork()
    if child == 0:
        for value in range(1, 10**6):
            fill(value % 100).save(directory)
    time.sleep(rng.uniform(0, 0.08))
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    values = {p.unique().item() for p in Drafter.load(directory).parameters()}       # one number, or the file is of two drafters
    assert len(values) == 1, (kill, values)
    ended |= values
    fill(7).save(directory)                                                         # what the kill left aside is in nobody's way
    assert Drafter.load(directory).fc.weight.unique().item() == 7
print(len(ended))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_killed_while_saving(drafter_dir, tmp_path):
    """50 kills at random moments: each directory holds a whole drafter, that of the last save which came to its end."""
    done = subprocess.run([sys.executable, "-c", KILLS, str(drafter_dir), str(tmp_path), "50"], cwd=Path(toys.__file__).parents[1], capture_output=True,
                          text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5                             # many saves came to their end before the kill


class Crash(Exception):
    pass


@pytest.mark.parametrize("other_config", [False, True])
def test_a_crash_at_every_moment_of_a_save(other_config, drafter, tmp_path, monkeypatch):
    """Nothing is renamed before all is on the disk; a crash leaves the old drafter or the new one, or, if the configs differ, none that loads."""
    new = Drafter(replace(drafter.config, block_size=B + 1) if other_config else drafter.config).initialise()
    calls, moment = [], None

    def at(name, call):
        def spied(*args):
            calls.append(name)
            if len(calls) == moment:
                raise Crash
            return call(*args)
        return spied
    monkeypatch.setattr(os, "fsync", at("sync", os.fsync))
    monkeypatch.setattr(os, "replace", at("rename", os.replace))
    monkeypatch.setattr(Path, "unlink", at("remove", Path.unlink))
    drafter.save(tmp_path / "whole")
    new.save(tmp_path / "whole")
    assert calls == ["sync", "sync", "rename", "rename", "sync", "sync"] + ["remove"] * other_config + ["rename", "rename"]
    states = []
    for moment in range(5, len(calls) + 1):
        calls.clear()
        drafter.save(tmp_path / str(moment))
        with pytest.raises(Crash):
            new.save(tmp_path / str(moment))
        try:
            loaded = Drafter.load(tmp_path / str(moment))
            whose = [one for one in (drafter, new) if torch.equal(one.fc.weight.bfloat16().float(), loaded.fc.weight)]
            assert len(whose) == 1 and loaded.config == whose[0].config
            states.append("old" if whose[0] is drafter else "new")
        except InputError as error:
            assert "config.json: no such file" in str(error)
            states.append("none")
    assert states == (["old", "old", "old", "none", "none"] if other_config else ["old", "old", "old", "new"])


def test_save_of_scaled_rope(broken, tmp_path):
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    change(broken, rope_scaling=yarn)
    drafter = Drafter.load(broken)
    drafter.save(tmp_path / "saved")
    again = Drafter.load(tmp_path / "saved")
    assert again.config == drafter.config and again.config.layer.rope == yarn | {"rope_theta": 1000000}
    assert torch.equal(again.rotary.inv_freq, drafter.rotary.inv_freq) and again.rotary.scale == drafter.rotary.scale > 1


def test_initialise(drafter):
    fresh = Drafter(drafter.config).initialise()
    for name, p in fresh.named_parameters():
        if "norm" in name:
            assert (p == 1).all()
        else:
            assert p.std().item() == pytest.approx(0.02, rel=0.1) and abs(p.mean().item()) < 0.002


def test_tensors_that_do_not_fit(broken):
    file = broken / "model.safetensors"
    weights = load_file(file)
    change(broken, "dflash_config", target_layer_ids=[1, 2, 3, 4])      # four taps, but fc was made for five
    with refused(str(file), "fc.weight", "320", "256"):
        Drafter.load(broken)
    change(broken, "dflash_config", target_layer_ids=[1, 2, 3, 4, 5])
    save_file({name: t for name, t in weights.items() if name != "hidden_norm.weight"}, file)
    with refused(str(broken), "missing", "hidden_norm.weight"):
        Drafter.load(broken)
    save_file(weights | {"lm_head.weight": torch.zeros(2)}, file)
    with refused(str(file), "lm_head.weight"):
        Drafter.load(broken)
    save_file(weights, file)
    file.write_bytes(file.read_bytes()[:-100])
    with refused(str(file), "safetensors"):
        Drafter.load(broken)


# ---------------------------------------------------------------------------------------------------------------------
# Does it fit the target?

MISFITS = {
    "width": ("qwen3-untied", {}, ["hidden_size", "64", "48"]),
    "layers": ("qwen3-tied", dict(num_hidden_layers=9), ["num_target_layers", "8", "9"]),
    "vocabulary": ("qwen3-padded", {}, ["vocab_size", str(toys.N_TOKENS), str(toys.N_TOKENS + 20)]),
}


@pytest.mark.parametrize("case", MISFITS)
def test_drafter_for_another_target(drafter, drafter_dir, target_of, case):
    kind, overrides, words = MISFITS[case]
    other = target_of(kind, **overrides)
    with refused(str(drafter_dir), other.name, *words):
        drafter.check_fits(other, other.stop_ids)


def test_mask_id(broken, drafter, target):
    drafter.check_fits(target, target.stop_ids)
    for id, words in ((toys.N_TOKENS, ["mask_token_id", str(toys.N_TOKENS), "outside"]),
                      (toys.SPECIAL_IDS["<|im_end|>"], ["mask_token_id", str(toys.SPECIAL_IDS["<|im_end|>"]), "stop ids"])):
        change(broken, "dflash_config", mask_token_id=id)
        with refused(str(broken), target.name, *words):
            Drafter.load(broken).check_fits(target, target.stop_ids)
    change(broken, "dflash_config", mask_token_id=toys.N_TOKENS - 1)    # the last row is still one
    Drafter.load(broken).check_fits(target, target.stop_ids)


# ---------------------------------------------------------------------------------------------------------------------
# extend and propose

def test_extend_in_pieces(drafter):
    features = features_of(drafter, 12)
    whole, pieces = drafter.new_cache(20), drafter.new_cache(20)
    drafter.extend(whole, features)
    for start, end in ((0, 4), (4, 5), (5, 11), (11, 12)):
        drafter.extend(pieces, features[:, start:end])
        assert pieces.length == end
    assert whole.length == 12
    torch.testing.assert_close(pieces.k, whole.k, atol=1e-5, rtol=0)
    torch.testing.assert_close(pieces.v, whole.v, atol=1e-5, rtol=0)
    block = random(1, B, 64, seed=1)
    torch.testing.assert_close(drafter.propose(pieces, block), drafter.propose(whole, block), atol=1e-4, rtol=0)


def test_propose_leaves_no_trace(drafter):
    features, block = features_of(drafter, 12), random(1, B, 64, seed=1)
    cache, untouched = drafter.new_cache(20), drafter.new_cache(20)
    drafter.extend(cache, features[:, :7])
    keys, values = cache.k[..., :7, :].clone(), cache.v[..., :7, :].clone()
    first = drafter.propose(cache, block)
    drafter.propose(cache, random(1, B, 64, seed=2))         # another one in between
    assert torch.equal(drafter.propose(cache, block), first)
    assert cache.length == 7 and torch.equal(cache.k[..., :7, :], keys) and torch.equal(cache.v[..., :7, :], values)
    drafter.extend(cache, features[:, 7:9])                  # over what the blocks left behind the context
    drafter.extend(untouched, features[:, :9])
    torch.testing.assert_close(drafter.propose(cache, block), drafter.propose(untouched, block), atol=1e-4, rtol=0)


def test_every_slot_sees_the_whole_block_and_all_context(drafter):
    features, block = features_of(drafter, 6), random(1, B, 64, seed=1)

    def hidden(features, block):
        cache = drafter.new_cache(6 + B)
        drafter.extend(cache, features)
        return drafter.propose(cache, block)
    before = hidden(features, block)
    for slot in range(B):
        other = block.clone()
        other[:, slot] += 1
        assert ((hidden(features, other) - before).abs().amax(-1) > 1e-4).all()
    for place in range(6):
        other = features.clone()
        other[:, place] += 1
        assert ((hidden(other, block) - before).abs().amax(-1) > 1e-4).all()


def test_a_batch_equals_single_rows(drafter):
    features, block = random(3, 6, drafter.fc.in_features), random(3, B, 64, seed=1)
    together = drafter.new_cache(6 + B, batch=3)
    drafter.extend(together, features)
    hidden = drafter.propose(together, block)
    for row in range(3):
        cache = drafter.new_cache(6 + B)
        drafter.extend(cache, features[row:row + 1])
        torch.testing.assert_close(drafter.propose(cache, block[row:row + 1])[0], hidden[row], atol=1e-4, rtol=0)


def test_context_is_the_same_for_every_layer_and_skips_their_norm(drafter):
    """Layer by layer: K = k_norm(W_k context), turned by its own position; V = W_v context. No input_layernorm, no residual."""
    features = features_of(drafter, 6)
    cache = drafter.new_cache(6)
    drafter.extend(cache, features)
    context = torch.nn.functional.linear(features, drafter.fc.weight)
    context = context / (context.square().mean(-1, keepdim=True) + 1e-6).sqrt() * drafter.hidden_norm.weight
    for i, layer in enumerate(drafter.layers):
        values = (context @ layer.self_attn.v_proj.weight.T).view(6, 2, 32).transpose(0, 1)
        torch.testing.assert_close(cache.v[i, 0], values, atol=1e-4, rtol=0)
        keys = layer.self_attn.k_norm((context @ layer.self_attn.k_proj.weight.T).view(6, 2, 32)).transpose(0, 1)
        torch.testing.assert_close(cache.k[i, 0, :, 0], keys[:, 0], atol=1e-4, rtol=0)      # position 0: not turned
        torch.testing.assert_close(cache.k[i, 0].norm(dim=-1), keys.norm(dim=-1), atol=1e-4, rtol=0)
        assert (cache.k[i, 0, :, 1:] - keys[:, 1:]).abs().amax() > 0.1


def test_features_of_100000_survive_bfloat16(drafter_dir):
    def hidden(dtype):
        drafter = Drafter.load(drafter_dir, dtype=dtype)
        cache = drafter.new_cache(8 + B)
        drafter.extend(cache, (1e5 * features_of(drafter, 8)).to(dtype))
        return drafter.propose(cache, random(1, B, 64, seed=1).to(dtype)).float()
    exact, rough = hidden(torch.float32), hidden(torch.bfloat16)
    assert rough.isfinite().all()
    assert (rough - exact).norm() < 0.1 * exact.norm()


def test_float16_overflows(drafter_dir):
    """Why fp16 is refused: the control of the test above."""
    drafter = Drafter.load(drafter_dir).half()
    assert not drafter.context((1e5 * features_of(drafter, 8)).half()).isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# The training forward: all blocks at once

def rows_of(anchors, B):
    """positions (1, N * B)"""
    return torch.tensor([[a + k for a in anchors for k in range(B)]])


def block_mask(anchors, B, S):
    """Two nested loops: row j * B + k sees context key p iff p < a_j, and block keys iff of block j."""
    Q = len(anchors) * B
    mask = torch.zeros(1, 1, Q, S + Q, dtype=torch.bool)
    for row in range(Q):
        for key in range(S + Q):
            mask[0, 0, row, key] = key < anchors[row // B] if key < S else (key - S) // B == row // B
    return mask


@pytest.mark.parametrize("B", [1, 2, 5, 16])
def test_training_forward_equals_inference(drafter, target, B):
    """Every anchor of a sequence, neighbours' blocks overlapping, in one forward: as extend and propose do it block by block."""
    ids = torch.randint(toys.N_TOKENS, (1, 14), generator=torch.Generator().manual_seed(0))
    S, mask_id = ids.shape[1], drafter.config.mask_token_id
    _, features = target(ids, taps=drafter.config.target_layer_ids)
    anchors = list(range(S))
    blocks = target.embed(torch.tensor([[x for a in anchors for x in [ids[0, a]] + [mask_id] * (B - 1)]]))
    together = drafter(blocks, features, rows_of(anchors, B), block_mask(anchors, B, S))
    cache = drafter.new_cache(S + B)
    for j, a in enumerate(anchors):
        assert cache.length == a
        hidden = drafter.propose(cache, target.embed(torch.tensor([[ids[0, a]] + [mask_id] * (B - 1)])))
        assert (together[:, j * B:(j + 1) * B] - hidden).abs().max() < 1e-4, f"anchor {a}"
        drafter.extend(cache, features[:, a:a + 1])


def test_training_forward_sees_features_before_the_anchor_only(drafter):
    S, anchors = 12, [3, 5, 6, 9]                            # overlapping
    features, blocks = features_of(drafter, S), random(1, len(anchors) * B, 64, seed=1)

    def forward(features):
        return drafter(blocks, features, rows_of(anchors, B), block_mask(anchors, B, S)).unflatten(1, (len(anchors), B))
    before = forward(features)
    for j, a in enumerate(anchors):
        other = features.clone()
        other[:, a:] += 10 * random(1, S - a, features.shape[-1], seed=2)
        assert torch.equal(forward(other)[:, j], before[:, j])
        other = features.clone()
        other[:, a - 1] += 1
        assert ((forward(other) - before)[:, j].abs().amax(-1) > 1e-4).all()


def test_training_forward_in_a_batch(drafter):
    """Each row of the batch with its own positions and mask."""
    S, anchors = 9, ([1, 4, 5], [2, 3, 8])
    features, blocks = random(2, S, drafter.fc.in_features), random(2, 3 * B, 64, seed=1)
    together = drafter(blocks, features, torch.cat([rows_of(a, B) for a in anchors]), torch.cat([block_mask(a, B, S) for a in anchors]))
    for row, a in enumerate(anchors):
        single = drafter(blocks[row:row + 1], features[row:row + 1], rows_of(a, B), block_mask(a, B, S))
        torch.testing.assert_close(together[row], single[0], atol=1e-4, rtol=0)


def test_gradients_reach_every_parameter(drafter):
    fresh = Drafter(drafter.config).initialise()
    out = fresh(random(1, 2 * B, 64, seed=1), features_of(fresh, 9), rows_of([4, 6], B), block_mask([4, 6], B, 9))
    (out * random(*out.shape, seed=2)).sum().backward()
    for name, p in fresh.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, name
