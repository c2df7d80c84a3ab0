"""The plan itself: what fits where, what takes the room, what to change, how long it takes; as tables or lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rich.table import Table

from deepspec import console
from deepspec.config import TrainConfig
from deepspec.data.cache_format import ENCODINGS, bytes_per_sample
from deepspec.data.cache_writer import in_words
from deepspec.planning import ledger
from deepspec.planning.dryrun import DryRun, Memory, Parameters, StepShape
from deepspec.planning.flops import SequenceCounts, count_sequence, sequence_flops
from deepspec.planning.processes import show_processes
from deepspec.planning.settings import PlanConfig
from deepspec.planning.shapes import target_config
from deepspec.planning.sharding import Held, shares_of, spread

_GIB = 2**30
_REDUCED_VOCABULARY = 32768
_PARTS = {
    ledger.TARGET: "target, {dtype}",
    ledger.MASTERS: "draft, fp32 masters of {trainable} parameters",
    ledger.GRADIENTS: "gradients, fp32",
    ledger.MOMENTS: "AdamW, two fp32 moments",
    ledger.GATHERED: "draft, weights put together for the micro-batch",
    ledger.BUFFERS: "buffers of the communication",
    ledger.COPIES: "low-precision copies of weights",
    ledger.FEATURES: "features and last hidden states of the micro-batch",
    ledger.TARGET_PASS: "target's own forward",
    ledger.ACTIVATIONS: "draft activations",
    ledger.ATTENTION: "attention weights of the draft",
    ledger.HEAD: "head and losses: one chunk, gradients kept",
    ledger.BACKWARD: "backward, passing",
}
_MOVABLE = (ledger.COPIES, ledger.FEATURES, ledger.TARGET_PASS, ledger.ACTIVATIONS, ledger.ATTENTION, ledger.HEAD)


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
        steps: optimizer steps of the run.
        hours: at the given rate, on all devices together.
        checkpoint_bytes: of one checkpoint.
        pass_bytes: of what the features memory keeps of one average sequence.
        cache_bytes: of a feature cache of the whole data, by encoding.
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
    steps: int
    hours: float
    checkpoint_bytes: int
    pass_bytes: int
    cache_bytes: dict[str, int]


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
    flops = sequence_flops(
        train.algorithm, run.parameters, counts, checkpoints_gradients=train.engine.gradient_checkpointing
    )
    optimizer = train.optimizer
    steps = optimizer.steps or (optimizer.epochs or 0) * -(-inputs.num_samples // optimizer.global_batch_size)
    per_second = inputs.rate_tflops * 1e12 * train.engine.num_processes
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
    sizes = run.parameters
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
        steps=steps,
        hours=steps * optimizer.global_batch_size * sum(flops.values()) / per_second / 3600,
        # The draft's own file, the masters and two moments, all fp32.
        checkpoint_bytes=16 * sizes.trainable,
        pass_bytes=(sizes.taps + 1) * sizes.hidden * mean * (4 if train.target.dtype == "float32" else 2),
        cache_bytes={
            encoding: inputs.num_samples * bytes_per_sample(mean, answer, sizes.hidden, sizes.taps, encoding)
            for encoding in ENCODINGS
        },
    )


def find_changes(config: PlanConfig, plan: Plan) -> list[Change]:
    """What the settings that trade something for memory would bring, the largest saving first."""
    train, shape = config.train, plan.shape
    sizes = target_config(train.target)[0]
    run = DryRun(train, sizes)
    shapes: dict[str, StepShape] = {}
    if shape.batch > 1:
        shapes["optimizer.micro_batch_size=1"] = shape._replace(batch=1)
    drawn = min(shape.num_anchors, shape.answer - 1)
    shapes[f"data.num_anchors={max(1, drawn // 2)}"] = shape._replace(num_anchors=max(1, drawn // 2))
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
    if train.algorithm.draft_vocab_size is None and run.parameters.vocab > 2 * _REDUCED_VOCABULARY:
        algorithm = train.algorithm.model_copy(update={"draft_vocab_size": _REDUCED_VOCABULARY})
        other = DryRun(train.model_copy(update={"algorithm": algorithm}), sizes)
        smaller_share = shares_of(train, other.shapes)[train.engine.name]
        peak = spread(other.measure(shape), smaller_share).peak
        found.append(Change(f"algorithm.draft_vocab_size={_REDUCED_VOCABULARY}", peak))
    useful = [change for change in found if change.peak < 0.99 * plan.memory.peak]
    return sorted(useful, key=lambda change: change.peak)


def show_plan(config: PlanConfig) -> None:
    """Print a plan as tables."""
    plan = make_plan(config)
    train, inputs = config.train, config.inputs
    algorithm = train.algorithm
    console.info(
        f"{algorithm.name} for {train.target.name_or_path}: {plan.sizes.trainable / 1e6:,.1f} M trainable parameters "
        f"in {algorithm.num_layers} {algorithm.draft_layers} layers, K = {algorithm.num_draft_tokens}. "
        f"Sizes of the target from {plan.source}."
    )
    shape = plan.shape
    console.info(
        f"Memory of one process at its peak, in the {plan.memory.phase} of {shape.batch} x {shape.length:,} tokens "
        f"with {min(shape.num_anchors, shape.answer - 1)} anchors each"
    )
    console.table(_memory_table(plan, train))
    if train.engine.num_processes > 1:
        show_processes(train, plan.shares, plan.alone)
    if train.engine.device != "cpu":
        console.info("Does it fit?")
        console.table(_fit_table(plan))
    console.info(_advice(plan))
    console.info("")
    counts = plan.counts
    console.info(
        f"Arithmetic of a sequence of {counts.length:,} tokens with {counts.anchors} anchors, {counts.rows:,.0f} "
        f"supervised rows and {counts.positions:,.0f} teacher positions"
    )
    console.table(_work_table(plan))
    disk = plan.checkpoint_bytes / _GIB
    keep = train.checkpoint.keep_last
    console.info(
        f"Disk: {disk:.1f} GiB a checkpoint, {keep * disk:.1f} GiB for the {keep} that are kept, one more while saving."
    )
    caches = ", ".join(f"{encoding} {in_words(size)}" for encoding, size in plan.cache_bytes.items())
    console.info(f"A feature cache (features=cached) of {inputs.num_samples:,} sequences (num_samples): {caches}.")
    if train.features.memory_gib:
        samples = int(train.features.memory_gib * _GIB / plan.pass_bytes)
        console.info(
            f"Host memory: features.memory_gib={train.features.memory_gib:g} keeps the target's passes of about "
            f"{samples:,} sequences ({plan.pass_bytes / 2**20:.1f} MiB each)."
        )
    work = train.optimizer.global_batch_size * sum(plan.flops.values())
    console.info(
        f"Time: {plan.steps:,} steps of {train.optimizer.global_batch_size} sequences, "
        f"{_duration(plan.hours)} on {train.engine.num_processes} device(s) at {inputs.rate_tflops:g} TFLOP/s each. "
        f"A step of all of them is {work / 1e12:,.3g} TFLOP and takes {3600 * plan.hours / plan.steps:,.3g} s."
    )
    length = f"{inputs.mean_length} tokens a sequence, {inputs.mean_answer} of them answer"
    cut = f", cut at data.max_length to {plan.counts.length}" if plan.counts.length < inputs.mean_length else ""
    console.info(
        f"Assumed: {length}{cut}; change with mean_length, mean_answer, rate_tflops={inputs.rate_tflops:g}, "
        f"num_samples={inputs.num_samples}. Memory is that of the longest sequences (length={plan.shape.length}), "
        "traced without data through the real step."
    )
    changes = find_changes(config, plan)
    if changes:
        peaks = "; ".join(f"{change.setting} -> {change.peak / _GIB:.1f} GiB" for change in changes)
        console.info(f"To make the peak of {plan.memory.peak / _GIB:.1f} GiB smaller: {peaks}.")


def _memory_table(plan: Plan, train: TrainConfig) -> Table:
    memory = plan.memory
    table = Table()
    table.add_column("what")
    table.add_column("GiB", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    words = {
        "dtype": train.target.dtype,
        "trainable": f"{plan.sizes.trainable / 1e6:,.1f} M",
    }
    for name, size in ordered_parts(memory.parts).items():
        share = size / memory.peak
        table.add_row(
            _PARTS[name].format(**words), f"{size / _GIB:,.2f}", f"{share:.0%}", "#" * round(30 * share), style=None
        )
    table.add_section()
    table.add_row("peak", f"{memory.peak / _GIB:,.2f}", "", f"{memory.static / _GIB:,.2f} of it whatever the batch")
    return table


def ordered_parts(parts: Mapping[str, int]) -> dict[str, int]:
    """The parts of a peak in the order of a step, those below a thousandth left out."""
    least = sum(parts.values()) / 1000
    return {name: parts[name] for name in _PARTS if parts.get(name, 0) > least}


def _fit_table(plan: Plan) -> Table:
    table = Table()
    for name in ("GPU", "as configured", "largest optimizer.micro_batch_size"):
        table.add_column(name, justify="left" if name == "as configured" else "right")
    for fit in plan.fits:
        verdict = f"yes, {fit.spare / _GIB:.1f} GiB to spare" if fit.spare >= 0 else f"no, {-fit.spare / _GIB:.1f} over"
        table.add_row(f"{fit.gib:g} GiB", verdict, str(fit.micro_batch) if fit.micro_batch else "none")
    return table


def _advice(plan: Plan) -> str:
    memory = plan.memory
    largest = max(memory.parts, key=lambda name: memory.parts[name])
    movable = max(_MOVABLE, key=lambda name: memory.parts.get(name, 0))
    return (
        f"Largest: {_PARTS[largest].split(',')[0].split(' of {')[0]}, {memory.parts[largest] / memory.peak:.0%}. "
        f"Of what the batch decides: {_PARTS[movable]}, {memory.parts.get(movable, 0) / _GIB:.2f} GiB. "
        f"Each further sequence of a micro-batch adds {plan.per_sequence / _GIB:.2f} GiB."
    )


def _work_table(plan: Plan) -> Table:
    total = sum(plan.flops.values())
    table = Table()
    table.add_column("part")
    table.add_column("TFLOP", justify="right")
    table.add_column("share", justify="right")
    for name, amount in plan.flops.items():
        table.add_row(name, f"{amount / 1e12:,.3g}", f"{amount / total:.0%}")
    table.add_section()
    table.add_row("in all", f"{total / 1e12:,.3g}", "")
    return table


def _duration(hours: float) -> str:
    return f"{60 * hours:.1f} minutes" if hours < 1 else f"{hours:,.1f} hours"
