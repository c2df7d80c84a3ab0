"""Measures drafts against plain decoding: acceptance on every prompt of every task, then latency on a few of them.

Finished prompts are written as they come, so a killed evaluation continues where it stopped. The module knows drafts
only through the decoder and computes no statistic itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspec import console
from deepspec.algorithms.base import DraftModel
from deepspec.algorithms.checkpoint import algorithm_of, load_draft, read_config
from deepspec.config import EvalConfig, TaskConfig
from deepspec.data.chat import render_prompt
from deepspec.data.journal import open_journal
from deepspec.data.prompts import Message
from deepspec.decoding.decoder import Finished, Request, check_requests, generate
from deepspec.decoding.rounds import Round
from deepspec.decoding.sampling import Sampling, check_sampling
from deepspec.decoding.schedule import FullSchedule, Schedule, ThresholdSchedule
from deepspec.errors import ConfigError, DataError
from deepspec.evaluation.answers import (
    Answer,
    answers_from_rows,
    claim_folder,
    prompts_hash,
    to_row,
    weights_id,
)
from deepspec.evaluation.latency import Latency, measure_latency
from deepspec.evaluation.report import (
    AUTOREGRESSIVE,
    ResultRow,
    Results,
    keep_other_results,
    render_table,
    write_results,
)
from deepspec.evaluation.report_html import REPORT_FILE, Example, ReportInput, write_report
from deepspec.evaluation.statistics import summarise
from deepspec.evaluation.tasks import Prompt, load_task
from deepspec.runtime import choose_device, provenance
from deepspec.targets.base import Target

_EXAMPLE_TOKENS = 120


class NamedDraft(NamedTuple):
    """A draft, the name it has in tables, and the `weights_id` of its model."""

    name: str
    path: str
    algorithm: str
    model: DraftModel
    weights: str


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


def evaluate(config: EvalConfig) -> Evaluation:
    """Measure, write results.json and report.html beside the records, and print the table; see `measure`."""
    evaluation = measure(config)
    publish(evaluation, evaluation.folder)
    return evaluation


def publish(evaluation: Evaluation, folder: Path) -> None:
    """Write results.json and report.html into a folder and print the table.

    Raises:
        DataError: the disk refuses them.
    """
    rows, made_with = evaluation.results
    try:
        kept = keep_other_results(folder, rows, REPORT_FILE)
        results = write_results(folder, rows, made_with)
        page = write_report(folder / REPORT_FILE, evaluation.report)
    except OSError as error:
        raise DataError(
            f"the results cannot be written into {folder} ({error.strerror}). Free some space and run the same command "
            "again; no prompt is decoded twice."
        ) from error
    if kept is not None:
        console.info(f"earlier results of this folder, of other drafts, are kept: {kept}")
    console.table(render_table(rows, made_with))
    console.info(f"results: {results}   page: {page}")


def measure(config: EvalConfig) -> Evaluation:
    """Measure every draft on every task; round records go into `output_dir` as they come.

    Without an `output_dir` the folder is named by the conditions, so that the same command continues and another one
    does not meet its records.

    Args:
        config: target, drafts, tasks, sampling.

    Raises:
        DeepSpecError: something does not fit; found before the first token is decoded.
    """
    sampling = check_sampling(Sampling(**config.sampling.model_dump()))
    names = draft_names(config.drafts)
    fields = [read_config(path) for path in config.drafts]
    tasks = {task.name: load_task(task) for task in config.tasks}
    # Every draft brings its own taps; a target that is too small for the default rule is then no obstacle.
    taps = fields[0]["target_layer_ids"] if fields and config.target.layers is None else None
    target = Target.load(config.target, choose_device(config.device), taps)
    drafts = []
    for name, folder, found in zip(names, config.drafts, fields, strict=True):
        model = load_draft(folder, target)
        drafts.append(NamedDraft(name, folder, algorithm_of(found).name, model, weights_id(model)))
    schedule = _schedule(config, drafts)
    requests = {name: _first_requests(prompts, target, config) for name, prompts in tasks.items()}
    longest_block = max((draft.model.num_draft_tokens for draft in drafts), default=0)
    for firsts in requests.values():
        check_requests(target, firsts, config.max_new_tokens + longest_block + 1)
    made_with = _conditions(config, target, tasks)
    output = _folder(config, made_with)
    claim_folder(output, made_with)

    rows: list[ResultRow] = []
    rounds_by: dict[tuple[str, str, float], list[Round]] = {}
    examples: list[Example] = []
    for task in config.tasks:
        prompts = tasks[task.name]
        measured: dict[str, list[Answer]] = {}
        for draft in drafts:
            path = output / "rounds" / f"{task.name}--{draft.name}.jsonl"
            measured[draft.name] = _decode_task(config, target, draft, sampling, schedule, prompts, path, task)
            rounds_by[task.name, draft.name, sampling.temperature] = [
                one for answer in measured[draft.name] for one in answer.rounds
            ]
            examples += _example(draft, task, measured[draft.name], target)
        latency = measure_latency(
            target,
            {draft.name: draft.model for draft in drafts},
            requests[task.name][: config.latency_prompts],
            sampling,
            max_new_tokens=config.max_new_tokens,
            seed=config.seed,
            schedule=schedule,
            task=task.name,
        )
        rows.append(_plain_row(task, sampling, len(prompts), latency.get(AUTOREGRESSIVE)))
        rows += [
            _draft_row(task, sampling, draft, measured[draft.name], config.seed, latency.get(draft.name))
            for draft in drafts
        ]
    full_provenance = {**provenance(), **made_with, "drafts": {draft.name: draft.path for draft in drafts}}
    report = ReportInput(
        rows=rows,
        provenance=full_provenance,
        rounds_by=rounds_by,
        curves={draft.name: _training_curve(Path(draft.path)) for draft in drafts},
        examples=examples,
        next_commands=_next_commands(config),
    )
    return Evaluation(output, Results(rows, full_provenance), report)


def draft_names(paths: Sequence[str]) -> list[str]:
    """Short distinct names of draft folders: the run's name, with the step's where two would be equal.

    Raises:
        ConfigError: the same folder is given twice.
    """
    if len({Path(path).expanduser().resolve() for path in paths}) < len(paths):
        raise ConfigError(f"drafts names a folder twice: {', '.join(paths)}. Give each draft once.")
    parts = [Path(path).expanduser().absolute().parts for path in paths]
    is_step = [part[-1].startswith("step_") and len(part) > 1 for part in parts]
    names = [part[-2] if step else part[-1] for part, step in zip(parts, is_step, strict=True)]
    # Plain decoding has a row of its own under its name.
    if len(set(names)) < len(names) or AUTOREGRESSIVE in names:
        names = ["_".join(part[-2:]) for part in parts]
    if len(set(names)) < len(names):
        names = [f"{name}_{index + 1}" for index, name in enumerate(names)]
    return names


def _schedule(config: EvalConfig, drafts: Sequence[NamedDraft]) -> Schedule:
    if config.confidence_threshold is None:
        return FullSchedule()
    for draft in drafts:
        if not draft.model.has_confidence:
            raise ConfigError(
                f"confidence_threshold is {config.confidence_threshold}, but {draft.name} has no confidence head. "
                "Use confidence_threshold=null, or drafts trained with algorithm.confidence_head=true."
            )
    return ThresholdSchedule(config.confidence_threshold)


def _conditions(config: EvalConfig, target: Target, tasks: Mapping[str, Sequence[Prompt]]) -> dict[str, Any]:
    """Everything but the drafts that a number depends on."""
    settings = config.model_dump(
        mode="json", exclude={"drafts", "output_dir", "results_dir", "latency_prompts", "device"}
    )
    template = str(target.tokenizer.chat_template or "")
    settings["template_hash"] = hashlib.sha256(template.encode()).hexdigest()[:16]
    settings["dtype"] = config.target.dtype
    settings["device"] = str(target.device)
    settings["prompts_hash"] = {name: prompts_hash(prompts) for name, prompts in tasks.items()}
    return settings


def _folder(config: EvalConfig, conditions: Mapping[str, Any]) -> Path:
    if config.output_dir is not None:
        return Path(config.output_dir)
    tasks = "-".join(task.name for task in config.tasks)
    key = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:8]
    name = f"{tasks[:40]}_temperature{config.sampling.temperature:g}_{key}"
    return Path(config.results_dir) / config.target.short_name / name


def _first_requests(prompts: Sequence[Prompt], target: Target, config: EvalConfig) -> list[Request]:
    return [
        Request(f"{prompt.id}#0", _render(target, config, [Message("user", prompt.turns[0])])) for prompt in prompts
    ]


def _render(target: Target, config: EvalConfig, messages: Sequence[Message]) -> list[int]:
    return render_prompt(
        target.tokenizer,
        messages,
        enable_thinking=config.target.enable_thinking,
        system_prompt=config.target.system_prompt,
    )


def _decode_task(
    config: EvalConfig,
    target: Target,
    draft: NamedDraft,
    sampling: Sampling,
    schedule: Schedule,
    prompts: Sequence[Prompt],
    path: Path,
    task: TaskConfig,
) -> list[Answer]:
    """Decode the prompts that the journal lacks; returns the answers of all, in the order of the prompts."""
    with open_journal(path) as journal:
        answers = answers_from_rows(journal.rows, draft.name, draft.weights, path)
        total = sum(len(prompt.turns) for prompt in prompts)
        with console.progress(f"{task.name}: {draft.name}", total=total, done=len(answers)) as bar:
            emitted = rounds = 0
            for answer in _play_turns(config, target, draft.model, sampling, schedule, prompts, answers):
                journal.append(to_row(answer, draft.path, draft.weights))
                emitted += sum(one.emitted for one in answer.rounds)
                rounds += len(answer.rounds)
                bar.advance(1, f"tau {emitted / max(rounds, 1):.2f}")
    order = [f"{prompt.id}#{turn}" for prompt in prompts for turn in range(len(prompt.turns))]
    return [answers[key] for key in order if key in answers]


def _play_turns(
    config: EvalConfig,
    target: Target,
    model: DraftModel,
    sampling: Sampling,
    schedule: Schedule,
    prompts: Sequence[Prompt],
    answers: dict[str, Answer],
) -> Iterator[Answer]:
    """Decode turn after turn; each turn reads the answers that this draft gave before. Fills `answers` as it goes."""
    for turn in range(max((len(prompt.turns) for prompt in prompts), default=0)):
        requests = []
        for prompt in prompts:
            key = f"{prompt.id}#{turn}"
            if turn >= len(prompt.turns) or key in answers:
                continue
            history: list[Message] = []
            for earlier in range(turn):
                text = target.tokenizer.decode(answers[f"{prompt.id}#{earlier}"].output_ids, skip_special_tokens=True)
                history += [Message("user", prompt.turns[earlier]), Message("assistant", str(text))]
            requests.append(Request(key, _render(target, config, [*history, Message("user", prompt.turns[turn])])))
        prompt_ids = {request.prompt_id: list(request.prompt_ids) for request in requests}
        for finished in generate(
            target,
            model,
            requests,
            sampling,
            max_new_tokens=config.max_new_tokens,
            batch_size=config.batch_size,
            seed=config.seed,
            schedule=schedule,
            timers=False,
        ):
            answer = _answer(finished, prompt_ids[finished.prompt_id])
            answers[answer.request_id] = answer
            yield answer


def _answer(finished: Finished, prompt_ids: list[int]) -> Answer:
    return Answer(finished.prompt_id, prompt_ids, finished.output_ids, finished.rounds, finished.finish_reason)


def _plain_row(task: TaskConfig, sampling: Sampling, num_prompts: int, latency: Latency | None) -> ResultRow:
    return ResultRow(
        task=task.name,
        draft=AUTOREGRESSIVE,
        algorithm=AUTOREGRESSIVE,
        domain=task.domain,
        temperature=sampling.temperature,
        num_prompts=num_prompts if latency is None else latency.num_prompts,
        rounds=0 if latency is None else latency.rounds,
        acceptance_length=1.0,
        acceptance_length_ci95=None,
        survival=(),
        conditional_acceptance=(),
        acceptance_rate=None,
        **({} if latency is None else latency.columns()),
    )


def _draft_row(
    task: TaskConfig,
    sampling: Sampling,
    draft: NamedDraft,
    answers: Sequence[Answer],
    seed: int,
    latency: Latency | None,
) -> ResultRow:
    # A conversation is one cluster of the bootstrap: its turns are not independent.
    by_prompt: dict[str, list[Round]] = {}
    for answer in answers:
        by_prompt.setdefault(answer.request_id.rsplit("#", 1)[0], []).extend(answer.rounds)
    summary = summarise(by_prompt, draft.model.num_draft_tokens, seed)
    return ResultRow(
        task=task.name,
        draft=draft.name,
        algorithm=draft.algorithm,
        domain=task.domain,
        temperature=sampling.temperature,
        num_prompts=summary.num_prompts,
        rounds=summary.rounds,
        acceptance_length=summary.acceptance_length,
        acceptance_length_ci95=summary.acceptance_length_ci95,
        survival=tuple(summary.survival),
        conditional_acceptance=tuple(summary.conditional_acceptance),
        acceptance_rate=summary.acceptance_rate,
        verified_yield=summary.verified_yield,
        **({} if latency is None else latency.columns()),
    )


def _example(draft: NamedDraft, task: TaskConfig, answers: Sequence[Answer], target: Target) -> list[Example]:
    """The first answer of a task, each token coloured by where it came from."""
    if not answers:
        return []
    answer = answers[0]
    tokens = answer.output_ids[:_EXAMPLE_TOKENS]
    kinds = ["plain"]
    for one in answer.rounds:
        kinds += ["accepted"] * one.accepted + ["bonus"] * (one.emitted - one.accepted)
    segments: list[tuple[str, str]] = []
    for token, kind in zip(tokens, kinds, strict=False):
        segments.append((str(target.tokenizer.decode([token])), kind))
    prompt = str(target.tokenizer.decode(answer.prompt_ids, skip_special_tokens=True))
    return [Example(draft.name, prompt, segments, task.name)]


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
