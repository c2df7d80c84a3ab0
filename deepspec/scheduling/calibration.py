"""Sequential temperature scaling (STS): one temperature a slot makes the survivals a_k mean what they say.

Left to right, each temperature minimises the calibration error of the cumulative product, those before it fixed. A
temperature is positive, so the order of confidences within a slot stays. The module decodes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepspec.errors import DataError
from deepspec.files import write_json
from deepspec.interop.folder import draft_folder
from deepspec.scheduling.confidence import NUM_BINS, Score, calibration_error, confidences, prefix_scores
from deepspec.scheduling.records import Flags, Slots

# Fewer rounds in a bin on average, and its error is mostly chance: the standard error of a share is then up to 0.11.
ROUNDS_PER_BIN = 20
MIN_ROUNDS = ROUNDS_PER_BIN * NUM_BINS
_GRID = np.logspace(-1, 1, 81)  # 0.1 .. 10 in steps of 6 %, with 1 among them


class Calibration(BaseModel):
    """What is stored with a draft.

    Attributes:
        version: of this format.
        source: whose logits the temperatures divide.
        temperatures: one a slot.
        weights: `weights_id` of the draft.
        details: where the rounds came from, and errors before and after on rounds that were not fitted to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    version: Literal[1] = 1
    source: Literal["head", "max_prob"]
    temperatures: tuple[Annotated[float, Field(gt=0.0)], ...]
    weights: str
    details: dict[str, Any]


def fit_temperatures(slots: Slots) -> tuple[float, ...]:
    """Fit one temperature a slot.

    Args:
        slots: held-out rounds that were proposed in full.

    Raises:
        DataError: a slot has too few rounds, or no accepted or no rejected one.
    """
    check_enough(slots)
    check_both_outcomes(slots)
    reached = np.ones(len(slots.logits))
    temperatures: list[float] = []
    for k in range(slots.logits.shape[1]):
        labelled = slots.labelled[:, k]
        truth, before = slots.accepted[labelled, k], reached[labelled]
        errors = []
        for temperature in _GRID:
            own = confidences(slots.logits[labelled, k], temperature)
            errors.append(calibration_error(before * own, truth))
        # Among equals the one nearest to changing nothing.
        order = sorted(range(len(_GRID)), key=lambda index: (errors[index], abs(np.log(_GRID[index]))))
        temperatures.append(float(_GRID[order[0]]))
        reached = reached * confidences(slots.logits[:, k], temperatures[-1])
    return tuple(temperatures)


def check_enough(slots: Slots) -> None:
    """Refuse rounds that are too few to fit temperatures to.

    Raises:
        DataError: names the slot, what it has and what is needed.
    """
    for k in range(slots.logits.shape[1]):
        labelled = slots.labelled[:, k]
        number = int(labelled.sum())
        if number < MIN_ROUNDS:
            times = "" if not number else f": about {-(-MIN_ROUNDS // number)} times as many prompts"
            raise DataError(
                f"draft position {k + 1} has {number} labelled rounds to fit to, but {MIN_ROUNDS} are needed "
                f"({ROUNDS_PER_BIN} for each of {NUM_BINS} bins). Evaluate more prompts{times}."
            )


def check_both_outcomes(slots: Slots) -> None:
    """Refuse rounds that say nothing about a slot: any temperature at an end of the grid would seem the best.

    Raises:
        DataError: names the slot and what is missing.
    """
    for k in range(slots.logits.shape[1]):
        accepted = slots.accepted[slots.labelled[:, k], k]
        if accepted.all() or not accepted.any():
            which = "accepted" if accepted.all() else "rejected"
            raise DataError(
                f"draft position {k + 1} was {which} in all of its {len(accepted)} labelled rounds to fit to, so no "
                "temperature of it can be told from another. Evaluate more prompts, or prompts of more kinds."
            )


def split(slots: Slots) -> tuple[Flags, Flags]:
    """Rounds to fit to and rounds to report on [N], whole conversations, domain by domain in turn."""
    to_fit = np.zeros(len(slots.domains), dtype=bool)
    for domain in sorted(set(slots.domains)):
        members = [index for index, one in enumerate(slots.domains) if one == domain]
        to_fit[members[::2]] = True
    chosen = to_fit[slots.prompts]
    return chosen, ~chosen


def summary(scores: list[Score]) -> dict[str, Any]:
    """Numbers of a list of scores, the last of which is that of all slots."""
    return {
        "ece": scores[-1].ece,
        "auc": scores[-1].auc,
        "brier": scores[-1].brier,
        "ece_per_slot": [one.ece for one in scores[:-1]],
        "auc_per_slot": [one.auc for one in scores[:-1]],
        "brier_per_slot": [one.brier for one in scores[:-1]],
        "labels_per_slot": [one.number for one in scores[:-1]],
    }


def before_and_after(slots: Slots, temperatures: tuple[float, ...]) -> dict[str, Any]:
    """Summaries of rounds without and with the temperatures."""
    return {
        "rounds": len(slots.logits),
        "prompts": len(np.unique(slots.prompts)),
        "before": summary(prefix_scores(slots)),
        "after": summary(prefix_scores(slots, temperatures)),
    }


def calibration_path(folder: Path, source: str) -> Path:
    """Where a draft's calibration lies."""
    return folder / f"calibration_{source}.json"


def write_calibration(folder: Path, calibration: Calibration, dataset: str) -> tuple[Path, Path]:
    """Store a calibration with the draft, in our form and in the one that SGLang reads; returns both paths.

    Raises:
        DataError: the folder cannot be written, or a slot's error is not known.
    """
    own = calibration_path(folder, calibration.source)
    theirs = folder / f"sglang_sts_{calibration.source}.json"
    errors = {name: calibration.details["held_out"][name]["ece_per_slot"] for name in ("before", "after")}
    unknown = [slot for slot, values in enumerate(zip(*errors.values(), strict=True), start=1) if None in values]
    if unknown:
        raise DataError(
            f"draft position {unknown[0]} has no labelled round among those that were not fitted to, so its "
            "calibration error is not known. Evaluate more prompts."
        )
    try:
        write_json(own, calibration.model_dump(mode="json"))
        write_json(
            theirs,
            {
                "temperatures": list(calibration.temperatures),
                "dataset": dataset,
                "num_samples": calibration.details["fitted_to"]["rounds"],
                "ece_before": errors["before"],
                "ece_after": errors["after"],
            },
        )
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error.strerror}), so the calibration is not stored.") from error
    return own, theirs


def chosen_temperatures(
    setting: str, draft: str | Path, source: str, weights: str, samplings: Sequence[Mapping[str, Any] | None]
) -> tuple[float, ...] | None:
    """The temperatures that a setting `calibration` names; None for none.

    Args:
        setting: `auto`, `none`, or a folder.
        draft: the draft's checkpoint, or its hub id.
        source: `head` or `max_prob`.
        weights: `weights_id` of the draft.
        samplings: all that they will be used under; None where it is not known.

    Raises:
        DataError: the named folder has none, or what is found is damaged, belongs to another draft or was fitted under
            another sampling.
    """
    if setting == "none":
        return None
    folder = draft_folder(draft) if setting == "auto" else Path(setting)
    found = read_calibration(folder, source, weights)
    if found is None and setting != "auto":
        raise DataError(
            f"{calibration_path(Path(setting), source)} does not exist. Make it: deepspec calibrate DRAFT "
            f"confidence={source} records=[FOLDER] output_dir={setting}"
        )
    if found is None:
        return None
    _check_sampling(found, calibration_path(folder, source), samplings)
    return found.temperatures


def _check_sampling(calibration: Calibration, path: Path, samplings: Sequence[Mapping[str, Any] | None]) -> None:
    """Refuse temperatures that say what is accepted under another sampling."""
    fitted = next(iter(calibration.details.get("made_with", {}).get("sampling") or ()), None)
    for now in samplings:
        if fitted is not None and now is not None and _warpers(now) != _warpers(fitted):
            raise DataError(
                f"{path} was fitted to rounds sampled with {dict(fitted)}, but is to be used with {dict(now)}, where "
                "other tokens are accepted. Evaluate with this sampling and schedule=full, calibrate those rounds into "
                "a folder of their own (deepspec calibrate ... output_dir=FOLDER) and give calibration=FOLDER; or use "
                "calibration=none."
            )


def _warpers(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """What counts of a sampling: greedy decoding filters nothing."""
    return dict(sampling) if sampling.get("temperature") else {"temperature": 0.0}


def read_calibration(folder: Path, source: str, weights: str) -> Calibration | None:
    """Read what `deepspec calibrate` stored with a draft; None where it did not.

    Args:
        folder: the draft's checkpoint.
        source: `head` or `max_prob`.
        weights: `weights_id` of the draft as it is now.

    Raises:
        DataError: the file is damaged, or was made with other weights.
    """
    path = calibration_path(folder, source)
    try:
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        calibration = Calibration.model_validate(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise DataError(f"{path} is damaged ({first}). Delete it, or calibrate the draft again.") from error
    if calibration.weights != weights:
        raise DataError(
            f"{path} was made with other weights of this draft. Calibrate it again (deepspec calibrate), or use "
            "calibration=none."
        )
    return calibration
