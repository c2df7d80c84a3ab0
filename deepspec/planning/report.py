"""A plan in tables and lines: what fits where, what takes the room, what to change, how long it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from deepspec import console
from deepspec.config import TrainConfig
from deepspec.data.cache_writer import in_words
from deepspec.planning import ledger
from deepspec.planning.plan import Plan, find_changes, make_plan
from deepspec.planning.processes import show_processes
from deepspec.planning.settings import PlanConfig, PlanInputs
from deepspec.planning.sources import holds_layers, memory_gib

_GIB = 2**30
_PARTS = {
    ledger.TARGET: "{target}, {dtype}",
    ledger.PROBE: "draft once more, {dtype}, to decode prompts (evaluation.every_steps)",
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
    shape, phase = plan.shape, _phase(plan.memory.phase, train)
    console.info(
        f"Memory of one process at its peak, in the {phase} of {shape.batch} x {shape.length:,} tokens with "
        f"{min(shape.num_anchors, shape.answer - 1)} anchors each"
    )
    console.table(_memory_table(plan, train))
    if train.engine.num_processes > 1:
        show_processes(train, plan.shares, plan.alone)
    if train.engine.device != "cpu":
        console.info("Does it fit?")
        console.table(_fit_table(plan))
    console.info(_advice(plan, train))
    console.info("")
    counts = plan.counts
    console.info(
        f"Arithmetic of a sequence of {counts.length:,} tokens with {counts.anchors} anchors, {counts.rows:,.0f} "
        f"supervised rows and {counts.positions:,.0f} teacher positions"
    )
    console.table(_work_table(plan))
    for line in _beside_the_step(plan, train, inputs):
        console.info(line)
    console.info(_time(plan, train, inputs))
    length = f"{inputs.mean_length} tokens a sequence, {inputs.mean_answer} of them answer"
    cut = f", cut at data.max_length to {plan.counts.length}" if plan.counts.length < inputs.mean_length else ""
    rate = "" if inputs.rate_tflops is None else f"rate_tflops={inputs.rate_tflops:g}, "
    console.info(
        f"Assumed: {length}{cut}; change with mean_length, mean_answer, {rate}"
        f"num_samples={inputs.num_samples}. Memory is that of the longest sequences (length={plan.shape.length}), "
        "traced without data through the real step."
    )
    changes = find_changes(config, plan)
    if changes:
        peaks = "; ".join(f"{change.setting} -> {change.peak / _GIB:.1f} GiB" for change in changes)
        console.info(f"To make the peak of {plan.memory.peak / _GIB:.1f} GiB smaller: {peaks}.")


def _beside_the_step(plan: Plan, train: TrainConfig, inputs: PlanInputs) -> Iterator[str]:
    """Lines about disk and host memory."""
    disk, keep = plan.checkpoint_bytes / _GIB, train.checkpoint
    rules = {"keep_last": keep.keep_last, "keep_every": keep.keep_every, "keep_best": keep.keep_best}
    chosen = ", ".join(f"checkpoint.{name}={value}" for name, value in rules.items() if value is not None)
    yield (
        f"Disk: {disk:.1f} GiB a checkpoint, {plan.checkpoints * disk:.1f} GiB for the {plan.checkpoints:,} that lie "
        f"there at most, the one being written included ({chosen})."
    )
    features, is_cached = train.features, train.features.source == "cached"
    encoding = "deepspec_v2" if features.format == "deepspec_v2" else features.encoding
    sizes = plan.cache_bytes.items()
    caches = ", ".join(f"{name} {in_words(size)}" for name, size in sizes if (name == encoding if is_cached else True))
    hours = "" if plan.cache_hours is None else f", {_duration(plan.cache_hours)} at the rate below"
    yield (
        f"A feature cache (features=cached) of {inputs.num_samples:,} sequences (num_samples): {caches}. Writing one "
        f"takes {plan.cache_flops / 1e12:,.3g} TFLOP a sequence{hours}"
        f"{', which are no part of the time below' if is_cached else ''}."
    )
    if memory_gib(train):
        samples = int(memory_gib(train) * _GIB / plan.pass_bytes)
        yield (
            f"Host memory: features.memory_gib={features.memory_gib:g} keeps the target's passes of about {samples:,} "
            f"sequences ({plan.pass_bytes / 2**20:.1f} MiB each) in every process: the target runs for "
            f"{plan.share_of_passes:.0%} of the sequences that the draft learns from."
        )
    if plan.read_ahead_bytes:
        yield (
            f"Host memory: {in_words(plan.read_ahead_bytes)} in every process for the batches that are read ahead "
            f"(features.prefetch_batches={features.prefetch_batches})."
        )


def _time(plan: Plan, train: TrainConfig, inputs: PlanInputs) -> str:
    sequences, devices = train.optimizer.global_batch_size, train.engine.num_processes
    work = f"A step of all of them is {sequences * sum(plan.flops.values()) / 1e12:,.3g} TFLOP"
    steps = f"Time: {plan.steps:,} steps of {sequences} sequences"
    if plan.hours is None:
        said = f"{steps}. {work}; for hours, give rate_tflops=<TFLOP/s that this CPU reaches>."
    else:
        at = f"{devices} device(s) at {inputs.rate_tflops:g} TFLOP/s each"
        said = f"{steps}, {_duration(plan.hours)} on {at}. {work} and takes {3600 * plan.hours / plan.steps:,.3g} s."
    decoded = f" Decoding prompts adds {train.evaluation.max_share:.0%} at most."
    return said + decoded if train.evaluation.every_steps else said


def _memory_table(plan: Plan, train: TrainConfig) -> Table:
    memory = plan.memory
    table = Table()
    table.add_column("what")
    table.add_column("GiB", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    words = _words(plan, train)
    for name, size in ordered_parts(memory.parts).items():
        share = size / memory.peak
        table.add_row(
            _PARTS[name].format(**words), f"{size / _GIB:,.2f}", f"{share:.0%}", "#" * round(30 * share), style=None
        )
    table.add_section()
    table.add_row("peak", f"{memory.peak / _GIB:,.2f}", "", f"{memory.static / _GIB:,.2f} of it whatever the batch")
    return table


def _words(plan: Plan, train: TrainConfig) -> dict[str, str]:
    """What the names of parts are filled in with."""
    return {
        "dtype": train.target.dtype,
        "target": "target" if holds_layers(train) else "embedding and head of the target",
        "trainable": f"{plan.sizes.trainable / 1e6:,.1f} M",
    }


def _phase(name: str, train: TrainConfig) -> str:
    return "reading of features" if name == "target pass" and train.features.source == "cached" else name


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


def _advice(plan: Plan, train: TrainConfig) -> str:
    memory = plan.memory
    largest = max(memory.parts, key=lambda name: memory.parts[name])
    its_name = _PARTS[largest].format(**_words(plan, train)).partition(",")[0]
    movable = max(_MOVABLE, key=lambda name: memory.parts.get(name, 0))
    return (
        f"Largest: {its_name}, {memory.parts[largest] / memory.peak:.0%}. "
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
