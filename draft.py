"""The block-diffusion drafter (DFlash, arXiv 2602.06036, section 3): a few decoder layers that fill a whole block of masks in one forward.

    features   (batch, T, n * H)   residual streams of the target's n tapped layers, one row per token already decided
    context    (batch, T, H)       hidden_norm(fc(features)): computed once, shown to EVERY layer as extra keys and values
    block      (batch, B, H)       embeddings of [anchor, MASK, MASK, ...]; the only rows that have queries, residuals and an MLP

Slots, the one convention of this project: slot 0 is the anchor, the last token decided; slot k stands for the token at position anchor + k. The hidden
state of slot k, k = 1 .. B - 1, goes through the target's LM head and proposes that very token (nothing is shifted). A block of B makes B - 1 drafts.

Context rows have no residual of their own, so their keys and values never change: they live in a KVCache and each is computed once. Embedding and LM head are
the target's; the drafter owns neither. Checkpoints have the layout of the released z-lab drafters, for SGLang and vLLM to serve.
"""
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
from safetensors.torch import save

from checkpoint import InputError, checkpoint_dir, load_weights, read_json
from model import Config, DecoderLayer, KVCache, RMSNorm, Rotary

LAYOUT = "fill-in"      # how our config.json names the slots above; drafters whose slot k predicts the token after it would load, and accept nothing


@dataclass(frozen=True)
class DraftConfig:
    layer: Config                   # the drafter's own layers; Qwen3
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple
    num_target_layers: int
    training_length: int | None = None      # tokens of the longest conversation it learnt from; released drafters do not say

    @classmethod
    def from_dict(cls, raw, file="config.json"):
        """Read a released drafter's config.json. Nothing is guessed: a guessed layer id or mask costs acceptance in silence."""
        layer = Config.from_dict(raw, file)
        if layer.model_type != "qwen3":
            raise InputError(f"{file}: model_type is {layer.model_type!r}, but a drafter is 'qwen3'")
        own = raw.get("dflash_config")
        if not isinstance(own, dict):
            raise InputError(f"{file}: the key 'dflash_config' is missing; is this a DFlash drafter?")

        def number(place, key, least):
            value = place.get(key)
            if type(value) is not int or not least <= value < 2**31:
                raise InputError(f"{file}: {key} is {value!r}, but a whole number from {least} up is needed")
            return value

        ids, L = own.get("target_layer_ids"), number(raw, "num_target_layers", 1)
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < L for i in ids) or sorted(set(ids)) != ids:
            raise InputError(f"{file}: target_layer_ids is {ids!r}, but ascending layers between 0 and {L - 1} are needed")
        if own.get("layout", LAYOUT) != LAYOUT:
            raise InputError(f"{file}: layout is {own['layout']!r}, but only {LAYOUT!r} is supported")
        length = number(own, "training_length", 1) if "training_length" in own else None
        return cls(layer, number(raw, "block_size", 1), number(own, "mask_token_id", 0), tuple(ids), L, length)

    def to_dict(self):
        """The config.json of the released layout."""
        c, own = self.layer, {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids), "layout": LAYOUT}
        if self.training_length:
            own["training_length"] = self.training_length
        return {
            "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "model_type": "qwen3",
            "block_size": self.block_size, "num_target_layers": self.num_target_layers, "dflash_config": own,
            "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
            "num_hidden_layers": c.num_hidden_layers, "num_attention_heads": c.num_attention_heads,
            "num_key_value_heads": c.num_key_value_heads, "head_dim": c.head_dim, "hidden_act": "silu", "rms_norm_eps": c.rms_norm_eps,
            "max_position_embeddings": c.max_position_embeddings, "rope_theta": c.rope["rope_theta"],
            "rope_scaling": None if c.rope["rope_type"] == "default" else {k: v for k, v in c.rope.items() if k != "rope_theta"},
            "layer_types": ["full_attention"] * c.num_hidden_layers, "max_window_layers": c.num_hidden_layers, "attention_bias": c.qkv_bias,
            "attention_dropout": 0.0, "initializer_range": 0.02, "sliding_window": None, "use_sliding_window": False,
            "tie_word_embeddings": False, "use_cache": True, "dtype": "bfloat16"}


def default_target_layer_ids(num_target_layers, n=5):
    """Evenly spread from layer 1 to three before the end: 36 layers give 1, 9, 17, 25, 33. (The released drafters' rule.)"""
    if n == 1:
        return (num_target_layers // 2,)
    if num_target_layers < n + 3:
        raise InputError(f"a target of {num_target_layers} layers is too shallow for {n} taps of its own; name them")
    return tuple(round(1 + i * (num_target_layers - 4) / (n - 1)) for i in range(n))


class Drafter(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.name = config, "in memory"
        layer, H = config.layer, config.layer.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * H, H, bias=False)
        self.hidden_norm = RMSNorm(H, layer.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(layer) for _ in range(layer.num_hidden_layers))
        self.norm = RMSNorm(H, layer.rms_norm_eps)
        self.rotary = Rotary(layer)

    def initialise(self, std=0.02):
        """Matrices normal(0, std); norms are 1 from the start."""
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0.0, std)
        return self

    # ---- inference: two verbs on a KVCache that holds context keys and values only

    def new_cache(self, max_len, batch=1):
        return KVCache(self.config.layer, max_len, batch, self.fc.weight.device, self.fc.weight.dtype)

    def context(self, features):
        """features (batch, T, n * H) -> (batch, T, H)"""
        return self.hidden_norm(self.fc(features))

    def extend(self, cache, features):
        """Put the context keys and values of T more decided tokens into the cache, at the positions where it ends. features (batch, T, n * H)."""
        context, T = self.context(features), features.shape[1]
        rotary = self.rotary(torch.arange(cache.length, cache.length + T, device=features.device), context.dtype)
        for i, layer in enumerate(self.layers):
            cache.put(i, *layer.self_attn.keys_values(context, rotary))
        cache.advance(T)

    def propose(self, cache, block):
        """block (batch, B, H), embeddings of [anchor, MASK * (B - 1)] at the positions where the cache ends -> hidden (batch, B, H), normed for the LM head.

        No mask: every slot sees all context and the whole block. The block's own keys and values are written behind the context and, since the
        cache's length stays, forgotten.
        """
        start, B = cache.length, block.shape[1]
        rotary = self.rotary(torch.arange(start, start + B, device=block.device), block.dtype)
        for i, layer in enumerate(self.layers):
            block = layer(block, rotary, cache.at(i))
        return self.norm(block)

    # ---- training: all blocks of a sequence at once

    def forward(self, blocks, features, positions, mask):
        """Q = N * B rows of N blocks beside each other -> hidden (batch, Q, H), as `propose` would give them one block at a time.

        blocks (batch, Q, H), positions (batch, Q), features (batch, S, n * H) of the whole sequence, mask (batch, 1, Q, S + Q) bool: which context
        keys, then which block keys, each row sees. The blocks of one sequence may also come as several rows of the batch, all the same number.
        """
        context, groups = self.context(features), len(blocks) // len(features)
        places = self.rotary(torch.arange(features.shape[1], device=features.device), context.dtype)
        rotary = self.rotary(positions, context.dtype)
        for layer in self.layers:
            blocks = layer(blocks, rotary, behind(groups, *layer.self_attn.keys_values(context, places)), mask)
        return self.norm(blocks)

    # ---- files

    @classmethod
    def load(cls, name, device="cpu", dtype=torch.float32):
        """A drafter directory or hub id -> a frozen Drafter. InputError when anything is missing or does not fit."""
        directory = checkpoint_dir(name)
        config = DraftConfig.from_dict(read_json(directory / "config.json"), directory / "config.json")
        with torch.device("meta"):
            drafter = cls(config)
        load_weights(drafter, directory, device, dtype)
        drafter.name = str(name)
        return drafter.eval()

    def save(self, directory):
        """config.json and model.safetensors (bf16), each written aside, synced, then renamed: a kill leaves the drafter that was there, or this one.

        The weights go first, so that a config.json always has its weights. An older one that says something else is taken away before them: in the
        moment between, there is no drafter, which `load` says, but never one whose weights stand under another's config.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        weights = {name: p.detach().to("cpu", torch.bfloat16) for name, p in self.named_parameters()}
        files = {"model.safetensors": save(weights, metadata={"format": "pt"}), "config.json": json.dumps(self.config.to_dict(), indent=1).encode() + b"\n"}
        for name, content in files.items():
            with open(directory / f"{name}.tmp", "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        config = directory / "config.json"
        if config.exists() and config.read_bytes() != files["config.json"]:
            config.unlink()
        for name in files:
            os.replace(directory / f"{name}.tmp", directory / name)

    def check_fits(self, target, stop_ids=()):
        """InputError unless this drafter was made for a model of the target's shape, and its mask is a token that no text holds."""
        mine, theirs, name = self.config, target.config, f"the drafter {self.name} does not fit the target {target.name}"
        pairs = (("hidden_size", mine.layer.hidden_size, theirs.hidden_size), ("vocab_size", mine.layer.vocab_size, theirs.vocab_size),
                 ("num_target_layers", mine.num_target_layers, theirs.num_hidden_layers))
        for key, ours, its in pairs:
            if ours != its:
                raise InputError(f"{name}: {key} is {ours} in the drafter's config.json, the target has {its}")
        if mine.mask_token_id >= theirs.vocab_size:
            raise InputError(f"{name}: mask_token_id {mine.mask_token_id} lies outside the embedding's {theirs.vocab_size} rows")
        if mine.mask_token_id in stop_ids:
            raise InputError(f"{name}: mask_token_id {mine.mask_token_id} is one of the stop ids {sorted(stop_ids)}")


def behind(groups, context_k, context_v):
    """The `past` of a training layer: the rows' own keys and values behind those of the context, which `groups` rows of the batch share."""
    context_k, context_v = (x[:, None].expand(-1, groups, -1, -1, -1).flatten(0, 1) for x in (context_k, context_v))      # no copy for one group
    return lambda k, v: (torch.cat((context_k, k), 2), torch.cat((context_v, v), 2))
