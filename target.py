"""The frozen target: a Qwen3, Qwen2.5 or Llama-3 language model whose hidden states can be tapped.

A tap of layer i (0-based) is the residual stream at that layer's OUTPUT, before any final norm: transformers' hidden_states[i + 1], but for the last
layer, where transformers shows the normed stream. Checked against transformers in tests/test_target.py.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

from checkpoint import InputError, checkpoint_dir, load_weights, read_json
from model import Config, DecoderLayer, KVCache, RMSNorm, Rotary


class Target(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = Rotary(config)
        self.name, self.stop_ids = "in memory", frozenset()        # set by load: what the checkpoint says ends a response

    @classmethod
    def load(cls, name, device="cpu", dtype=torch.float32):
        """A checkpoint directory or hub id -> a frozen Target on `device`. InputError when anything is missing or does not fit."""
        directory = checkpoint_dir(name)
        raw = read_json(directory / "config.json")
        config = Config.from_dict(raw, directory / "config.json")
        with torch.device("meta"):
            target = cls(config)

        def rename(stored):
            if stored.endswith("rotary_emb.inv_freq") or (stored == "lm_head.weight" and config.tie_word_embeddings):
                return None                # old checkpoints store what config.json states already
            return stored.removeprefix("model.")

        load_weights(target, directory, device, dtype, rename)
        target.name, target.stop_ids = str(name), read_stop_ids(directory, raw)
        return target.eval()

    @property
    def device(self):
        return self.embed_tokens.weight.device

    @property
    def dtype(self):
        return self.embed_tokens.weight.dtype

    @property
    def head_weight(self):
        """(V, H): the LM head's matrix, which tied models share with the embedding."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def new_cache(self, max_len, batch=1):
        return KVCache(self.config, max_len, batch, self.device, self.dtype)

    def embed(self, ids):
        """ids (batch, T) -> (batch, T, H)"""
        return self.embed_tokens(ids)

    def head(self, hidden, vocab=None):
        """hidden (..., H), already normed -> logits (..., vocab): of the first `vocab` ids, since many models have more rows than their tokenizer has tokens."""
        return F.linear(hidden, self.head_weight[:vocab])

    def forward(self, ids, cache=None, taps=(), last_only=False, taps_only=False, positions=None, key_mask=None, vocab=None):
        """One forward over new tokens -> logits, features.

        ids (batch, T); cache: a KVCache whose `length` tokens come before them (the new ones are added), or None.
        taps: n layer ids, in ascending order -> features (batch, T, n * H), their residual streams side by side; no taps: None.
        last_only: logits of the last row alone, (batch, 1, V) in place of (batch, T, V). taps_only, without a cache, as training has it: None in their
        place, and no layer runs behind the last tap.
        positions (batch, T) and key_mask (batch, S) bool, S = cache.length + T: for batches with padding; False keys are seen by no row but themselves.
        """
        T, start = ids.shape[1], cache.length if cache else 0
        if positions is None:
            positions = torch.arange(start, start + T, device=ids.device)
        rotary = self.rotary(positions, self.dtype)
        causal = key_mask is None and start == 0 and T > 1
        mask = None
        if key_mask is not None:
            mask = padding_mask(key_mask, T)
        elif start and T > 1:
            mask = cache.bias(T)
        x, tapped = self.embed(ids), []
        for i, layer in enumerate(self.layers[:taps[-1] + 1] if taps_only else self.layers):
            x = layer(x, rotary, cache.at(i) if cache else keep, mask, causal)
            if i in taps:
                tapped.append(x)
        if cache:
            cache.advance(T)
        features = torch.cat(tapped, -1) if tapped else None
        if taps_only:
            return None, features
        return self.head(self.norm(x[:, -1:] if last_only else x), vocab), features


def keep(k, v):
    """The `past` of a forward without a cache: the rows' own keys and values."""
    return k, v


def padding_mask(key_mask, T):
    """key_mask (batch, S) bool -> (batch, 1, T, S) bool: causal, padding hidden. Every row sees itself, so that no row of padding is empty (NaN)."""
    S = key_mask.shape[1]
    keys = torch.arange(S, device=key_mask.device)
    rows = keys[S - T:, None]
    return ((keys <= rows) & key_mask[:, None, None] | (keys == rows))


def read_stop_ids(directory, config):
    """eos_token_id, one or several, of generation_config.json, or of config.json where that file is missing. -> frozenset"""
    path = directory / "generation_config.json"
    eos = (read_json(path) if path.exists() else config).get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(i) is int and 0 <= i < config["vocab_size"] for i in ids):
        raise InputError(f"{path if path.exists() else directory / 'config.json'}: eos_token_id is {eos!r}, but one or several ids inside the vocabulary are needed")
    return frozenset(ids)


def best_device(directory):
    """Where a target runs if nobody says: cuda if there, mps if it is large enough to gain, else cpu."""
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        with torch.device("meta"):
            target = Target(Config.from_dict(read_json(directory / "config.json"), directory / "config.json"))
        if sum(p.numel() for p in target.parameters()) > 100e6:
            return "mps"
    return "cpu"


def check_device(name):
    """InputError unless `name` is a device that these models run on and that is to be had here; None, the default, always is."""
    if name is None:
        return
    try:
        if torch.device(name).type not in ("cpu", "cuda", "mps"):
            raise RuntimeError
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ImportError):
        raise InputError(f"device {str(name)!r} is not to be had here: cpu, or cuda or mps where there is one")
