"""On a GPU: the embedded pair's tokens, and what a cycle costs at the shape of Qwen3-4B. One run prints all of it:

    python -m pytest -m cuda tests/test_cuda.py

Written for torch 2.11 and newer; about two minutes and 25 GB of device memory. The times are of random weights, made on the device: none of the drafts is
accepted, and every cycle commits one token.
"""
import copy
import json
import time
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import train
from draft import DraftConfig, Drafter, default_target_layer_ids
from model import Config
from speculate import TINY, Stats, generate, load
from target import Target

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
B, CONTEXT, MASK = 16, 512, 151669
QWEN3_4B = dict(
    model_type="qwen3", hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1000000, max_position_embeddings=40960, tie_word_embeddings=True, hidden_act="silu")


@pytest.fixture
def say(capsys):
    """Print past pytest's capture."""
    def line(text):
        with capsys.disabled():
            print(f"\n{text}", end="", flush=True)
    return line


# ---------------------------------------------------------------------------------------------------------------------
# The same tokens

def test_embedded_pair_gives_the_cpu_tokens(say):
    if not (TINY / "drafter" / "model.safetensors").exists():
        pytest.skip("tiny/drafter is not made yet")
    assert not torch.backends.cuda.matmul.allow_tf32
    found, near_ties, accepted = {}, 0, 0
    for line in (TINY / "heldout.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["task"], []).append(row["prompt"])
    sides = [load(device=device, dtype=torch.float32) for device in ("cpu", "cuda")]
    tokenizer = sides[0][2]
    prompts = [tokenizer.chat([{"role": "user", "content": text}]) for texts in found.values() for text in texts[:5]]
    for prompt in prompts:
        runs = [Stats(generate(target, drafter, prompt, 320, target.stop_ids, vocab=tokenizer.size)) for target, drafter, _ in sides]
        accepted += sum(cycle.accepted for stats in runs for cycle in stats.cycles)
        cpu, gpu = (stats.output for stats in runs)
        if cpu != gpu:
            i = next((i for i, (a, b) in enumerate(zip(cpu, gpu)) if a != b), None)
            assert i is not None, "one response is the beginning of the other"
            with torch.inference_mode():
                logits, _ = sides[0][0](torch.tensor([prompt + cpu[:i]]), last_only=True, vocab=tokenizer.size)
            best, second = logits[0, 0].topk(2).values.tolist()
            assert best - second < 1e-5 * abs(best), f"token {i}: {cpu[i]} on the CPU, {gpu[i]} on the GPU; the two best logits are {best:.6g} and {second:.6g}"
            near_ties += 1
    say(f"embedded pair, fp32: {len(prompts)} prompts, the CPU's tokens on the GPU; {near_ties} near-ties; {accepted} drafts accepted on both together")
    assert accepted > 0


# ---------------------------------------------------------------------------------------------------------------------
# The time of a cycle

@pytest.fixture(scope="module")
def pair():
    """Target and a five-layer drafter in Qwen3-4B's shape, bf16, random, made on the device; the floors of their forwards in ms, and the bandwidth."""
    config = Config.from_dict(QWEN3_4B)
    layer = Config.from_dict(QWEN3_4B | dict(num_hidden_layers=5, tie_word_embeddings=False))
    with torch.device("meta"):
        target, drafter = Target(config), Drafter(DraftConfig(layer, B, MASK, default_target_layer_ids(36), 36))
    generator = torch.Generator("cuda").manual_seed(0)
    for module in (target, drafter):
        module.to(torch.bfloat16).to_empty(device="cuda").eval().requires_grad_(False)
        for p in module.parameters():
            p.fill_(1.0) if p.dim() == 1 else p.normal_(0, 0.02, generator=generator)
    bandwidth = copy_bandwidth()
    read = {"target": sum(map(nbytes, target.parameters())),       # the embedding is the head, so a forward reads all of it
            "drafter": sum(map(nbytes, drafter.parameters())) + nbytes(target.head_weight)}
    return target, drafter, {name: 1000 * size / bandwidth for name, size in read.items()}, bandwidth


def test_times_at_the_shape_of_qwen3_4b(pair, say):
    target, drafter, floor, bandwidth = pair
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, batch 1, {CONTEXT} tokens of context, block {B}")
    say(f"a copy moves {bandwidth / 1e12:.2f} TB/s, read and written; floor: the weights that a forward reads, at that rate")
    say(f"{'':<24}{'ms':>8}{'floor ms':>10}{'times the floor':>17}")
    bare, cycle, plain = bare_times(target, drafter), loop_times(target, drafter), loop_times(target, None)
    both = floor["target"] + floor["drafter"]
    for name, ms, least in (("plain step", bare["step"], floor["target"]), (f"verify, {B} rows", bare["verify"], floor["target"]),
                            ("draft", bare["draft"], floor["drafter"]), ("cycle, in the loop", cycle, both), ("plain step, in the loop", plain, floor["target"])):
        say(f"{name:<24}{ms:>8.2f}{least:>10.2f}{ms / least:>17.1f}")
    say("")
    assert bare["step"] > 0.5 * floor["target"], "faster than the weights can be read: that was no forward"


def test_cycle_of_the_authors_package(pair, say):
    """PyPI dflash 0.1.0 at the same shape: the time of 40 cycles more, over 40."""
    transformers, package = pytest.importorskip("transformers"), pytest.importorskip("dflash.model")
    shape = {key: value for key, value in QWEN3_4B.items() if key != "model_type"}
    own = dict(num_target_layers=36, dflash_config=dict(block_size=B, mask_token_id=MASK, target_layer_ids=list(default_target_layer_ids(36))))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            target = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**shape)).eval()
            drafter = package.DFlashDraftModel(transformers.Qwen3Config(**shape | dict(num_hidden_layers=5), **own)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    prompt = torch.randint(150000, (1, CONTEXT), generator=torch.Generator().manual_seed(0)).to("cuda")

    def timed(tokens):
        began = time.perf_counter()
        lengths = package.dflash_generate(drafter, target, prompt, tokens, None, block_size=B, return_stats=True).acceptance_lengths
        return time.perf_counter() - began, len(lengths)

    timed(24)
    (short, few), (long, many) = timed(24), timed(64)
    ms, both = 1000 * (long - short) / (many - few), sum(pair[2].values())
    say(f"{'cycle, authors’ package':<24}{ms:>8.2f}{both:>10.2f}{ms / both:>17.1f}")
    say("")


# ---------------------------------------------------------------------------------------------------------------------
# Training

def test_flex_attention_equals_the_dense_mask_forward_and_backward(say):
    """fp32, rows no multiple of 128, padded rows, overlapping anchors: outputs and the gradients of all parameters."""
    from test_train import conversation, toy_pair
    target, drafter = (model.cuda() for model in toy_pair(5))
    rows, anchors = [conversation(60, 3), conversation(30, 3)], [[4, 5, 20, 21, 50], [6, 9]]
    batch = train.make_batch(rows, anchors, 5, 5, 49, multiple=512).to("cuda")
    S, Q = batch.ids.shape[1], batch.block_ids.shape[1]
    _, features = target(batch.ids, taps=(1, 2, 4))
    dense = create_mask(train.block_mask(batch.anchors, S, 5), 2, 1, Q, S + Q, device="cuda")
    found = []
    for mask in (train.visible(batch.anchors, S, 5), dense):
        drafter.zero_grad()
        hidden = drafter(target.embed(batch.block_ids), features, batch.positions, mask)[:, :10]
        hidden.square().sum().backward()
        found.append([hidden.detach()] + [p.grad.clone() for p in drafter.parameters()])
    worst = max(((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in zip(*found))
    say(f"FlexAttention against the dense mask, outputs and gradients: at most {worst:.1e} of the largest value apart")
    assert worst < 1e-3


def test_a_training_step_at_the_width_of_qwen3_4b(pair, say):
    """S = 2048, N = 256, B = 16: time and memory of the drafter's forward and backward, FlexAttention and dense; tokens/s of a step beside its matmul floor."""
    target, frozen, _, _ = pair
    S, N, Q = 2048, 256, 256 * B
    drafter = copy.deepcopy(frozen).float().train().requires_grad_()
    rows = [SimpleNamespace(ids=torch.randint(150000, (S,), generator=torch.Generator().manual_seed(0)).tolist(), prompt_length=S // 4)]
    batch = train.make_batch(rows, [train.draw_anchors(train.anchor_candidates(rows[0].ids, S // 4), N, 0, 0, 0)], N, B, MASK).to("cuda")
    with torch.no_grad():
        _, features = target(batch.ids, taps=drafter.config.target_layer_ids, last_only=True)
        blocks = target.embed(batch.block_ids)
    masks = {"FlexAttention": lambda: train.visible(batch.anchors, S, B),
             "dense": lambda: create_mask(train.block_mask(batch.anchors, S, B), 1, 1, Q, S + Q, device="cuda")}
    for name, mask in masks.items():
        def both():
            with torch.autocast("cuda", torch.bfloat16):
                drafter(blocks, features, batch.positions, mask()).float().mean().backward()
        both()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        ms = time_of(both, 10)
        say(f"drafter forward and backward, {name:<14}{ms:>8.1f} ms, {(torch.cuda.max_memory_allocated() - held) / 1e9:.2f} GB above what is held")
    optimisers = train.make_optimisers(drafter, "adamw", 6e-4)
    ms = time_of(lambda: train.train_step(target, drafter, optimisers, [batch], 1.0, "decay", 7.0), 10)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / (time_of(lambda: a @ a) / 1000)
    layers = sum(p.numel() for name, p in drafter.named_parameters() if p.dim() == 2 and name != "fc.weight")
    flops = 2 * S * sum(p.numel() for p in target.layers.parameters()) + 6 * Q * layers + 6 * S * drafter.fc.weight.numel() + 8 * N * (B - 1) * target.head_weight.numel()
    say(f"a step: {ms:.1f} ms, {1000 * S / ms:,.0f} tokens/s; its matrix products alone at {rate / 1e12:.0f} TFLOP/s, measured: {1000 * flops / rate:.1f} ms")
    say("")


def nbytes(tensor):
    return tensor.numel() * tensor.element_size()


def copy_bandwidth():
    """Bytes read and written a second by a copy of 2 GiB."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    sink = torch.empty_like(source)
    return 2 * nbytes(source) / (time_of(lambda: sink.copy_(source)) / 1000)


def time_of(f, repeats=30):
    """Median ms of f, the device waited for before and after."""
    times = []
    for _ in range(repeats + 5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        f()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return median(times[5:])


@torch.inference_mode()
def bare_times(target, drafter):
    """ms of single forwards after CONTEXT tokens -> {"step", "verify", "draft"}"""
    ids = torch.randint(150000, (1, CONTEXT), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    cache, draft_cache = target.new_cache(CONTEXT + B), drafter.new_cache(CONTEXT + B)
    _, features = target(ids, cache, drafter.config.target_layer_ids, last_only=True)
    drafter.extend(draft_cache, features)
    assert features.isfinite().all()
    block = target.embed(ids[:, :B])

    def forward(rows):
        cache.length = CONTEXT
        target(ids[:, :rows], cache)

    def draft():
        draft_cache.length = CONTEXT - 1
        drafter.extend(draft_cache, features[:, -1:])
        target.head(drafter.propose(draft_cache, block)[:, 1:]).argmax(-1)

    return dict(step=time_of(lambda: forward(1)), verify=time_of(lambda: forward(B)), draft=time_of(draft))


def loop_times(target, drafter):
    """Median ms of generate()'s turns, its prefill and the first ones left out."""
    prompt = torch.randint(150000, (CONTEXT,), generator=torch.Generator().manual_seed(0)).tolist()
    stats = Stats(generate(target, drafter, prompt, 60 if drafter is None else 40))
    return 1000 * median(cycle.seconds for cycle in stats.cycles[5:])
