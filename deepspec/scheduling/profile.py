"""Measures the cost curve: steps of the real target and of a real draft, and whole rounds of both, on this machine.

A step is the one that the decoder plays (`judge`): the packed forward, the head, the warpers and the acceptance test;
for a draft `propose` and `observe`. Whole rounds are in rehearsal.py. Prompts are random tokens. Settings are tried in
turn and the turns repeated, so that a machine that slows down slows all of them and its turns can be told apart.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from deepspec import console
from deepspec.algorithms.base import DraftModel, Observation, Proposal, Sampler
from deepspec.algorithms.checkpoint import load_draft, read_config
from deepspec.attention import Packing
from deepspec.decoding.judge import judge
from deepspec.decoding.kv_cache import RaggedCache
from deepspec.decoding.sampling import Sampling, check_sampling, warp
from deepspec.errors import ConfigError, DataError
from deepspec.runtime import choose_device, provenance
from deepspec.scheduling.cost import CostCurve, non_increasing, write_curve, write_sglang_table
from deepspec.scheduling.rehearsal import Key, room_needed, round_costs, settled, timed_rounds
from deepspec.scheduling.settings import ProfileConfig
from deepspec.targets.base import Target


class Step(NamedTuple):
    """One thing to time: `run` plays it once."""

    key: tuple[int, ...]
    run: Callable[[], object]


class Measured(NamedTuple):
    """A curve and the single measurements behind it.

    Attributes:
        curve: what they settle to.
        seconds: of every repeat, by (context, tokens).
        draft_seconds: of every repeat, by (requests,); empty without a draft.
        round_seconds: of every repeat of whole rounds; empty without a draft.
    """

    curve: CostCurve
    seconds: dict[tuple[int, ...], list[float]]
    draft_seconds: dict[tuple[int, ...], list[float]]
    round_seconds: dict[Key, list[float]]


def run_profile(config: ProfileConfig) -> CostCurve:
    """Measure the curve, write it with its provenance and as SGLang's table, and print it.

    Raises:
        DeepSpecError: a setting does not fit the target, or the disk refuses the file.
    """
    folder = config.draft
    taps = None if folder is None else read_config(folder)["target_layer_ids"]
    target = Target.load(config.target, choose_device(config.device), taps)
    draft = None if folder is None else load_draft(folder, target)
    measured = measure(config, target, draft)
    _write(config, measured)
    title = f"{target.name}, {str(target.dtype).removeprefix('torch.')}, {target.device}"
    console.table(curve_table(measured.curve, title))
    if measured.curve.rounds:
        console.table(rounds_table(measured.curve))
    return measured.curve


def measure(config: ProfileConfig, target: Target, draft: DraftModel | None) -> Measured:
    """Time verification steps of a target, and draft steps and whole rounds where there is a draft.

    Raises:
        ConfigError: contexts or tokens do not fit the target.
    """
    sampling = check_sampling(Sampling(temperature=config.temperature))
    block = config.num_draft_tokens if draft is None else draft.num_draft_tokens
    _check(config, target, block, has_rounds=draft is not None)
    seconds: dict[tuple[int, ...], list[float]] = {}
    for context in config.contexts:
        steps = verification_steps(target, context, config.tokens, config.tokens_per_request, sampling)
        seconds |= {(context, *key): found for key, found in _timed(steps, config, f"context {context}").items()}
    drafted: dict[tuple[int, ...], list[float]] = {}
    played: dict[Key, list[float]] = {}
    if draft is not None:
        steps = draft_steps(target, draft, config.contexts[0], config.draft_requests, sampling)
        drafted = _timed(steps, config, "draft")
        total = len(config.draft_requests) * (config.repeats + 1)
        with console.progress("profile: rounds", total=total) as bar:
            played = timed_rounds(
                target,
                draft,
                config.contexts[0],
                config.draft_requests,
                sampling,
                config.repeats,
                lambda: bar.advance(1),
            )
    lines = [settled({key: values for key, values in seconds.items() if key[0] == one}) for one in config.contexts]
    drafting = settled(drafted)
    curve = CostCurve(
        tokens=config.tokens,
        contexts=config.contexts,
        steps_per_second=tuple(
            non_increasing([1 / line[context, tokens] for tokens in config.tokens])
            for context, line in zip(config.contexts, lines, strict=True)
        ),
        draft_requests=tuple(requests for (requests,) in drafting),
        draft_seconds=tuple(drafting.values()),
        rounds=tuple(round_costs(requests, block, played, value) for (requests,), value in drafting.items()),
    )
    return Measured(curve, seconds, drafted, played)


def _check(config: ProfileConfig, target: Target, block: int, has_rounds: bool) -> None:
    # Whole rounds go on for a while; the decoder wants room for one more block behind them.
    room = block + 1 + (room_needed(block) if has_rounds else 0)
    longest = max(config.contexts) + room
    if longest > target.context_length:
        raise ConfigError(
            f"contexts {list(config.contexts)}: a context and the rounds behind it need {longest} positions, but "
            f"{target.name} has {target.context_length}. Use contexts up to {target.context_length - room}."
        )
    if config.tokens_per_request > block + 1:
        raise ConfigError(
            f"tokens_per_request {config.tokens_per_request} is above the anchor and {block} draft tokens. "
            f"Use up to {block + 1}."
        )


@torch.inference_mode()
def verification_steps(
    target: Target,
    context: int,
    tokens: Sequence[int],
    tokens_per_request: int,
    sampling: Sampling,
) -> list[Step]:
    """Steps of so many tokens in all, over requests with `context` tokens behind each.

    Args:
        target: the target.
        context: length of what is in the cache.
        tokens: B of each step.
        tokens_per_request: tokens of each request where B suffices; the rest is spread over the first requests.
        sampling: warpers of the acceptance test.
    """
    generator = torch.Generator().manual_seed(context)
    ids = torch.randint(target.vocab_size, (1, context), generator=generator).to(target.device)
    prefix = RaggedCache.for_batch(1)
    target.forward_cached(ids, torch.arange(context, device=target.device)[None], prefix, context)
    return [
        Step(
            (number,),
            _verification(target, prefix, context, request_tokens(number, tokens_per_request), sampling),
        )
        for number in tokens
    ]


def request_tokens(tokens: int, each: int) -> list[int]:
    """Tokens of every request of a step of `tokens` tokens, about `each` a request."""
    requests = max(1, tokens // each)
    base, more = divmod(tokens, requests)
    return [base + (index < more) for index in range(requests)]


def _verification(
    target: Target, prefix: RaggedCache, context: int, counts: Sequence[int], sampling: Sampling
) -> Callable[[], object]:
    def step() -> object:
        return judge(target, cache, anchors, positions, proposal, lengths, uniforms, visible, sampling, packing=packing)

    requests, device = len(counts), target.device
    width = max(counts) - 1
    generator = torch.Generator().manual_seed(requests)
    anchors = torch.randint(target.vocab_size, (requests,), generator=generator).to(device)
    positions = torch.full((requests,), context, device=device)
    visible = context + width + 1
    cache = prefix.repeated(requests)
    lengths = torch.tensor(counts, device=device) - 1
    uniforms = torch.rand(requests, width + 2, generator=generator, dtype=torch.float64).to(device)
    drawn = torch.randint(target.vocab_size, (requests, width), generator=generator).to(device)
    logits = torch.zeros(requests, width, target.vocab_size, device=device)
    proposal = None
    if max(counts) > 1:
        proposal = Proposal(drawn, warp(logits, sampling), None, torch.zeros(requests, width, device=device))
    packing = Packing.of(counts, device) if proposal is not None and target.packs else None
    return step


@torch.inference_mode()
def draft_steps(
    target: Target, draft: DraftModel, context: int, requests: Sequence[int], sampling: Sampling
) -> list[Step]:
    """Draft steps (propose, then observe two tokens a request) of so many requests, `context` tokens behind each."""
    return [Step((number,), _drafting(target, draft, context, number, sampling)) for number in requests]


def _drafting(
    target: Target, draft: DraftModel, context: int, requests: int, sampling: Sampling
) -> Callable[[], object]:
    def random_features(length: int) -> Tensor:
        return torch.randn(requests, length, draft.feature_size, generator=generator).to(target.device, target.dtype)

    def step() -> None:
        draft.propose(state, anchors, positions, context + block + 1, Sampler(sampling, uniforms))
        # Two tokens a round are usual; the same places are overwritten each time, so the context does not grow.
        draft.observe(state, Observation(features, following, positions, counts, context + block + 1))

    block, device = draft.num_draft_tokens, target.device
    generator = torch.Generator().manual_seed(requests)
    state = draft.new_state(requests)
    lengths = torch.full((requests,), context, device=device)
    ids = torch.randint(target.vocab_size, (requests, context), generator=generator).to(device)
    begin = torch.zeros_like(lengths)
    draft.observe(state, Observation(random_features(context), ids, begin, lengths, context))
    anchors, positions = ids[:, 0], lengths
    uniforms = torch.rand(requests, block, generator=generator, dtype=torch.float64).to(device)
    features, counts = random_features(block + 1), torch.full_like(lengths, min(2, block + 1))
    following = torch.randint(target.vocab_size, (requests, block + 1), generator=generator).to(device)
    return step


@torch.inference_mode()
def _timed(steps: Sequence[Step], config: ProfileConfig, label: str) -> dict[tuple[int, ...], list[float]]:
    """Seconds of every repeat of every step, in an order that changes with every repeat."""
    order = random.Random(0)
    found: dict[tuple[int, ...], list[float]] = {step.key: [] for step in steps}
    is_cuda = torch.cuda.is_available() and config.device != "cpu"
    with console.progress(f"profile: {label}", total=len(steps) * (config.repeats + 1)) as bar:
        for repeat in range(config.repeats + 1):
            for step in order.sample(list(steps), len(steps)):
                if is_cuda:
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                step.run()
                if is_cuda:
                    torch.cuda.synchronize()
                if repeat:  # the first warms up
                    found[step.key].append(time.perf_counter() - begin)
                bar.advance(1)
    return found


def _write(config: ProfileConfig, measured: Measured) -> None:
    path = Path(config.output)
    details: dict[str, Any] = {
        "seconds": {f"{context}/{tokens}": values for (context, tokens), values in measured.seconds.items()},
        "seconds_draft": {str(key[0]): values for key, values in measured.draft_seconds.items()},
        "seconds_rounds": {"/".join(map(str, key)): values for key, values in sorted(measured.round_seconds.items())},
        "made_with": {**provenance(), "profile": config.model_dump(mode="json"), "threads": torch.get_num_threads()},
    }
    try:
        write_curve(path, measured.curve, details)
        for context in measured.curve.contexts:
            table = path.with_name(f"{path.stem}_sglang_{context}.json")
            write_sglang_table(table, measured.curve, context)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}). Choose another output.") from error
    console.info(f"cost curve: {path}   SGLang's tables: {path.with_name(f'{path.stem}_sglang_<context>.json')}")


def curve_table(curve: CostCurve, title: str) -> Table:
    """Milliseconds of a step and tokens per second at every point."""
    table = Table(title=f"Cost curve: {title}", box=box.SIMPLE_HEAD, title_justify="left", show_edge=False)
    table.add_column("tokens", justify="right")
    for context in curve.contexts:
        table.add_column(f"ms at {context}", justify="right")
        table.add_column("tok/s", justify="right")
    for index, tokens in enumerate(curve.tokens):
        rates = [line[index] for line in curve.steps_per_second]
        table.add_row(str(tokens), *(cell for rate in rates for cell in (f"{1000 / rate:.1f}", f"{tokens * rate:.0f}")))
    for requests, value in zip(curve.draft_requests, curve.draft_seconds, strict=True):
        table.add_row(f"draft, {requests} req.", f"{1000 * value:.1f}")
    return table


def rounds_table(curve: CostCurve) -> Table:
    """Milliseconds of whole rounds, the draft's step included."""
    table = Table(title="Whole rounds, ms", box=box.SIMPLE_HEAD, title_justify="left", show_edge=False)
    for name in ("requests", "no draft", "whole blocks", "cut alike, at so many tokens", "cut unevenly"):
        table.add_column(name, justify="left" if name.startswith("cut") else "right")
    for one in curve.rounds:
        draft = curve.draft_time(one.requests)
        cut = (
            "  ".join(f"{tokens}: {1000 * (value + draft):.1f}" for tokens, value in zip(points, values, strict=True))
            for points, values in ((one.even_tokens[:-1], one.even[:-1]), (one.cut_tokens, one.cut))
        )
        table.add_row(str(one.requests), f"{1000 * one.plain:.1f}", f"{1000 * (one.whole + draft):.1f}", *cut)
    return table
