"""Measures drafts against plain decoding: acceptance on every prompt of every task, then latency on a few of them.

Finished prompts are written as they come, so a killed evaluation continues where it stopped, and every number of the
results follows from what is on disk. The module knows drafts only through the decoder and computes no statistic itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from deepspec import console
from deepspec.config import EvalConfig
from deepspec.decoding.schedule import FullSchedule
from deepspec.errors import DataError, EngineError
from deepspec.evaluation.answers import claim_folder
from deepspec.evaluation.crew import Crew, open_crew
from deepspec.evaluation.details import Details
from deepspec.evaluation.latency import Latency, Way, describe_machine, measure_latency
from deepspec.evaluation.outcome import TaskOutcome, draft_outcome, make_results
from deepspec.evaluation.playing import Play
from deepspec.evaluation.preparation import Prepared, prepare
from deepspec.evaluation.report import (
    AUTOREGRESSIVE,
    Results,
    headline,
    keep_other_results,
    render_table,
    write_results,
)
from deepspec.evaluation.report_html import REPORT_FILE, ReportInput, Section, write_report
from deepspec.evaluation.witness import Measured, Witness, find_witness, hear
from deepspec.evaluation.witness_report import witness_section, witness_table, write_witness
from deepspec.runtime import provenance
from deepspec.scheduling.load import Setup, load_rows, measure_loads
from deepspec.scheduling.records import read_records
from deepspec.scheduling.schedules import FixedSchedule
from deepspec.scheduling.section import confidence_sections, load_sections, load_table
from deepspec.scheduling.serving import conversations_of


class Evaluation(NamedTuple):
    """What one call of `measure` measured, for reports that join several.

    Attributes:
        folder: where its round records lie.
        results: the rows and how they were made.
        report: what a page shows.
    """

    folder: Path
    results: Results
    report: ReportInput


def evaluate(config: EvalConfig) -> Evaluation | None:
    """Measure, write results.json and report.html, and print the table, the line to quote and where the page lies.

    Returns:
        What was measured; None in a process that only helped the main one.

    Raises:
        DeepSpecError: something does not fit; found before the first token is decoded. Or the disk is full.
    """
    with open_crew(config) as crew:
        witness = find_witness(config) if crew.is_main else None
        parts = measure_all(config, crew)
    if not parts:
        return None
    joined = join(parts)
    folder = parts[0].folder
    if len(parts) > 1:
        key = hashlib.sha256(json.dumps([part.folder.name for part in parts]).encode()).hexdigest()[:8]
        folder = folder.parent if config.output_dir is not None else folder.parent / f"temperatures_{key}"
    joined = joined._replace(folder=folder)
    publish(joined, folder)
    return joined if witness is None else _with_witness(witness, config, parts, joined)


def measure(config: EvalConfig) -> Evaluation:
    """Measure every draft on every task in this process; round records go into `output_dir` as they come.

    Without an `output_dir` the folder is named by the conditions, so that the same command continues and another one
    does not meet its records.

    Raises:
        DeepSpecError: something does not fit; found before the first token is decoded.
    """
    with open_crew(config) as crew:
        return join(measure_all(config, crew))


def measure_all(config: EvalConfig, crew: Crew) -> list[Evaluation]:
    """Measure at every temperature; processes that help the main one return nothing.

    Raises:
        DeepSpecError: something does not fit; found before the first token is decoded.
    """
    prepared = prepare(config)
    parts = [prepared.at(temperature) for temperature in config.temperatures] or [prepared]
    if not crew.is_main:
        for part in parts:
            for task, prompts in part.tasks:
                for draft in part.drafts:
                    Play(part, draft, task, prompts, crew).help()
        return []
    for part in parts:
        claim_folder(part.folder, part.conditions)
    crew.begin()
    with crew.sharing_threads():
        outcomes = [_decode(part, crew) for part in parts]
    # One that still loads its models, too late to help, would be in the latencies.
    crew.end()
    return [_finish(part, outcome) for part, outcome in zip(parts, outcomes, strict=True)]


def join(parts: Sequence[Evaluation]) -> Evaluation:
    """One evaluation of several that differ in their sampling."""
    first = parts[0]
    if len(parts) == 1:
        return first
    rows = [row for part in parts for row in part.results.rows]
    made_with = {**first.results.provenance, "sampling": [part.results.provenance["sampling"] for part in parts]}
    details = Details()
    for part in parts:
        details = details.joined(part.results.details)
    report = first.report._replace(
        rows=rows,
        provenance=made_with,
        rounds_by={key: rounds for part in parts for key, rounds in part.report.rounds_by.items()},
        details=details,
        sections=[section for part in parts for section in part.report.sections],
    )
    return Evaluation(first.folder, Results(rows, made_with, details), report)


def publish(evaluation: Evaluation, folder: Path) -> None:
    """Write results.json and report.html into a folder, print the table, the line to quote and where they lie.

    Raises:
        DataError: the disk refuses them.
    """
    results = evaluation.results
    try:
        kept = keep_other_results(folder, results.rows, REPORT_FILE)
        path = write_results(folder, results.rows, results.provenance, results.details)
        page = write_report(folder / REPORT_FILE, evaluation.report)
    except OSError as error:
        raise DataError(
            f"the results cannot be written into {folder} ({error.strerror}). Free some space and run the same command "
            "again; no prompt is decoded twice."
        ) from error
    if kept is not None:
        console.info(f"earlier results of this folder, of other drafts, are kept: {kept}")
    console.table(render_table(results.rows, results.provenance))
    if results.details.loads:
        console.table(load_table(results.details.loads))
    for line in headline(results):
        console.info(line)
    console.info(f"results: {path}   page: {page}")


def _with_witness(witness: Witness, config: EvalConfig, parts: Sequence[Evaluation], joined: Evaluation) -> Evaluation:
    """Ask the witness and put what it says beside the results, which are on disk already, whatever becomes of it."""
    sources = [(part.folder, part.results.provenance) for part in parts]
    rows, failures = hear(
        witness, config, [Measured(folder, made["sampling"], made["draft_weights"]) for folder, made in sources]
    )
    missing = {**witness.refused, **failures}
    engine = f"vLLM {witness.vllm.version} on {witness.vllm.device}"
    page = joined.report._replace(sections=[*joined.report.sections, witness_section(rows, missing, engine)])
    made_with = {
        **joined.results.provenance,
        "engine": {"name": "vllm", **witness.vllm._asdict(), "arguments": config.witness.arguments},
    }
    try:
        path = write_witness(joined.folder, rows, missing, made_with)
        write_report(joined.folder / REPORT_FILE, page)
    except OSError as error:
        raise DataError(
            f"what vLLM said cannot be written into {joined.folder} ({error.strerror}). Free some space and run the "
            "same command again; no prompt is decoded twice."
        ) from error
    console.table(witness_table(rows, missing, engine))
    console.info(f"witness: {path}")
    if failures:
        raise EngineError(
            f"vLLM failed with {', '.join(failures)}: {next(iter(failures.values()))} What was measured here is in "
            f"{joined.folder}; the same command asks vLLM for what is left."
        )
    return joined._replace(report=page)


def _decode(part: Prepared, crew: Crew) -> list[TaskOutcome]:
    """The acceptance of every draft on every task."""
    outcomes = []
    for task, prompts in part.tasks:
        found = {}
        for draft in part.drafts:
            answers = Play(part, draft, task, prompts, crew).answers()
            found[draft.name] = draft_outcome(answers, task, part.target)
        outcomes.append(TaskOutcome(task, len(prompts), found))
    return outcomes


def _finish(part: Prepared, outcomes: Sequence[TaskOutcome]) -> Evaluation:
    """Time what is to be timed, and put everything together."""
    config = part.config
    latencies: dict[str, dict[str, Latency]] = {}
    for task, prompts in part.tasks:
        latencies[task.name] = measure_latency(
            part.target,
            _ways(part),
            part.first_requests(prompts[: config.latency_prompts]),
            part.sampling,
            max_new_tokens=config.max_new_tokens,
            seed=config.seed,
            path=part.folder / "latency" / f"{task.name}.jsonl",
            task=task.name,
        )
    rows, details = make_results(part, outcomes, latencies)
    details = _with_loads(part, details)
    made_with = {**provenance(), **part.conditions, "drafts": {draft.name: draft.path for draft in part.drafts}}
    made_with["draft_weights"] = {draft.name: draft.weights for draft in part.drafts}
    if config.schedule.name != "full":
        made_with["draft_schedules"] = {draft.name: draft.cut_by for draft in part.drafts}
    if part.load is not None:
        made_with["load"] = {**config.load.model_dump(mode="json"), "confidence": asdict(part.load.confidence)}
    temperature = config.sampling.temperature
    report = ReportInput(
        rows=rows,
        provenance=made_with,
        rounds_by={
            (outcome.task.name, name, temperature): found.rounds
            for outcome in outcomes
            for name, found in outcome.drafts.items()
        },
        details=details,
        curves={draft.name: _training_curve(Path(draft.path)) for draft in part.drafts},
        examples=[
            example._replace(draft=name, task=outcome.task.name)
            for outcome in outcomes
            for name, found in outcome.drafts.items()
            for example in found.examples
        ],
        next_commands=_next_commands(config),
        sections=_sections(part, details),
    )
    return Evaluation(part.folder, Results(rows, made_with, details), report)


def _with_loads(part: Prepared, details: Details) -> Details:
    """Add what schedules do with several requests in flight, where that was asked for."""
    if part.load is None:
        return details
    draft, config = part.drafts[0], part.config
    setup = Setup(
        target=part.target,
        draft=draft.model,
        name=draft.name,
        weights=draft.weights,
        curve=part.load.curve,
        confidence=part.load.confidence,
        config=config.load,
        sampling=part.sampling,
        seed=config.seed,
        machine=describe_machine(part.target.device),
    )
    recorded = conversations_of(read_records([str(part.folder)], draft.name))
    repeats = measure_loads(setup, part.load_requests(), recorded, part.folder / "load" / f"{draft.name}.jsonl")
    loads, gains = load_rows(repeats, draft.name, config.sampling.temperature)
    return details.model_copy(update={"loads": tuple(loads), "gains": tuple(gains)})


def _sections(part: Prepared, details: Details) -> list[Section]:
    """Confidence and load, which say something where everything was verified."""
    if part.config.schedule.name != "full":
        return []
    return [
        *confidence_sections(part.folder, part.config.sampling.temperature, [draft.name for draft in part.drafts]),
        *load_sections(details.loads, details.gains, part.config.load.max_new_tokens),
    ]


def _ways(part: Prepared) -> list[Way]:
    """What is timed: plain decoding, each draft as it is, and with the shorter blocks that were asked for."""
    ways = [Way(AUTOREGRESSIVE, None, "", None, FullSchedule())]
    for draft in part.drafts:
        ways.append(Way(draft.name, None, draft.weights, draft.model, draft.schedule))
        ways += [
            Way(draft.name, length, draft.weights, draft.model, FixedSchedule(((1, length),)))
            for length in part.config.latency_lengths
            if length <= draft.model.num_draft_tokens
        ]
    return ways


def _training_curve(folder: Path) -> list[dict[str, Any]]:
    """The metrics that the trainer left beside its checkpoints, if any; a line that a kill cut in two is left out."""
    path = folder.expanduser().resolve().parent / "metrics.jsonl"
    if not path.is_file():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            lines += [line] if isinstance(line, dict) else []
    return lines


def _next_commands(config: EvalConfig) -> list[tuple[str, str]]:
    target, drafts = shlex.quote(config.target.name_or_path), shlex.quote(",".join(config.drafts) or "FOLDER")
    base = f"bash scripts/eval/eval.sh --target_name_or_path {target} --draft_name_or_path {drafts}"
    return [
        (f"{base} suite=paper", "the paper's nine benchmarks (their data must be reachable)"),
        (f"{base} task.path=my_prompts.jsonl", "your own prompts"),
    ]
