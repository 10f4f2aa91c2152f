"""Models and fakes of several test files, smaller than the toys and without a checkpoint: straight from a Config, or no model at all.

    small_target(V), small_drafter(target, B)   random models over V tokens
    Oracle(target, text, B, wrong)              in a drafter's place: it knows the target's text and errs where it is told to; errors() draws such places
    plain(target, prompt, n)                    what every loop must give, without the loop
    tokens_of(cycles)                           what a loop gave
    PROMPT                                      ids for the toys' targets, whose vocabulary holds them
    chi_square_p(counts, expected)              how probable such counts are; over LOOP_V tokens every response of a few can be counted
"""
from types import SimpleNamespace

import torch

from draft import DraftConfig, Drafter
from model import Config
from target import Target

PROMPT = [5, 77, 260, 31, 8, 199, 100, 42]
LOOP_V = 6


def small_config(V, layers=2, H=16):
    return Config(model_type="qwen3", vocab_size=V, hidden_size=H, intermediate_size=2 * H, num_hidden_layers=layers, num_attention_heads=2,
                  num_key_value_heads=1, head_dim=8, rms_norm_eps=1e-6, max_position_embeddings=4096, rope=dict(rope_theta=1e4, rope_type="default"),
                  tie_word_embeddings=False, qkv_bias=False, o_bias=False, qk_norm=True)


def small_target(V, seed=0, sharpness=2.0, **shape):
    """A target straight from a Config. Its head's rows have one length, so that each is the argmax of its own direction; `sharpness` sizes the logits."""
    torch.manual_seed(seed)
    target = Target(small_config(V, **shape)).eval().requires_grad_(False)
    for name, p in target.named_parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=1.0 if "embed" in name else 1.5 / p.shape[1] ** 0.5)
    target.lm_head.weight.copy_(sharpness * torch.nn.functional.normalize(target.lm_head.weight, dim=-1))
    return target


def small_drafter(target, B, seed=0, taps=(0, 1), mask=1):
    torch.manual_seed(seed)
    config = DraftConfig(small_config(target.config.vocab_size, layers=1), B, mask, taps, target.config.num_hidden_layers)
    drafter = Drafter(config).eval().requires_grad_(False)
    for p in drafter.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=1.5 / p.shape[1] ** 0.5)
    return drafter


class Oracle:
    """A drafter that proposes `text`, the target's own, but for the positions in `wrong`. It keeps what it was given, for the tests to look at."""

    def __init__(self, target, text, B, wrong=(), mask=0, taps=(1, 3)):
        self.config = SimpleNamespace(block_size=B, mask_token_id=mask, target_layer_ids=taps)
        self.target, self.text, self.wrong = target, text, set(wrong)
        self.features, self.blocks = [], []
        rows = target.head_weight
        assert ((rows @ rows.T).argmax(-1) == torch.arange(len(rows)))[list(set(text))].all()    # so that a head row proposes its own token

    def new_cache(self, max_len):
        self.max_len = max_len
        return SimpleNamespace(length=0, max_len=max_len)

    def extend(self, cache, features):
        self.features.append(features)
        cache.length += features.shape[1]

    def propose(self, cache, block):
        self.blocks.append(block)
        start, B = cache.length, block.shape[1]
        assert start + B <= cache.max_len
        ids = [self.text[p] if p < len(self.text) else 0 for p in range(start, start + B)]
        ids = [(id + 1) % 256 if start + k in self.wrong else id for k, id in enumerate(ids)]
        return self.target.head_weight[torch.tensor([ids])]


def plain(target, prompt, n, vocab=None):
    """The next n tokens, greedily, one row at a time: what every loop must give. No code of speculate.py."""
    with torch.inference_mode():
        cache, ids, out = target.new_cache(len(prompt) + n), torch.tensor([prompt]), []
        for _ in range(n):
            ids = target(ids, cache, last_only=True, vocab=vocab)[0][:, -1].argmax(-1, keepdim=True)
            out.append(ids.item())
    return out


def tokens_of(cycles):
    return [token for cycle in cycles for token in cycle.tokens]


def errors(seed, start, end, share=0.3):
    """Positions to err at, the same for the same seed."""
    return {start + i for i in torch.nonzero(torch.rand(end - start, generator=torch.Generator().manual_seed(seed)) < share)[:, 0].tolist()}


def chi_square_p(counts, expected):
    """The probability of a chi-square at least as large; cells that expect fewer than 5 are put together."""
    small = expected < 5
    counts = torch.cat((counts[~small], counts[small].sum()[None]))
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2).item()
