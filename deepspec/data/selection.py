"""Which of many prompts are kept: none twice, none of the evaluation tasks, domains in proportion, some held out.

Rows are read once and spooled beside the output; a number of bytes that does not depend on its text is held of each.
What is kept depends on the rows and the seed alone. A killed job leaves no output and is simply run again.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from deepspec import console
from deepspec.config import DataJobConfig, compose_eval, config_folder
from deepspec.data.grams import DUPLICATE_WORDS, GramIndex, Hashes, grams, without_set_phrases
from deepspec.data.prompts import BLANK, Conversation, RowError, conversation_from_row
from deepspec.data.sources import PlacedRow, stream_rows
from deepspec.data.spool import Rows, Spool, UsableRow
from deepspec.errors import ConfigError, DataError
from deepspec.evaluation.tasks import load_task
from deepspec.files import hash_file, write_atomically, write_json

# Ten words in a row are hardly said twice by chance.
CONTAMINATION_WORDS = 10
# Words that more prompts of one task share are its template, or a set phrase.
_MOST_PROMPTS = 2
_EXAMPLES = 5


class Selected(NamedTuple):
    """What was kept.

    Attributes:
        train: rows of the spool that are trained on, ascending.
        held_out: rows that are set aside, ascending.
        report: counts and examples of everything that was left out, and why.
    """

    train: Rows
    held_out: Rows
    report: dict[str, Any]


def select(config: DataJobConfig, folder: Path) -> tuple[Spool, Selected]:
    """Read the job's prompts and choose.

    Args:
        config: the job.
        folder: an empty folder for what is read.

    Raises:
        DataError: a row is broken and may not be skipped, a source or task cannot be read, or too little is left.
        ConfigError: domain_weights name a domain that no row has.
    """
    selection = config.selection
    reading = _Reading(config)
    spool = Spool(folder)
    with console.progress("reading prompts", total=selection.max_rows) as bar:
        spool.fill(reading.usable(bar), config.seed)
    later, first, is_same = spool.repeated()
    for row, earlier, same in zip(later.tolist(), first.tolist(), is_same.tolist(), strict=True):
        if same:
            reading.leave_out("the same prompt again", spool.place(row))
        else:
            detail = f"its id is already used by {spool.place(earlier)}"
            reading.refuse(spool.place(row), "the id is used twice", detail)
    everything = np.setdiff1d(np.arange(len(spool)), later)
    kept = spool.firsts(everything, selection.similarity) if selection.deduplicate else everything
    report = reading.report() | {"near_duplicates": len(everything) - len(kept)}
    report["usable"] = {name: len(rows) for name, rows in spool.by_domain(kept).items()}
    if not len(kept):
        raise DataError(
            f"no prompt is left of {report['rows']:,} rows; left out: {json.dumps(report['left_out'])}, and "
            f"{report['contaminated_rows']:,} that evaluation tasks ask. Give other prompts, or change "
            "selection.max_characters or dataset.decontaminate."
        )
    weights = selection.domain_weights or {}
    held_out = draw(spool.by_domain(kept), weights, selection.held_out)
    rest = np.setdiff1d(kept, held_out)
    train = draw(spool.by_domain(rest), weights, config.limit) if len(rest) else rest
    near = np.array(_near(spool, train, held_out, selection.similarity), dtype=np.int64)
    train = np.setdiff1d(train, near)
    if not len(train):
        raise DataError(
            f"selection.held_out={selection.held_out:,} leaves nothing of {len(kept):,} prompts to train on. Lower it."
        )
    report["near_held_out"] = len(near)
    for name, rows in (("train", train), ("held_out", held_out)):
        report[name] = {domain: len(members) for domain, members in spool.by_domain(rows).items()}
    return spool, Selected(train, held_out, report)


def write_selected(config: DataJobConfig, path: Path) -> Path:
    """Choose prompts and write them with a report beside them, in the order in which they were read.

    Args:
        config: the job.
        path: file of the prompts to train on; `held_out.jsonl` and `report.json` go into the same folder, the report
            last, with the hashes of both.

    Raises:
        DataError: see `select`; or the folder cannot be written, or another process writes it.
    """
    held_out = path.with_name("held_out.jsonl")
    work = path.parent / ".prompts"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / ".prompts.lock", timeout=0):
            # A report speaks for the files that lie beside it.
            (path.parent / "report.json").unlink(missing_ok=True)
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                spool, selected = select(config, work)
                hashes = {}
                for file, rows in ((path, selected.train), (held_out, selected.held_out)):
                    if file == held_out and not len(rows):
                        file.unlink(missing_ok=True)  # of an earlier run
                        continue
                    write_atomically(file, spool.lines(rows))
                    hashes[file.name] = hash_file(file)
                chosen_by = {"seed": config.seed, "limit": config.limit, "on_bad_row": config.on_bad_row}
                settings = {**chosen_by, **config.selection.model_dump(), "dataset": config.dataset.model_dump()}
                write_json(
                    path.parent / "report.json",
                    {**selected.report, "settings": settings, "sha256": hashes},
                )
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except Timeout as error:
        raise DataError(f"{path.parent} is being written by another process. Choose another output_dir.") from error
    except OSError as error:
        raise DataError(
            f"prompts cannot be written into {path.parent} ({error.strerror}). Make room there, or choose another "
            "output_dir, and run the same command again."
        ) from error
    _tell(config, selected, path)
    return path


def _tell(config: DataJobConfig, selected: Selected, path: Path) -> None:
    report, source = selected.report, config.prompts or config.dataset.hub_id
    reasons = {reason: entry["rows"] for reason, entry in report["left_out"].items()}
    reasons |= {"near-duplicates": report["near_duplicates"], "near a held-out prompt": report["near_held_out"]}
    reasons |= {f"in the evaluation task {name}": entry["rows"] for name, entry in report["contaminated"].items()}
    for reason, count in reasons.items():
        if count:
            console.info(f"{source}: {count:,} left out ({reason})")
    if not report["contaminated"]:
        console.info("not compared with evaluation tasks: dataset.decontaminate=[paper] leaves out what they ask")
    domains = ", ".join(f"{name or '(no domain)'} {count:,}" for name, count in report["train"].items())
    console.info(f"{len(selected.train):,} of {report['rows']:,} prompts: {path} ({domains})")
    if len(selected.held_out):
        console.info(f"{len(selected.held_out):,} held out: {path.with_name('held_out.jsonl')}")


def draw(domains: Mapping[str, Rows], weights: Mapping[str, float], count: int | None) -> Rows:
    """Take the first `count` rows in drawn order, or as many of each domain as its weight asks for; ascending.

    Raises:
        ConfigError: a weight is given for a domain that no row has.
    """
    available = {name: len(rows) for name, rows in domains.items()}
    unknown = [name for name in weights if name not in available]
    if unknown:
        raise ConfigError(
            f"selection.domain_weights names {unknown[0]!r}, which no prompt has. "
            f"Domains here: {', '.join(f'{name!r} ({size:,})' for name, size in available.items()) or 'none'}."
        )
    if not weights:
        # Domains by their own sizes; what is left of the count by rounding goes to the largest remainders.
        weights = available
    takes = quotas(available, weights, count)
    chosen = [rows[: takes.get(name, 0)] for name, rows in domains.items()]
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, dtype=np.int64)


def quotas(available: Mapping[str, int], weights: Mapping[str, float], count: int | None) -> dict[str, int]:
    """How many of each domain make `count` by weight; what a small domain lacks, the others give.

    Args:
        available: how many there are of each.
        weights: of each; those without one, or with 0, give none.
        count: how many in all; None takes as many as the weights allow to be kept exactly.
    """
    waiting = {name for name, weight in weights.items() if weight > 0}
    if count is None:
        total = sum(weights[name] for name in waiting)
        count = int(min((available[name] * total / weights[name] for name in waiting), default=0) + 1e-9)
    taken: dict[str, int] = {}
    while waiting:
        left = count - sum(taken.values())
        total = sum(weights[name] for name in waiting)
        shares = {name: left * weights[name] / total for name in sorted(waiting)}
        small = [name for name, share in shares.items() if available[name] <= share]
        if not small:
            taken |= {name: int(share) for name, share in shares.items()}
            rest = count - sum(taken.values())
            for name in sorted(shares, key=lambda name: (int(shares[name]) - shares[name], name))[:rest]:
                taken[name] += 1
            break
        taken |= {name: available[name] for name in small}
        waiting -= set(small)
    return taken


class _Reading:
    """One pass over the rows; counts what it leaves out."""

    def __init__(self, config: DataJobConfig) -> None:
        self._config = config
        self._asked = _asked_by_tasks(config)
        self._index = GramIndex([asked.grams for asked in self._asked])
        self._left_out: dict[str, dict[str, Any]] = {}
        self._contaminated: dict[str, dict[str, Any]] = {
            task: {"prompts": count, "rows": 0, "examples": []}
            for task, count in Counter(asked.task for asked in self._asked).items()
        }
        self._rows_of: dict[str, int] = {}
        self._rows = self._contaminated_rows = self._usable = 0

    def usable(self, bar: console.ProgressBar) -> Iterator[UsableRow]:
        """Yield the usable rows, and their grams."""
        for placed in stream_rows(self._config):
            if placed.row.problem == BLANK:
                self.leave_out(BLANK, placed.place)
                continue
            if self._rows == self._config.selection.max_rows:
                break
            self._rows += 1
            self._rows_of[placed.source] = self._rows_of.get(placed.source, 0) + 1
            bar.advance(1, f"{self._usable:,} usable")
            try:
                conversation = _conversation(placed)
            except RowError as error:
                self.refuse(placed.place, str(error), str(error))
                continue
            if sum(len(turn.content) for turn in conversation.turns) > self._config.selection.max_characters:
                self.leave_out("longer than selection.max_characters", placed.place)
                continue
            texts = [turn.content for turn in conversation.turns if turn.role == "user"]
            if not self._is_contaminated(texts, placed):
                self._usable += 1
                yield UsableRow(placed, conversation, grams(texts, DUPLICATE_WORDS))

    def refuse(self, place: str, reason: str, detail: str) -> None:
        """Stop at a broken row, or count it.

        Raises:
            DataError: broken rows may not be skipped.
        """
        if self._config.on_bad_row == "stop":
            raise DataError(f"{place}: {detail}. Repair it, or leave such rows out, counted, with on_bad_row=skip.")
        self.leave_out(reason, place)

    def leave_out(self, reason: str, place: str) -> None:
        """Count a row that is not used."""
        entry = self._left_out.setdefault(reason, {"rows": 0, "first": []})
        entry["rows"] += 1
        if len(entry["first"]) < _EXAMPLES:
            entry["first"].append(place)

    def report(self) -> dict[str, Any]:
        """What was read and what was left out."""
        return {
            "rows": self._rows,
            "sources": self._rows_of,
            "left_out": self._left_out,
            "contaminated_rows": self._contaminated_rows,
            "contaminated": self._contaminated,
        }

    def _is_contaminated(self, texts: list[str], placed: PlacedRow) -> bool:
        if not self._asked:
            return False
        found = self._index.overlap(grams(texts, CONTAMINATION_WORDS)).texts.tolist()
        # The first prompt of each task that shares something.
        hits = {self._asked[number].task: self._asked[number].prompt_id for number in reversed(found)}
        for task, prompt_id in hits.items():
            entry = self._contaminated[task]
            entry["rows"] += 1
            if len(entry["examples"]) < _EXAMPLES:
                entry["examples"].append({"row": placed.place, "prompt": prompt_id})
        self._contaminated_rows += bool(hits)
        return bool(hits)


def _conversation(placed: PlacedRow) -> Conversation:
    if placed.row.problem is not None:
        raise RowError(placed.row.problem)
    conversation = conversation_from_row(placed.row.value)
    has_id = isinstance(placed.row.value, Mapping) and placed.row.value.get("id") is not None
    return conversation._replace(id=placed.prefix + conversation.id) if has_id else conversation


class _Asked(NamedTuple):
    """What an evaluation task asks: one of its prompts."""

    task: str
    prompt_id: str
    grams: Hashes


def _asked_by_tasks(config: DataJobConfig) -> list[_Asked]:
    """The prompts of every task to be kept apart from."""
    asked = []
    for word in config.dataset.decontaminate:
        group = "suite" if (config_folder() / "suite" / f"{word}.yaml").is_file() else "task"
        for task in compose_eval([f"{group}={word}"]).tasks:
            # All of its prompts, whatever an evaluation would take, and without the words that it puts around them.
            whole = task.model_copy(update={"limit": None, "template": "{prompt}", "first_turn_only": False})
            try:
                prompts = load_task(whole, f"leave {word} out of dataset.decontaminate")
            except DataError as error:
                raise DataError(f"dataset.decontaminate: {error}") from error
            held = without_set_phrases([grams(prompt.turns, CONTAMINATION_WORDS) for prompt in prompts], _MOST_PROMPTS)
            asked += [_Asked(task.name, prompt.id, one) for prompt, one in zip(prompts, held, strict=True)]
    return asked


def _near(spool: Spool, rows: Rows, held_out: Rows, similarity: float) -> list[int]:
    """Rows that are near-duplicates of a held-out one: all of them, where MinHash finds nearly all."""
    if not len(held_out):
        return []
    index = GramIndex([_grams_of_line(line) for line in spool.lines(held_out)])
    near = []
    with console.progress("comparing with held-out prompts", total=len(rows)) as bar:
        for row, line in zip(rows.tolist(), spool.lines(rows), strict=True):
            if (index.overlap(_grams_of_line(line)).jaccard >= similarity).any():
                near.append(row)
            bar.advance(1)
    return near


def _grams_of_line(line: str) -> Hashes:
    turns = conversation_from_row(json.loads(line)).turns
    return grams([turn.content for turn in turns if turn.role == "user"], DUPLICATE_WORDS)
