"""What target and drafter share: configuration, RMSNorm, rotary positions, attention, MLP, decoder layer, K/V cache.

One decoder layer serves Qwen3, Qwen2.5 and Llama-3; flags read from the checkpoint's config.json say which biases and norms it has.
Checked against transformers in tests/test_target.py: logits, every tapped layer, greedy tokens.

Shapes are written out as (batch, T, H) with
    T  rows fed in this forward        S  keys visible to them, cached ones included
    H  hidden_size                     D  head_dim
    V  vocab_size                      B  the drafter's block size
    heads, kv_heads: query heads, and the fewer K/V heads that groups of `group = heads / kv_heads` query heads share.
"""
import functools
import math
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from checkpoint import InputError


# ---------------------------------------------------------------------------------------------------------------------
# Configuration: everything a checkpoint states is read from it, nothing is guessed.

@dataclass(frozen=True)
class Config:
    """The fields of a config.json that decide the computation."""
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: dict = field(hash=False)        # rope_theta, rope_type and that type's own numbers
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool

    @property
    def group(self):
        return self.num_attention_heads // self.num_key_value_heads

    @classmethod
    def from_dict(cls, raw, file="config.json"):
        """Read one of the three families. InputError names `file`, the key and the values when something is missing or not supported."""
        def count(key):
            value = required(raw, key, file)
            if type(value) is not int or not 1 <= value < 2**31:
                raise InputError(f"{file}: {key} is {value!r}, but a whole number from 1 up is needed")
            return value

        def flag(key):
            if raw.get(key, False) not in (True, False, None):
                raise InputError(f"{file}: {key} is {raw[key]!r}, but true or false is needed")
            return bool(raw.get(key))

        def only(key, supported, stated):
            if stated != supported:
                raise InputError(f"{file}: {key} is {raw[key]!r}, but only {supported!r} is supported")

        kind = required(raw, "model_type", file)
        if kind not in ("qwen3", "qwen2", "llama"):
            raise InputError(f"{file}: model_type is {kind!r}, but only qwen3, qwen2 and llama are supported")
        only("hidden_act", "silu", required(raw, "hidden_act", file))
        only("mlp_bias", False, flag("mlp_bias"))
        only("use_sliding_window", False, flag("use_sliding_window"))
        layers = count("num_hidden_layers")
        if raw.get("layer_types") is not None:
            only("layer_types", ["full_attention"] * layers, raw["layer_types"])
        hidden, heads, kv_heads = count("hidden_size"), count("num_attention_heads"), count("num_key_value_heads")
        if heads % kv_heads:
            raise InputError(f"{file}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
        if raw.get("head_dim") is None and hidden % heads:
            raise InputError(f"{file}: there is no head_dim, and hidden_size {hidden} is no multiple of num_attention_heads {heads}")
        bias = flag("attention_bias")
        return cls(
            model_type=kind, vocab_size=count("vocab_size"), hidden_size=hidden, intermediate_size=count("intermediate_size"),
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            head_dim=hidden // heads if raw.get("head_dim") is None else count("head_dim"),
            rms_norm_eps=positive(raw, "rms_norm_eps", file), max_position_embeddings=count("max_position_embeddings"),
            rope=read_rope(raw, file), tie_word_embeddings=flag("tie_word_embeddings"),
            qkv_bias=bias or kind == "qwen2", o_bias=bias and kind != "qwen2", qk_norm=kind == "qwen3")


def required(raw, key, file):
    if raw.get(key) is None:
        raise InputError(f"{file}: the key '{key}' is missing")
    return raw[key]


def positive(raw, key, file):
    value = required(raw, key, file)
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise InputError(f"{file}: {key} is {value!r}, but a number above 0 is needed")
    return value


def read_rope(raw, file):
    """rope_theta and the scaling, from either spelling: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(key) or {}
    if not isinstance(rope, dict):
        raise InputError(f"{file}: {key} is {rope!r}, but a JSON object is needed")
    rope = {"rope_theta": raw.get("rope_theta"), **rope}
    positive(rope, "rope_theta", file)
    kind = rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    if kind == "yarn":
        rope.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    wanted = {"default": (), "yarn": ("factor", "original_max_position_embeddings"),
              "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
    if not isinstance(kind, str) or kind not in wanted:
        raise InputError(f"{file}: rope_type is {kind!r}, but only {', '.join(wanted)} are supported")
    for key in wanted[kind]:
        positive(rope, key, file)
    return rope


# ---------------------------------------------------------------------------------------------------------------------
# Layers

class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.size, self.eps, self.floor = size, eps, torch.tensor(eps, device="cpu")

    def forward(self, x):
        if x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_grad_enabled():
            # torch has no fused kernel for CPUs, and its own pieces cost a small model a fifth of a step: three do, in place of six
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x * torch.addcmul(self.floor, length, length, value=1 / self.size).rsqrt_() * self.weight
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)      # the cast: autocast feeds bf16 beside fp32 weights


def inverse_frequencies(rope, head_dim):
    """-> inv_freq (D / 2) fp32 and the factor on cos and sin, for rope types default, llama3 and yarn (arXiv 2309.00071)."""
    theta = float(rope["rope_theta"])
    inv_freq = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope["rope_type"] == "default":
        return inv_freq, 1.0
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    if rope["rope_type"] == "llama3":      # long waves are slowed by `factor`, short ones kept, those between blended
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = original * inv_freq / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return inv_freq * (keep + (1 - keep) / factor), 1.0

    def dimension(turns):                  # yarn: the (fractional) dimension that makes `turns` turns in the original length
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    slow = ((torch.arange(head_dim // 2) - first) / max(last - first, 0.001)).clamp(0, 1)
    scale = rope.get("attention_factor") or (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    return inv_freq * (1 - slow + slow / factor), scale


class Rotary:
    """Rotary positions. Frequencies and angles stay in fp32 whatever the model's dtype: bf16 angles are wrong beyond a few hundred."""

    def __init__(self, config):
        with torch.device("cpu"):          # also while the model itself is built on the meta device
            self.inv_freq, self.scale = inverse_frequencies(config.rope, config.head_dim)

    def __call__(self, positions, dtype):
        """positions (T) or (batch, T) -> cos, sin, each (T, D) or (batch, 1, T, D)."""
        self.inv_freq = self.inv_freq.to(positions.device)       # moves once
        angles = positions[..., None].float() * self.inv_freq
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).to(dtype)
        cos, sin = table if positions.dim() == 1 else table.unsqueeze(2)
        return cos, sin


def rotate(x, rotary):
    """Turn x (batch, heads, T, D) by its positions. Rolling by D / 2 swaps the halves; the sign of the swapped half lives in the sine."""
    cos, sin = rotary
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


@functools.cache
def flex():
    """FlexAttention, compiled: uncompiled it would fill in all scores. A graph break or too many shapes is an error, not a silent slow path."""
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def attend(q, k, v, mask=None, causal=False):
    """Softmax attention of q (batch, heads, T, D) over k, v (batch, kv_heads, S, D) -> (batch, heads, T, D).

    Without a mask every row sees every key: one new token, or a drafter's block. `causal` is the square case T = S alone, since with a cache SDPA's
    causal flag would line its triangle up with the first key. A `mask` of group * T rows is KVCache.bias; any other is broadcast over the heads. A
    BlockMask, of training on CUDA, goes to FlexAttention, which has no backward elsewhere.
    """
    if isinstance(mask, BlockMask):
        return flex()(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    batch, heads, T, D = q.shape
    kv_heads = k.shape[1]
    if causal or (mask is not None and mask.shape[-2] == T > 1):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=heads != kv_heads)
    # The query heads that share a K/V head become rows of one matrix, so that each cached key is read once and never repeated.
    rows = q.reshape(batch, kv_heads, heads // kv_heads * T, D)
    return F.scaled_dot_product_attention(rows, k, v, mask).reshape(batch, heads, T, D)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        H, D = config.hidden_size, config.head_dim
        self.D = D
        self.q_proj = nn.Linear(H, config.num_attention_heads * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(H, config.num_key_value_heads * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(H, config.num_key_value_heads * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_attention_heads * D, H, bias=config.o_bias)
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def heads(self, x):
        """(batch, T, heads * D) -> (batch, T, heads, D)"""
        return x.unflatten(-1, (-1, self.D))

    def keys_values(self, x, rotary):
        """(batch, T, H) -> k, v (batch, kv_heads, T, D), the keys normalised and turned."""
        k = rotate(self.k_norm(self.heads(self.k_proj(x))).transpose(1, 2), rotary)
        return k, self.heads(self.v_proj(x)).transpose(1, 2)

    def forward(self, x, rotary, past, mask, causal):
        """x (batch, T, H) -> (batch, T, H). `past(k, v)` takes the rows' own keys and values and gives back all that they may see: KVCache.at(layer)
        puts them behind those before; target.keep, without a cache, changes nothing; draft.behind, in training, puts the context's in front."""
        q = rotate(self.q_norm(self.heads(self.q_proj(x))).transpose(1, 2), rotary)
        k, v = past(*self.keys_values(x, rotary))
        return self.o_proj(attend(q, k, v, mask, causal).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        H, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(H, inner, bias=False)
        self.up_proj = nn.Linear(H, inner, bias=False)
        self.down_proj = nn.Linear(inner, H, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, rotary, past, mask=None, causal=False):
        x = x + self.self_attn(self.input_layernorm(x), rotary, past, mask, causal)
        return x + self.mlp(self.post_attention_layernorm(x))


# ---------------------------------------------------------------------------------------------------------------------
# K/V cache

class KVCache:
    """Keys and values of all layers, allocated once: (layers, batch, kv_heads, max_len, D) each, and one `length` for all.

    `put` writes behind `length`, `advance` keeps what was written; setting `length` back rejects tokens at no cost. Nothing is ever copied.
    """

    def __init__(self, config, max_len, batch=1, device="cpu", dtype=torch.float32):
        shape = (config.num_hidden_layers, batch, config.num_key_value_heads, max_len, config.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.layers = list(zip(self.k, self.v))
        self.max_len, self.group = max_len, config.group
        self.length = 0
        self.masks = {}

    def put(self, layer, k, v):
        """Write k, v (batch, kv_heads, T, D) at `length`; -> views of all keys and values up to their end (batch, kv_heads, S, D)."""
        T, end = k.shape[2], self.length + k.shape[2]
        if end > self.max_len:
            raise ValueError(f"the K/V cache has room for {self.max_len} tokens, {end} were put in")
        keys, values = self.layers[layer]
        keys.narrow(2, self.length, T).copy_(k)
        values.narrow(2, self.length, T).copy_(v)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def at(self, layer):
        """The `past` of one decoder layer."""
        return lambda k, v: self.put(layer, k, v)

    def advance(self, T):
        self.length += T

    def bias(self, T):
        """(group * T, length + T), added to the scores: row t of each query head sees keys 0 .. length + t.

        Only the last T columns hold anything: a triangle that never changes. So one buffer per T is kept and the triangle moved along in it. Its
        rows start at multiples of 16 elements, which CUDA's kernels want.
        """
        if T not in self.masks:
            triangle = torch.full((T, T), -torch.inf, dtype=self.k.dtype, device=self.k.device).triu(1).repeat(self.group, 1)
            self.masks[T] = torch.zeros(self.group * T, -(-(self.max_len + T) // 16) * 16, dtype=self.k.dtype, device=self.k.device), triangle
        buffer, triangle = self.masks[T]
        start, end = self.length, self.length + T
        buffer[:, :start] = 0
        buffer[:, start:end] = triangle
        return buffer[:, :end]
