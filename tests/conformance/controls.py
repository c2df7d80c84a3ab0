"""Exports that are wrong on purpose, in the three ways that cost acceptance in silence.

What is broken is what others have got wrong: a layer id counted from one, a rotary base that fell back to its
default, a block layout taken for the other one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance.drafts import ROPE_THETA, K, Workshop

_TAPS = frozenset({"target_layer_ids", "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"})
_FALLEN_BACK = 10000.0


def export(workshop: Workshop, case: str, form: str, control: str | None) -> Path:
    """The export of a case, or a copy of it that is broken.

    Args:
        workshop: makes it.
        case: key of CASES.
        form: of the export.
        control: taps, rope, layout or None.
    """
    if control is None:
        return workshop.export(case, form)
    if control == "layout" and case != "dspark":
        return workshop.export(case, form, draft=_flipped(workshop, case))
    whole = workshop.export(case, form)
    broken = whole.parent / f"{form}_{control}"
    if not broken.is_dir():
        shutil.copytree(whole, broken)
        path = broken / "config.json"
        path.write_text(json.dumps(_BREAK[control](json.loads(path.read_text()))))
    return broken


def _flipped(workshop: Workshop, case: str) -> Path:
    """The same weights, said to be of the other layout; exported honestly from there on."""
    source = workshop.draft(case)
    folder = workshop.folder / "broken" / f"{case}_flipped"
    if not folder.is_dir():
        shutil.copytree(source, folder)
        path = folder / "config.json"
        fields = json.loads(path.read_text())
        was = fields["deepspec_algorithm"]["layout"]
        fields["deepspec_algorithm"]["layout"] = "fill_in" if was == "anchor_first" else "anchor_first"
        fields["block_size"] = K + 1 if was == "anchor_first" else K
        fields["sample_from_anchor"] = was != "anchor_first"
        path.write_text(json.dumps(fields))
    return folder


def _changed(fields: Any, change: Callable[[str, Any], Any]) -> Any:
    """Every value of a nested config, changed by its key."""
    if not isinstance(fields, dict):
        return fields
    return {key: change(key, _changed(value, change)) for key, value in fields.items()}


def _shift_taps(fields: dict[str, Any]) -> Any:
    return _changed(fields, lambda key, value: [one + 1 for one in value] if key in _TAPS else value)


def _forget_rope(fields: dict[str, Any]) -> Any:
    def forget(key: str, value: Any) -> Any:
        if key != "rope_theta":
            return value
        assert value == ROPE_THETA, "a config names another base, so this would break nothing"
        return _FALLEN_BACK

    return _changed(fields, forget)


def _sample_past_the_anchor(fields: dict[str, Any]) -> Any:
    return fields | {"sample_from_anchor": False}


_BREAK = {"taps": _shift_taps, "rope": _forget_rope, "layout": _sample_past_the_anchor}
