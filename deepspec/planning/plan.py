"""The numbers of a plan: what fits where, what to change, how much disk, how many hours; no words."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedConfig

from deepspec.config import TrainConfig
from deepspec.planning import ledger
from deepspec.planning.amounts import cache_sizes, checkpoints_at_once, share_of_passes
from deepspec.planning.dryrun import DryRun, Memory, Parameters, StepShape
from deepspec.planning.flops import TARGET_PASS, SequenceCounts, count_sequence, sequence_flops
from deepspec.planning.settings import PlanConfig
from deepspec.planning.shapes import target_config
from deepspec.planning.sharding import Held, shares_of, spread
from deepspec.planning.sources import batches_read_ahead, holds_layers

_GIB = 2**30
_REDUCED_VOCABULARY = 32768


class Change(NamedTuple):
    """A setting that takes less memory, and the peak with it."""

    setting: str
    peak: int


class Fit(NamedTuple):
    """How a GPU copes.

    Attributes:
        gib: its memory.
        spare: bytes left at the configured micro-batch, negative where it does not fit.
        micro_batch: the most sequences of a micro-batch that fit, 0 for none.
    """

    gib: float
    spare: int
    micro_batch: int


class Plan(NamedTuple):
    """Everything that a plan says.

    Attributes:
        source: where the target's sizes come from.
        sizes: of draft and target.
        shape: of the micro-batch that memory is planned for.
        memory: of that micro-batch, in one process.
        alone: the same if one process held everything.
        shares: what a process holds of the training state, under each engine that the run could have.
        per_sequence: bytes that one more sequence in a micro-batch adds.
        fits: one a GPU.
        counts: of the average sequence.
        flops: of it, by part.
        share_of_passes: for how many of the sequences that a draft learns from the target runs.
        steps: optimizer steps of the run.
        hours: at the given rate, on all devices together; None without a rate.
        checkpoint_bytes: of one checkpoint.
        checkpoints: that lie on the disk at most.
        pass_bytes: of what the features memory keeps of one average sequence.
        read_ahead_bytes: of the batches of a cache that wait in the host's memory for a GPU.
        cache_bytes: of a feature cache of the whole data, by encoding and for DeepSpec's own format.
        cache_flops: that writing one takes for the average sequence.
        cache_hours: that writing one takes, likewise.
    """

    source: str
    sizes: Parameters
    shape: StepShape
    memory: Memory
    alone: Memory
    shares: dict[str, Held]
    per_sequence: int
    fits: list[Fit]
    counts: SequenceCounts
    flops: dict[str, float]
    share_of_passes: float
    steps: int
    hours: float | None
    checkpoint_bytes: int
    checkpoints: int
    pass_bytes: int
    read_ahead_bytes: int
    cache_bytes: dict[str, int]
    cache_flops: float
    cache_hours: float | None


def make_plan(config: PlanConfig) -> Plan:
    """Plan a run; nothing is loaded but the target's config.json.

    Args:
        config: the run and what is assumed.

    Raises:
        DeepSpecError: the run cannot be.
    """
    train, inputs = config.train, config.inputs
    sizes_of_target, source = target_config(train.target)
    run = DryRun(train, sizes_of_target)
    length = inputs.length or train.data.max_length
    prompt = min(inputs.mean_length - inputs.mean_answer, length // 2)
    shape = StepShape(train.optimizer.micro_batch_size, length, length - prompt, train.data.num_anchors)
    shares = shares_of(train, run.shapes)
    share = shares[train.engine.name]
    alone = run.measure(shape)
    memory = spread(alone, share)
    more = spread(run.measure(shape._replace(batch=shape.batch + 1)), share)
    per_sequence = more.peak - memory.peak
    mean = min(inputs.mean_length, train.data.max_length)
    answer = max(2, round(inputs.mean_answer * mean / inputs.mean_length))
    counts = count_sequence(mean, answer, train.data.num_anchors, train.algorithm.num_draft_tokens, train.anchor_sets)
    sizes, optimizer = run.parameters, train.optimizer
    flops = sequence_flops(train.algorithm, sizes, counts, checkpoints_gradients=train.engine.gradient_checkpointing)
    steps = optimizer.steps or (optimizer.epochs or 0) * -(-inputs.num_samples // optimizer.global_batch_size)
    pass_bytes = (sizes.taps + 1) * sizes.hidden * mean * (4 if train.target.dtype == "float32" else 2)
    passes = share_of_passes(train, pass_bytes, inputs.num_samples, steps)
    # Its whole head says how likely the answers are, whoever reads that later.
    cache_flops = flops[TARGET_PASS] + 2.0 * sizes.hidden * sizes.vocab * answer
    if passes:
        flops[TARGET_PASS] *= passes
    else:
        del flops[TARGET_PASS]
    waiting = batches_read_ahead(train) if train.engine.device != "cpu" else 0
    fits = []
    for gib in inputs.gpu_gib:
        spare = int((gib - inputs.reserve_gib) * _GIB) - memory.peak
        # With data.max_tokens_per_batch or max_anchors_per_batch a larger micro-batch may hold no more than this one.
        more_sequences = spare // per_sequence if per_sequence > 0 else min(0, spare)
        in_step = optimizer.global_batch_size // train.engine.num_processes
        most = min(max(0, shape.batch + more_sequences), in_step)
        # Training refuses a micro-batch that does not divide the step.
        divisors = (count for count in range(most, 0, -1) if in_step % count == 0)
        fits.append(Fit(gib, spare, next(divisors, 0)))
    return Plan(
        source=source,
        sizes=sizes,
        shape=shape,
        memory=memory,
        alone=alone,
        shares=shares,
        per_sequence=per_sequence,
        fits=fits,
        counts=counts,
        flops=flops,
        share_of_passes=passes,
        steps=steps,
        hours=_hours(config, steps * optimizer.global_batch_size * sum(flops.values())),
        # The draft's own file, the masters and two moments, all fp32.
        checkpoint_bytes=16 * sizes.trainable,
        checkpoints=checkpoints_at_once(train.checkpoint, steps),
        pass_bytes=pass_bytes,
        # Those that wait, and the one that is being copied.
        read_ahead_bytes=(waiting + 1) * alone.phases["forward"][ledger.FEATURES] if waiting else 0,
        cache_bytes=cache_sizes(train, inputs.num_samples, mean, answer, sizes.hidden, sizes.taps),
        cache_flops=cache_flops,
        cache_hours=_hours(config, inputs.num_samples * cache_flops),
    )


def _hours(config: PlanConfig, flops: float) -> float | None:
    rate = config.inputs.rate_tflops
    return None if rate is None else flops / (rate * 1e12 * config.train.engine.num_processes) / 3600


def find_changes(config: PlanConfig, plan: Plan) -> list[Change]:
    """What the settings that trade something for memory would bring, the largest saving first."""
    train, shape = config.train, plan.shape
    sizes = target_config(train.target)[0]
    run = DryRun(train, sizes)
    shapes: dict[str, StepShape] = {}
    if shape.batch > 1:
        shapes["optimizer.micro_batch_size=1"] = shape._replace(batch=1)
    drawn = min(shape.num_anchors, shape.answer - 1)
    fewer = max(1, drawn // 2)
    sets = f" features.anchors_per_target_pass={fewer * train.anchor_sets}" if train.anchor_sets > 1 else ""
    shapes[f"data.num_anchors={fewer}{sets}"] = shape._replace(num_anchors=fewer)
    half = shape.length // 2
    if half > max(train.algorithm.num_draft_tokens, shape.length - shape.answer + 2):
        answer = half - (shape.length - shape.answer)
        shapes[f"data.max_length={half}"] = shape._replace(length=half, answer=answer)
    share = plan.shares[train.engine.name]
    found = [Change(setting, spread(run.measure(smaller), share).peak) for setting, smaller in shapes.items()]
    found += [
        Change(f"engine={name}", spread(plan.alone, other).peak)
        for name, other in plan.shares.items()
        if name != train.engine.name
    ]
    if not train.engine.gradient_checkpointing:
        peak = spread(run.measure(shape, checkpoints_gradients=True), share).peak
        found.append(Change("engine.gradient_checkpointing=true", peak))
    if train.features.overlaps:
        peak = spread(run.measure(shape, overlaps=False), share).peak
        found.append(Change("features.overlap=false", peak))
    if holds_layers(train):
        found.append(Change(*_without_layers(train, sizes, shape, share)))
    if train.algorithm.draft_vocab_size is None and run.parameters.vocab > 2 * _REDUCED_VOCABULARY:
        algorithm = train.algorithm.model_copy(update={"draft_vocab_size": _REDUCED_VOCABULARY})
        other = DryRun(train.model_copy(update={"algorithm": algorithm}), sizes)
        smaller_share = shares_of(train, other.shapes)[train.engine.name]
        peak = spread(other.measure(shape), smaller_share).peak
        found.append(Change(f"algorithm.draft_vocab_size={_REDUCED_VOCABULARY}", peak))
    useful = [change for change in found if change.peak < 0.99 * plan.memory.peak]
    return sorted(useful, key=lambda change: change.peak)


def _without_layers(train: TrainConfig, sizes: PreTrainedConfig, shape: StepShape, share: Held) -> tuple[str, int]:
    """What keeps the target's layers out of memory, and the peak then."""
    wanted = {
        "features=cached": ("features", train.features.source == "online", {"source": "cached"}),
        "evaluation.every_steps=null": ("evaluation", train.evaluation.every_steps is not None, {"every_steps": None}),
    }
    changed = {word: (part, values) for word, (part, is_needed, values) in wanted.items() if is_needed}
    update = {part: getattr(train, part).model_copy(update=values) for part, values in changed.values()}
    other = DryRun(train.model_copy(update=update), sizes)
    return " ".join(changed), spread(other.measure(shape), share).peak
