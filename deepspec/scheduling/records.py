"""Round records of evaluations as tables of slots: what a draft predicted of each, and what became of it.

The module reads files and knows neither models nor torch. Letters: N rounds, K draft tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspec.data.journal import read_journal
from deepspec.decoding.rounds import Round, from_json
from deepspec.errors import DataError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Source = Literal["head", "max_prob"]

CONDITIONS = "conditions.json"
# How far down evaluations are looked for where a folder is none, and how many are named.
_DEPTH = 3
_MOST_NAMED = 6
# A probability of exactly 0 or 1 has no logit.
_EDGE = 1e-12


class Recorded(NamedTuple):
    """The rounds of one draft on one task.

    Attributes:
        task: name of the task.
        draft: name of the draft in tables.
        draft_path: its folder, a `step_latest` followed to the step; or its hub id.
        weights: its `weights_id`.
        domain: domain of each conversation, by conversation.
        rounds: rounds of each conversation, turn after turn, by conversation.
        conditions: what the evaluation was measured with.
    """

    task: str
    draft: str
    draft_path: str
    weights: str
    domain: dict[str, str]
    rounds: dict[str, list[Round]]
    conditions: dict[str, Any]

    @property
    def num_draft_tokens(self) -> int:
        """K: every round reports all drafted slots, however many were verified."""
        return max(len(one.max_draft_prob) for rounds in self.rounds.values() for one in rounds)

    @property
    def has_head(self) -> bool:
        """Whether the draft predicted its acceptance."""
        return next(iter(self.rounds.values()))[0].confidence_logits is not None


class Slots(NamedTuple):
    """Rounds as a table, one row a round.

    Attributes:
        logits: [N, K] logits of c_k.
        accepted: [N, K] slots 0..k were all accepted.
        labelled: [N, K] slot k was verified; slots behind an accepted stop token were not.
        overlap: [N, K] alpha_k, NaN where it was not measured.
        emitted: [N] tokens that the round counts: no bonus token follows an accepted stop token.
        prompts: [N] index of the conversation; answers to one prompt in several evaluations are one.
        domains: domain of each conversation.
    """

    logits: Floats
    accepted: Flags
    labelled: Flags
    overlap: Floats
    emitted: NDArray[np.int64]
    prompts: NDArray[np.int64]
    domains: list[str]

    def rows(self, chosen: Flags | NDArray[np.int64]) -> Slots:
        """Only some rounds, by flags or by indices; conversations keep their indices."""
        return Slots(
            self.logits[chosen],
            self.accepted[chosen],
            self.labelled[chosen],
            self.overlap[chosen],
            self.emitted[chosen],
            self.prompts[chosen],
            self.domains,
        )


def read_records(folders: Sequence[str], draft: str | None = None) -> list[Recorded]:
    """Read the rounds of evaluations.

    Args:
        folders: output folders of evaluations (they hold conditions.json and rounds/).
        draft: name or folder of the only draft to read; None reads all.

    Raises:
        DataError: a folder holds no evaluation, the draft is not in it, or a file is damaged.
    """
    found: list[Recorded] = []
    for folder in folders:
        base = Path(folder).expanduser()
        conditions = _conditions(base)
        for path in sorted((base / "rounds").glob("*.jsonl")):
            one = _read(path, conditions)
            if one is not None:
                found.append(one)
    names = sorted({one.draft for one in found})
    if draft is not None:
        found = [one for one in found if one.draft == draft or _same_folder(one.draft_path, draft)]
    if not found:
        raise DataError(
            f"{', '.join(folders) or 'records=[]'}: no rounds{f' of {draft}' if draft else ''}. It holds: "
            f"{', '.join(names) or 'none'}. Measure the draft first: deepspec eval drafts=[FOLDER] output_dir=..."
        )
    return found


def _conditions(base: Path) -> dict[str, Any]:
    """What the evaluation in a folder was measured with."""
    path = base / CONDITIONS
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{base} {_without_evaluation(base)}") from error
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {error}. Run the evaluation again, or give the output_dir of another."
        ) from error


def _without_evaluation(base: Path) -> str:
    """Why a folder is none, and the evaluations that lie further down."""
    if not base.is_dir():
        return "is no folder. Give the output_dir of `deepspec eval`."
    inside = sorted(path.parent for depth in range(1, _DEPTH + 1) for path in base.glob("*/" * depth + CONDITIONS))
    if not inside:
        return f"holds no evaluation (it has no {CONDITIONS}). Give the output_dir of `deepspec eval`."
    named = ", ".join(str(path.relative_to(base)) for path in inside[:_MOST_NAMED])
    more = f" and {len(inside) - _MOST_NAMED} more" if len(inside) > _MOST_NAMED else ""
    return f"holds no evaluation itself, but some lie in it: {named}{more}. Give one, such as records=[{inside[0]}]."


def _same_folder(one: str, other: str) -> bool:
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


def _read(path: Path, conditions: dict[str, Any]) -> Recorded | None:
    task, _, draft = path.stem.partition("--")
    domain_of_task = next((one["domain"] for one in conditions.get("tasks", []) if one["name"] == task), "")
    domains: dict[str, str] = {}
    rounds: dict[str, list[Round]] = {}
    row: dict[str, Any] = {}
    for number, row in enumerate(read_journal(path), start=1):
        try:
            conversation = str(row["request_id"]).rsplit("#", 1)[0]
            found = [from_json(one) for one in row["rounds"]]
            folder, weights = str(row["draft"]), str(row["draft_id"])
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} line {number} is no answer ({error}). Delete that line.") from error
        except DataError as error:
            raise DataError(f"{path} line {number}: {error} Delete that line.") from error
        if found:
            # Older records lack the domain, but synthetic tasks put it into the id: held_out/code/<hash>.
            parts = conversation.split("/")
            domains[conversation] = row.get("domain") or domain_of_task or (parts[1] if len(parts) > 2 else task)
            rounds.setdefault(conversation, []).extend(found)
    if not rounds:
        return None
    # The order in which answers were finished is chance, and nothing may depend on it.
    return Recorded(task, draft, folder, weights, domains, dict(sorted(rounds.items())), conditions)


def is_full(record: Round) -> bool:
    """Whether the record shows no cut by a schedule: behind a rejection or a stop token none can be seen."""
    return record.proposed == len(record.max_draft_prob) or record.ended_by in ("stop", "limit", "reject")


def full_only(records: Iterable[Recorded]) -> list[Recorded]:
    """The records, where all were proposed in full.

    Raises:
        DataError: a schedule cut blocks, so what lies behind the cuts is unknown.
    """
    checked = list(records)
    for one in checked:
        schedule = one.conditions.get("schedule", {"name": "full"})
        has_cuts = any(not is_full(record) for rounds in one.rounds.values() for record in rounds)
        if schedule.get("name") != "full" or has_cuts:
            raise DataError(
                f"the rounds of {one.draft} on {one.task} were cut by a schedule, so nothing is known of the slots "
                "behind the cuts. Evaluate with schedule=full into another output_dir."
            )
    return checked


def one_draft(records: Sequence[Recorded]) -> str:
    """The name of the only draft in the records.

    Raises:
        DataError: there are several, or it was measured with different weights or samplings.
    """
    names = sorted({one.draft for one in records})
    if len(names) > 1:
        raise DataError(f"records hold several drafts: {', '.join(names)}. Choose one with draft=<name>.")
    if len({one.weights for one in records}) > 1:
        raise DataError(
            f"the rounds of {names[0]} were made with different weights. Give evaluations of one checkpoint."
        )
    samplings = samplings_of(records)
    for other in samplings[1:]:
        if other != samplings[0]:
            raise DataError(
                f"the rounds of {names[0]} were sampled differently: {samplings[0]} and {other}. Acceptance depends on "
                "it: give evaluations at one temperature."
            )
    return names[0]


def samplings_of(records: Sequence[Recorded]) -> list[Any]:
    """What the rounds were sampled with, for each task; None where an evaluation does not say it."""
    return [one.conditions.get("sampling") for one in records]


def source_of(records: Sequence[Recorded], wanted: str) -> Source:
    """`head` or `max_prob`; `auto` is the head where all records have one.

    Raises:
        DataError: a head is asked for that a draft does not have.
    """
    without = [one.draft for one in records if not one.has_head]
    if wanted == "head" and without:
        raise DataError(f"{without[0]} has no confidence head. Use confidence=max_prob, or confidence=auto.")
    return "max_prob" if wanted == "max_prob" or without else "head"


def slots_of(records: Sequence[Recorded], source: Source) -> Slots:
    """The rounds of several tasks of one draft as one table."""
    block = max(one.num_draft_tokens for one in records)
    logits, accepted, labelled, overlap, emitted, prompts = [], [], [], [], [], []
    domains: list[str] = []
    indices: dict[tuple[str, str], int] = {}
    places = np.arange(block)
    for one in records:
        for conversation, rounds in one.rounds.items():
            index = indices.setdefault((one.task, conversation), len(domains))
            if index == len(domains):
                domains.append(one.domain[conversation])
            for record in rounds:
                logits.append(_logits(record, source))
                accepted.append(places < record.accepted)
                labelled.append(places < record.proposed)
                row = np.full(block, np.nan)
                row[: len(record.overlap)] = record.overlap
                overlap.append(row)
                emitted.append(record.emitted)
                prompts.append(index)
    table = (np.array(logits), np.array(accepted), np.array(labelled), np.array(overlap))
    return Slots(*table, np.array(emitted), np.array(prompts), domains)


def _logits(record: Round, source: Source) -> Floats:
    if source == "head":
        assert record.confidence_logits is not None, "source_of has checked"
        return np.array(record.confidence_logits)
    probs: Floats = np.clip(np.array(record.max_draft_prob), _EDGE, 1 - _EDGE)
    logits: Floats = np.log(probs) - np.log1p(-probs)
    return logits
