"""What an evaluation keeps on disk while it runs: its conditions and the answers decoded so far.

Nothing is mixed: a folder holds answers to one set of prompts under one set of conditions, a file those of one draft's
weights. The module decodes nothing and computes no statistic.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspec.decoding.rounds import Round, from_json, to_json
from deepspec.errors import DataError
from deepspec.evaluation.tasks import Prompt
from deepspec.files import write_json
from deepspec.interop.folder import read_state

CONDITIONS_FILE = "conditions.json"


class Answer(NamedTuple):
    """One decoded turn as the journal keeps it.

    Attributes:
        request_id: `<conversation>#<turn>`.
        prompt_ids: the conversation up to the answer.
        output_ids: the answer.
        rounds: of the answer.
        finish_reason: stop, length, or context: the target has no room for this turn, which was left out.
        domain: of the conversation.
    """

    request_id: str
    prompt_ids: list[int]
    output_ids: list[int]
    rounds: list[Round]
    finish_reason: str
    domain: str

    @property
    def conversation(self) -> str:
        """The prompt that this is a turn of."""
        return self.request_id.rsplit("#", 1)[0]


def claim_folder(output: Path, conditions: Mapping[str, Any]) -> None:
    """Note what the folder is measured with; refuse to mix two measurements in one folder.

    Args:
        output: folder of the evaluation, made where it does not exist.
        conditions: everything that a number depends on; JSON values only.

    Raises:
        DataError: the folder holds answers made under other conditions, or cannot be written.
    """
    path = output / CONDITIONS_FILE
    try:
        if not path.exists():
            write_json(path, conditions)
            return
        earlier = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}). Choose another output_dir.") from error
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}). Choose another output_dir, or delete that folder.") from error
    difference = _first_difference(earlier, conditions)
    if difference is not None:
        key, before, now = difference
        raise DataError(
            f"{output} holds an evaluation with {key} {before!r}; this one has {now!r}. "
            "Choose another output_dir, or delete that folder."
        )


def _first_difference(earlier: Any, now: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """Dotted key and both values of the innermost difference; what was not noted earlier counts as None."""
    if isinstance(earlier, list) and isinstance(now, list) and len(earlier) == len(now):
        earlier, now = dict(enumerate(earlier)), dict(enumerate(now))
    if not isinstance(earlier, Mapping) or not isinstance(now, Mapping):
        return None if earlier == now else (key, earlier, now)
    for name in now:
        found = _first_difference(earlier.get(name), now[name], f"{key}.{name}" if key else str(name))
        if found is not None:
            return found
    return None


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """Changes whenever an id or a turn of a task does."""
    text = json.dumps([[prompt.id, *prompt.turns] for prompt in prompts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def weights_id(folder: Path) -> str:
    """Changes whenever a draft's weights do: a hash over every tensor that its folder holds.

    Raises:
        CheckpointError: there are none, or a file is damaged.
    """
    digest = hashlib.sha256()
    for name, value in sorted(read_state(folder).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def to_row(answer: Answer, draft_path: str, draft_id: str, cut_by: str) -> dict[str, Any]:
    """A row of the journal; `draft_id` is the `weights_id` of the draft, `cut_by` the `schedule_id` of its schedule."""
    row = {**answer._asdict(), "rounds": [to_json(one) for one in answer.rounds]}
    return {**row, "draft": draft_path, "draft_id": draft_id, "schedule_id": cut_by}


def answers_from_rows(
    rows: Sequence[Mapping[str, Any]], draft_name: str, draft_id: str, cut_by: str, path: Path
) -> dict[str, Answer]:
    """Answers of earlier runs by request.

    Args:
        rows: of the journal.
        draft_name: for the message.
        draft_id: of the draft as it is now.
        cut_by: `schedule_id` of its schedule as it is now.
        path: of the journal, for the message.

    Raises:
        DataError: they were decoded with other draft weights or another schedule, or a row is damaged.
    """
    answers = {}
    for number, row in enumerate(rows, start=1):
        if row.get("draft_id") != draft_id:
            raise DataError(
                f"{path} was decoded with other weights of {draft_name}: those of {row.get('draft')} as it was then. "
                "Choose another output_dir, or delete that file."
            )
        # Rows of the first versions do not say it; theirs hold for whole blocks only.
        if row.get("schedule_id", "") != cut_by:
            raise DataError(
                f"{path} was decoded under another calibration or cost curve than the schedule of {draft_name} reads "
                "now (a file of the same name has changed since). Choose another output_dir, or delete that file."
            )
        try:
            answer = Answer(
                _text(row["request_id"]),
                _ids(row["prompt_ids"]),
                _ids(row["output_ids"]),
                [from_json(one) for one in row["rounds"]],
                _text(row["finish_reason"]),
                _text(row.get("domain", "")),
            )
        except (TypeError, AttributeError, ValueError) as error:
            raise DataError(
                f"{path} line {number} is damaged ({error}). Delete that line; it is then decoded again."
            ) from error
        except KeyError as error:
            raise DataError(
                f"{path} line {number} has no {error}. Delete that line; it is then decoded again."
            ) from error
        except DataError as error:
            raise DataError(f"{path} line {number}: {error} Delete that line; it is then decoded again.") from error
        answers[answer.request_id] = answer
    return answers


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise TypeError("token ids are no list of whole numbers")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} stands where a text belongs")
    return value
