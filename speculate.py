"""Speculative decoding with a block drafter: propose, verify, commit. The same loop without a drafter is plain decoding.

    python speculate.py --prompt "..."                                   the embedded pair, on any machine
    python speculate.py --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --prompt "..."

A cycle (DFlash, section 3; `start` is the anchor's position, B the block size):
    propose  the drafter reads the features of all tokens before the anchor and fills [anchor, MASK * (B - 1)] in one forward
    verify   the target reads anchor and drafts in one forward; row k judges the draft at start + k + 1
    commit   the longest correct prefix, `accepted` drafts, and one token of the target's own; both caches go back to the new anchor
tau, the tokens a cycle commits, lies between 1 and B. The output is the target's own: at temperature 0 token by token, above it in distribution.
"""
import argparse
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))      # Ctrl-C ends it without a traceback, in the seconds that torch's import takes, too

import torch

from checkpoint import InputError, Parser, checkpoint_dir, command_line
from draft import Drafter
from target import Target, best_device, check_device
from tokenizer import Tokenizer

TINY = Path(__file__).resolve().parent / "tiny"


# ---------------------------------------------------------------------------------------------------------------------
# Sampling

@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: temperature first, then top-k, then top-p. 0 means argmax (temperatures) or off (top_k); top_p 1 is off."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    draft_temperature: float = 0.0

    def __post_init__(self):
        for name in ("temperature", "draft_temperature"):
            if not (getattr(self, name) == 0 or 1e-5 <= getattr(self, name) < float("inf")):      # logits / 1e-40 are NaN
                raise InputError(f"{name} is {getattr(self, name)}, but 0 or a number from 0.00001 up is needed")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}, but a number above 0 and up to 1 is needed")
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k}, but 0 (off) or more is needed")


def probabilities(logits, temperature, top_k=0, top_p=1.0):
    """logits (..., V) -> the distribution after temperature, top-k and top-p, fp32 (..., V)."""
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    p = logits.softmax(-1)
    if top_p < 1:
        ordered, ids = p.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered              # the token that crosses top_p is kept
        p = p.scatter(-1, ids, ordered.masked_fill(before >= top_p, 0.0))
        p = p / p.sum(-1, keepdim=True)
    return p


def draw(weights, generator):
    """One id a row, with probability proportional to weights (..., V): a race of exponential clocks, which needs no host sync."""
    return (weights / torch.empty_like(weights).exponential_(generator=generator)).argmax(-1)


def draft(logits, sampling, generator=None):
    """Choose the drafts. logits (batch, B - 1, V) -> drafts (batch, B - 1), and q_draft (batch, B - 1, V) they were drawn from, None for argmax."""
    if sampling.draft_temperature == 0:
        return logits.max(-1).indices, None                # argmax, which torch is slow at in bf16 on a CPU
    q_draft = probabilities(logits, sampling.draft_temperature, sampling.top_k, sampling.top_p)
    return draw(q_draft, generator), q_draft


def verify(logits, drafts, q_draft, sampling, generator=None):
    """Speculative sampling (Leviathan et al. 2023, algorithm 1), for every temperature.

    logits (batch, B, V) of the target, row k for the token after slot k; drafts (batch, B - 1), drawn from q_draft (batch, B - 1, V), or, where that is
    None, chosen without chance: q is one-hot. -> accepted (batch) and the token after the accepted drafts (batch).

    Draft x is kept with probability min(1, p(x) / q(x)); at the first one rejected the token comes from max(p - q, 0) instead, after none from p.
    At temperature 0 p is one-hot, and all of this says: keep the drafts that are the target's argmax.
    """
    if sampling.temperature == 0:
        best = logits.max(-1).indices
        accepted = (drafts == best[:, :-1]).cumprod(1).sum(1)
        return accepted, best.gather(1, accepted[:, None])[:, 0]
    p_target = probabilities(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    q = torch.zeros_like(p_target)                         # its last row stays zero: there is no draft to make up for
    if q_draft is None:
        q[:, :-1].scatter_(-1, drafts[..., None], 1.0)
    else:
        q[:, :-1] = q_draft
    p_x = p_target[:, :-1].gather(-1, drafts[..., None])[..., 0]
    q_x = q[:, :-1].gather(-1, drafts[..., None])[..., 0]
    chance = torch.rand(p_x.shape, generator=generator, device=p_x.device)
    accepted = (chance * q_x < p_x).cumprod(1).sum(1)
    row = torch.arange(len(accepted), device=accepted.device), accepted
    residual = (p_target[row] - q[row]).clamp(min=0)
    lost = residual.sum(-1, keepdim=True) <= 0             # p = q up to rounding: then p itself
    return accepted, draw(torch.where(lost, p_target[row], residual), generator)


# ---------------------------------------------------------------------------------------------------------------------
# The loop

@dataclass
class Cycle:
    """What one turn of the loop did. The first one a response yields is its prefill: one token, and no part of tau."""
    tokens: list            # committed: accepted drafts, then one token of the target's own; cut at a stop id and at the budget
    drafted: int = 0        # drafts proposed, B - 1
    accepted: int = 0       # how many of `tokens` are accepted drafts (those behind the cut do not count)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0    # the whole turn
    prefill: bool = False


def mark(device):
    """A point in time on the device's own clock; reading two of them waits for nothing before the cycle's one sync."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(a, b):
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1000


def commit(accepted, tokens, budget, stop_ids):
    """Cut a cycle's tokens after the first stop id and at the budget -> tokens, accepted drafts among them, whether the response ends."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    stopped = end < len(tokens) or tokens[-1] in stop_ids
    tokens = tokens[:min(end, budget)]
    return tokens, min(accepted, len(tokens)), stopped or len(tokens) == budget


@torch.inference_mode()
def generate(target, drafter, prompt, max_new_tokens, stop_ids=(), sampling=Sampling(), block_size=None, generator=None, vocab=None):
    """Decode after `prompt` (a list of ids), yielding one Cycle at a time, the prefill first. Batch 1.

    drafter None, or block size 1: plain decoding. Blocks stay whole up to the end, since a shorter one would draft differently. vocab: how many
    ids may be emitted, for models with more rows than their tokenizer has tokens. InputError for an empty or too long prompt, or a budget below 1.
    """
    B = 1 if drafter is None else drafter.config.block_size if block_size is None else block_size
    if not 1 <= B <= target.config.max_position_embeddings:
        raise InputError(f"block_size is {B}, but a number from 1 to the target's context length is needed")
    check_room(target, len(prompt), max_new_tokens)
    device, speculating = target.device, B > 1
    cache = target.new_cache(len(prompt) + max_new_tokens + B)
    taps = drafter.config.target_layer_ids if speculating else ()
    if speculating:
        draft_cache = drafter.new_cache(cache.max_len)
        block = torch.full((1, B), drafter.config.mask_token_id, device=device)

    began, before = time.perf_counter(), mark(device)
    logits, features = target(torch.tensor([prompt], device=device), cache, taps, last_only=True, vocab=vocab)
    drafts = torch.empty((1, 0), dtype=torch.long, device=device)
    _, anchor = verify(logits, drafts, None, sampling, generator)
    after = mark(device)
    tokens, _, done = commit(0, anchor.tolist(), max_new_tokens, stop_ids)
    yield Cycle(tokens, verify_seconds=seconds_between(before, after), seconds=time.perf_counter() - began, prefill=True)
    left = max_new_tokens - len(tokens)

    while not done:
        began, before, q_draft = time.perf_counter(), mark(device), None
        if speculating:                                                        # propose
            block[:, 0] = anchor
            drafter.extend(draft_cache, features)
            hidden = drafter.propose(draft_cache, target.embed(block))
            drafts, q_draft = draft(target.head(hidden[:, 1:], vocab), sampling, generator)
        between = mark(device)

        logits, features = target(torch.cat((anchor[:, None], drafts), 1), cache, taps, vocab=vocab)      # verify
        accepted, anchor = verify(logits, drafts, q_draft, sampling, generator)
        after = mark(device)

        count, *ids = torch.cat((accepted, drafts[0], anchor)).tolist()        # commit; the cycle's one host sync
        cache.length -= B - 1 - count                                          # forgets the rejected drafts' keys and values
        features = features[:, :count + 1] if speculating else None            # of the old anchor and the accepted drafts; the new anchor has none yet
        tokens, kept, done = commit(count, ids[:count] + ids[-1:], left, stop_ids)
        left -= len(tokens)
        yield Cycle(tokens, B - 1, kept, seconds_between(before, between), seconds_between(between, after), time.perf_counter() - began)


def check_room(target, prompt_length, max_new_tokens):
    limit = target.config.max_position_embeddings
    if prompt_length < 1 or max_new_tokens < 1:
        raise InputError("the prompt is empty" if prompt_length < 1 else f"max_new_tokens is {max_new_tokens}, but 1 or more is needed")
    if prompt_length + max_new_tokens > limit:
        raise InputError(f"a prompt of {prompt_length} tokens and {max_new_tokens} new ones do not fit the target's max_position_embeddings, {limit}")


class Stats:
    """What the cycles of one response add up to; tau as the paper counts it: tokens committed in cycles / cycles."""

    def __init__(self, cycles=()):
        self.cycles, self.prefill = [], None
        for cycle in cycles:
            self.add(cycle)

    def add(self, cycle):
        if cycle.prefill:
            self.prefill = cycle
        else:
            self.cycles.append(cycle)

    @property
    def output(self):
        """All ids of the response."""
        return self.prefill.tokens + [token for c in self.cycles for token in c.tokens]

    @property
    def tokens(self):
        return len(self.output)

    @property
    def tau(self):
        return sum(len(c.tokens) for c in self.cycles) / len(self.cycles) if self.cycles else float("nan")

    @property
    def seconds_per_token(self):
        """TPOT: decoding time, prefill left out, over output tokens (the authors' count)."""
        return sum(c.seconds for c in self.cycles) / self.tokens

    def accepted_by_position(self):
        """Share of cycles whose draft at slot 1, 2, ... was accepted."""
        slots = max((c.drafted for c in self.cycles), default=0)
        return [sum(c.accepted >= k for c in self.cycles) / len(self.cycles) for k in range(1, slots + 1)]


# ---------------------------------------------------------------------------------------------------------------------
# Loading

def load(target_name=None, draft_name=None, device=None, dtype=None):
    """-> target, drafter, tokenizer, ready for `generate`. No names: the embedded pair. A target alone: no drafter (None)."""
    if "" in (target_name, draft_name):
        raise InputError("the name of a model is empty")
    if target_name is None:
        target_name, draft_name = TINY / "target", draft_name or TINY / "drafter"
    check_device(device)
    directory = checkpoint_dir(target_name)
    device = torch.device(device or best_device(directory))
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    tokenizer = Tokenizer.load(directory)
    target = Target.load(target_name, device, dtype)
    if tokenizer.size > target.config.vocab_size:
        raise InputError(f"{directory}: the tokenizer has {tokenizer.size} ids, but config.json's vocab_size is {target.config.vocab_size}")
    target.stop_ids |= tokenizer.stop_ids
    drafter = Drafter.load(draft_name, device, dtype) if draft_name is not None else None
    if drafter:
        drafter.check_fits(target, target.stop_ids)
    return target, drafter, tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Command line

def say(text):
    print(text, file=sys.stderr, flush=True)


def parse_args(argv=None):
    parser = Parser(description="Decode a prompt speculatively: the target's own tokens, several a forward.")
    models = parser.add_argument_group("models")
    models.add_argument("--target", help="checkpoint directory or hub id (default: the embedded pair)")
    models.add_argument("--draft", help="drafter directory or hub id; --target without it decodes plainly")
    models.add_argument("--device", help="cpu, cuda, mps (default: cuda if there, mps for targets over 100M parameters, else cpu)")
    models.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16, on cpu float32 (hidden states overflow fp16)")
    prompt = parser.add_argument_group("prompt")
    prompt.add_argument("--prompt", help="the user's message; - reads stdin; without it: a chat")
    prompt.add_argument("--system", help="system message")
    prompt.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="the template's thinking mode (default: off, as released drafters want)")
    prompt.add_argument("--raw", action="store_true", help="no chat template: the text as it is, continued (for base models)")
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument("--max-new-tokens", type=int, help="default: what fits, at most 2048")
    decoding.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    decoding.add_argument("--top-k", type=int, default=0, help="0: off (default)")
    decoding.add_argument("--top-p", type=float, default=1.0, help="1: off (default)")
    decoding.add_argument("--draft-temperature", type=float, default=0.0, help="0: argmax drafts (default); above 0 they are drawn, truncated like the target's tokens")
    decoding.add_argument("--seed", type=int, default=0, help="of the draws above temperature 0")
    decoding.add_argument("--block-size", type=int, help="default: the drafter's own")
    output = parser.add_argument_group("output")
    output.add_argument("--show", action="store_true", help="colour accepted drafts and mark where each cycle ends")
    output.add_argument("--compare", action="store_true", help="decode plainly too: speed-up, and whether the output is identical")
    return parser.parse_args(argv)


def check_options(args, drafter, tokenizer):
    """-> Sampling. Refuses every option that would change nothing."""
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.draft_temperature)
    refusals = (
        (args.block_size is not None and args.block_size < 1, f"--block-size is {args.block_size}, but 1 or more is needed"),
        (args.temperature == 0 and args.draft_temperature == 0 and (args.top_k or args.top_p < 1), "--top-k and --top-p change nothing at --temperature 0"),
        (not drafter and (args.compare or args.block_size is not None or args.draft_temperature),
         "--compare, --block-size and --draft-temperature need a drafter (--draft)"),
        (args.draft_temperature and args.block_size == 1, "--draft-temperature changes nothing at --block-size 1, where nothing is drafted"),
        (args.raw and (args.system is not None or args.thinking is not None), "--raw uses no chat template, so --system and --thinking change nothing"),
        (args.raw and args.prompt is None, "--raw needs --prompt"),
        (not -2**63 <= args.seed < 2**63, f"--seed is {args.seed}, but it has to fit 64 bits"),
        (args.thinking is not None and not tokenizer.has_thinking, "this target's chat template has no thinking switch"))
    for refused, why in refusals:
        if refused:
            raise InputError(why)
    if drafter and (args.block_size or 0) > drafter.config.block_size:
        say(f"warning: block size {args.block_size} is above the {drafter.config.block_size} that this drafter was trained with")
    return sampling


def main(argv=None):
    args = parse_args(argv)
    if None in (sys.stdin, sys.stdout):
        raise InputError("stdin or stdout is closed")
    target, drafter, tokenizer = load(args.target, args.draft, args.device, args.dtype and getattr(torch, args.dtype))
    sampling = check_options(args, drafter, tokenizer)
    if target.device.type == "cpu" and target.config.hidden_size * target.config.num_hidden_layers < 4096:
        torch.set_num_threads(1)            # matrices this small are not worth waking a second thread, least of all on a busy machine
    introduce(args, target, drafter, tokenizer)
    generator = torch.Generator(target.device).manual_seed(args.seed)
    messages = [{"role": "system", "content": args.system}] if args.system is not None else []

    def answer(text):
        """Stream the answer to one message -> its text."""
        if not text.strip():
            raise InputError("the prompt is empty")
        messages.append({"role": "user", "content": text})
        ids = tokenizer.encode_raw(text) if args.raw else tokenizer.chat(messages, bool(args.thinking))
        room = target.config.max_position_embeddings - len(ids)
        budget = max(1, min(2048, room)) if args.max_new_tokens is None else args.max_new_tokens
        check_room(target, len(ids), budget)
        longest = drafter.config.training_length if drafter else None
        if longest and len(ids) > longest:
            say(f"warning: a prompt of {len(ids)} tokens, but this drafter learnt from conversations of at most {longest}: expect a lower tau")

        def cycles(drafter, budget=budget):
            return generate(target, drafter, ids, budget, target.stop_ids, sampling, args.block_size, generator, tokenizer.size)

        if args.compare:                    # both paths once, so that neither is timed cold; the draws start over
            state = generator.get_state()
            list(cycles(drafter, min(8, budget))), list(cycles(None, min(8, budget)))
            generator.set_state(state)
        reply, stats = stream(cycles(drafter), tokenizer, args.show)
        report(stats)
        if args.compare:
            plain = Stats(cycles(None))
            say(f"plain: {plain.tokens} tokens, {1000 * plain.seconds_per_token:.2f} ms a token")
            if any(c.drafted for c in stats.cycles):
                say(f"speed-up: {plain.seconds_per_token / stats.seconds_per_token:.2f}x")
            say("identical: " + (identical(target, tokenizer, ids, plain.output, stats.output) if sampling.temperature == 0 else
                                 "not compared above temperature 0, where the distribution is the same and the draws are not"))
        return reply

    if args.prompt is not None:
        answer(sys.stdin.read() if args.prompt == "-" else args.prompt)
        return
    say(f"chat: a message a line{', each answered by itself' if args.target is None else ''}; Ctrl-D ends it")
    while True:
        try:
            text = input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")
            if text.strip():
                messages.append({"role": "assistant", "content": answer(text)})
                if args.target is None:     # the embedded pair was taught single turns: every line is a conversation of its own
                    del messages[-2:]
        except EOFError:
            return
        except InputError as error:         # a message too long, say: without it the chat goes on
            say(f"error: {error}")
            messages.pop()


def introduce(args, target, drafter, tokenizer):
    """What is loaded, and what ends a response; for the embedded pair also what it knows."""
    sizes = [f"{sum(p.numel() for p in model.parameters()) / 1e6:,.1f}M parameters" for model in (target, drafter) if model]
    stops = " ".join(f"{tokenizer.decode([i], skip_special=False)} ({i})" for i in sorted(target.stop_ids))
    say(f"target {target.name}: {sizes[0]}, {target.device.type}, {str(target.dtype).removeprefix('torch.')}; stops at {stops or 'the budget alone'}")
    if drafter:
        c = drafter.config
        say(f"drafter {drafter.name}: {sizes[1]}, {c.layer.num_hidden_layers} layers, blocks of {args.block_size or c.block_size}, taps {list(c.target_layer_ids)}")
    if args.target is None:
        say("this pair knows word problems, short Python functions and stories, and only in words like these:")
        rows = [json.loads(line) for line in (TINY / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
        for prompt in {row["task"]: row["prompt"] for row in reversed(rows)}.values():       # the first of each task
            say(f"  {prompt}")


def stream(cycles, tokenizer, show):
    """Print the answer as it comes -> its text, Stats."""
    stats, decoder, parts = Stats(), tokenizer.stream(), []
    colour = show and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for cycle in cycles:
        stats.add(cycle)
        for i, token in enumerate(cycle.tokens):
            text = decoder.push(token)
            parts.append(text)
            print(f"\x1b[32m{text}\x1b[0m" if colour and text and i < cycle.accepted else text, end="")
        if show and not cycle.prefill:
            print("\x1b[2m|\x1b[0m" if colour else "|", end="")
        sys.stdout.flush()
        if cycle.drafted and len(stats.cycles) == 50 and stats.tau < 1.2:
            say("\nwarning: almost no draft is accepted; is the prompt unlike those this drafter learnt from, or is it another target's, or another thinking mode's?")
    parts.append(decoder.flush())
    print(parts[-1])
    return "".join(parts), stats


def report(stats):
    """Tokens, cycles, tau and times of one response, to stderr."""
    cycles = stats.cycles
    tau = f"{len(cycles)} cycles, tau {stats.tau:.2f}" if cycles else "no cycle"
    pace = f", then {1000 * stats.seconds_per_token:.2f} ms a token" if cycles else ""
    say(f"\n{stats.tokens} tokens, {tau}; prefill {1000 * stats.prefill.seconds:.1f} ms{pace}")
    if any(c.drafted for c in cycles):
        draft_ms, verify_ms, all_ms = (1000 * sum(getattr(c, part) for c in cycles) / len(cycles) for part in ("draft_seconds", "verify_seconds", "seconds"))
        shares = [f"{k}:{share:.0%}" for k, share in enumerate(stats.accepted_by_position(), 1) if share > 0]
        say("accepted by position: " + (" ".join(shares) or "none"))
        say(f"a cycle: draft {draft_ms:.2f} ms, verify {verify_ms:.2f} ms, all {all_ms:.2f} ms")


@torch.inference_mode()
def first_difference(target, prompt, plain, fast, vocab):
    """Where two greedy outputs part -> the place, and the two best logits there; None where they are the same."""
    if plain == fast:
        return None
    i = next((i for i, (a, b) in enumerate(zip(plain, fast)) if a != b), min(len(plain), len(fast)))
    logits, _ = target(torch.tensor([prompt + plain[:i]], device=target.device), last_only=True, vocab=vocab)
    return i, *logits[0, -1].float().topk(2).values.tolist()


def identical(target, tokenizer, prompt, plain, fast):
    """ "yes", or where two greedy outputs part, and by how little the two best logits differ there."""
    difference = first_difference(target, prompt, plain, fast, tokenizer.size)
    if difference is None:
        return "yes"
    i, best, second = difference
    a, b = (repr(tokenizer.decode(ids[i:i + 1], skip_special=False)) if i < len(ids) else "the end" for ids in (plain, fast))
    return f"no; token {i + 1} is {a} plainly, {b} speculatively, where the two best logits are {best:.6g} and {second:.6g}, {best - second:.2g} apart"


if __name__ == "__main__":
    command_line(main)
