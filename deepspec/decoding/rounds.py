"""The record that every round of decoding leaves, and its JSON form.

Every number of a report is computed from these records. The module knows neither models nor statistics and imports no
torch, so that records can be analysed on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from deepspec.errors import DataError

ENDINGS = ("reject", "full", "stop", "limit")
"""reject: a draft token was refused; full: all proposed tokens were accepted; stop: an accepted draft token or the
bonus token ends the answer; limit: max_new_tokens were out after this round."""

JsonValue = str | int | float | list[float] | None


class Round(NamedTuple):
    """One draft and one verification of one request.

    Attributes:
        prompt_id: the request, unique within a task (a turn of a conversation is a request of its own).
        round: index of the round within the request, from 0.
        position: index of the anchor in the request's token sequence (prompt included).
        proposed: draft tokens that were verified, 0..K.
        accepted: draft tokens that were accepted, 0..proposed.
        ended_by: one of ENDINGS.
        confidence_logits: one logit per drafted slot, slot 0 first; None for drafts without a confidence head.
        max_draft_prob: max_v q_k(v) per drafted slot; empty where the draft did not report it.
        seconds_draft: wall-clock seconds of the draft step of the batch that this round was part of; 0.0 when timers
            are off.
        seconds_verify: the same for the target's forward and the acceptance test.
        emitted: tokens counted for the acceptance length: accepted + 1, or accepted where an accepted stop token ended
            the round. A round cut by the limit counts all that it verified.
        overlap: alpha_k = sum_v min(p_k, q_k) per verified slot, the probability that sampling accepts a draft there;
            empty where it was not measured.
        rejected: the draft token that was refused, None where none was.
    """

    prompt_id: str
    round: int
    position: int
    proposed: int
    accepted: int
    ended_by: str
    confidence_logits: tuple[float, ...] | None
    max_draft_prob: tuple[float, ...]
    seconds_draft: float
    seconds_verify: float
    emitted: int
    overlap: tuple[float, ...] = ()
    rejected: int | None = None


def to_json(record: Round) -> dict[str, JsonValue]:
    """Return the record as a JSON object whose keys are the field names."""
    logits = record.confidence_logits
    measured: dict[str, JsonValue] = {"overlap": list(record.overlap)} if record.overlap else {}
    if record.rejected is not None:
        measured["rejected"] = record.rejected
    return {
        "prompt_id": record.prompt_id,
        "round": record.round,
        "position": record.position,
        "proposed": record.proposed,
        "accepted": record.accepted,
        "ended_by": record.ended_by,
        "confidence_logits": None if logits is None else list(logits),
        "max_draft_prob": list(record.max_draft_prob),
        "seconds_draft": record.seconds_draft,
        "seconds_verify": record.seconds_verify,
        "emitted": record.emitted,
        **measured,
    }


def from_json(row: Mapping[str, object]) -> Round:
    """Build a record from what `to_json` wrote.

    Raises:
        DataError: a field is missing, unknown or of the wrong type, or the counts contradict each other.
    """
    needed = set(Round._fields) - {"overlap", "rejected"}
    if not needed <= set(row) <= set(Round._fields):
        missing, unknown = sorted(needed - set(row)), sorted(set(row) - set(Round._fields))
        raise DataError(f"round record: missing fields {missing}, unknown fields {unknown}.")
    logits = row["confidence_logits"]
    record = Round(
        prompt_id=_string(row, "prompt_id"),
        round=_integer(row, "round"),
        position=_integer(row, "position"),
        proposed=_integer(row, "proposed"),
        accepted=_integer(row, "accepted"),
        ended_by=_string(row, "ended_by"),
        confidence_logits=None if logits is None else _numbers(row, "confidence_logits"),
        max_draft_prob=_numbers(row, "max_draft_prob"),
        seconds_draft=_number("seconds_draft", row["seconds_draft"]),
        seconds_verify=_number("seconds_verify", row["seconds_verify"]),
        emitted=_integer(row, "emitted"),
        overlap=_numbers(row, "overlap") if "overlap" in row else (),
        rejected=_integer(row, "rejected") if "rejected" in row else None,
    )
    if record.ended_by not in ENDINGS:
        raise DataError(f"round record: ended_by is {record.ended_by!r}, not one of {', '.join(ENDINGS)}.")
    if not 0 <= record.accepted <= record.proposed or record.emitted not in (record.accepted, record.accepted + 1):
        raise DataError(
            f"round record of prompt {record.prompt_id!r}: proposed {record.proposed}, accepted {record.accepted} and "
            f"emitted {record.emitted} contradict each other."
        )
    drafted = {len(one) for one in (record.max_draft_prob, record.confidence_logits) if one}
    if len(drafted) > 1 or record.proposed > min(drafted, default=record.proposed):
        raise DataError(
            f"round record of prompt {record.prompt_id!r}: {record.proposed} tokens proposed, but max_draft_prob and "
            f"confidence_logits are of {' and '.join(map(str, sorted(drafted)))} drafted ones."
        )
    if len(record.overlap) > max(record.proposed, *drafted, 0):
        raise DataError(
            f"round record of prompt {record.prompt_id!r}: overlap holds {len(record.overlap)} slots, more than were "
            "drafted."
        )
    return record


def _wrong(name: str, value: object, expected: str) -> DataError:
    return DataError(f"round record: {name!r} is {value!r}, expected {expected}.")


def _string(row: Mapping[str, object], name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    return value


def _integer(row: Mapping[str, object], name: str) -> int:
    value = row[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name, value, "an integer")
    return value


def _number(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _wrong(name, value, "a number")
    return float(value)


def _numbers(row: Mapping[str, object], name: str) -> tuple[float, ...]:
    values = row[name]
    if not isinstance(values, (list, tuple)):
        raise _wrong(name, values, "a list of numbers")
    return tuple(_number(name, value) for value in values)
