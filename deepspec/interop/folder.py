"""The files of a draft: a folder here or a hub id; config.json and safetensors, never a pickle or code."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from deepspec.errors import CheckpointError
from deepspec.interop.reading import native_name

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")


def draft_folder(name: str | Path, revision: str | None = None) -> Path:
    """The folder of a draft; a text that names no folder but looks like a hub id is fetched (config and safetensors).

    Args:
        name: folder, hub id, or hub id with a revision as in ORG/NAME@v1.
        revision: branch, tag or commit on the hub, where the name does not say it.

    Raises:
        CheckpointError: the hub does not have it or cannot be reached.
    """
    path = Path(name).expanduser()
    # os.path: a name that is too long for the disk is no folder either, and no error.
    parts = None if isinstance(name, Path) or os.path.exists(path) else _HUB_ID.fullmatch(name)
    if parts is None:
        return path
    hub_id, wanted = parts[1], parts[2] or revision
    try:
        return Path(snapshot_download(hub_id, revision=wanted, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"draft '{name}' is neither a folder here nor to be had from the hub: {reason} "
            "Give the folder that holds its config.json."
        ) from error


def read_json_config(path: Path) -> dict[str, Any]:
    """The content of a folder's config.json, whoever wrote it.

    Raises:
        CheckpointError: there is none, or it is not a JSON object.
    """
    if not os.path.isfile(path / CONFIG):
        raise CheckpointError(
            f"{path} is not a draft checkpoint: it has no {CONFIG}. "
            "Give the folder that holds it, such as <output_dir>/<exp_name>/step_latest, or a hub id."
        )
    try:
        fields = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path / CONFIG} is not valid JSON ({error}). Restore it from where it came.") from error
    if not isinstance(fields, dict):
        raise CheckpointError(
            f"{path / CONFIG} holds a {type(fields).__name__}, not an object, hence architectures None. Restore it."
        )
    return fields


def read_weights(path: Path) -> dict[str, Tensor]:
    """All weights of a folder, by the names in its files.

    Raises:
        CheckpointError: there are none in safetensors, or a file is damaged.
    """
    weights = sorted(file for file in path.glob("*.safetensors") if file.name.startswith("model"))
    if not weights:
        pickles = sorted(file.name for file in path.glob("*.bin"))
        way_out = f" Convert {pickles[0]} with safetensors' own convert tool." if pickles else ""
        raise CheckpointError(
            f"{path} has no {WEIGHTS}. Drafts are read from safetensors only, never from pickles.{way_out}"
        )
    state: dict[str, Tensor] = {}
    for file in weights:
        try:
            state |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged ({error}). Use an earlier checkpoint.") from error
    return state


def read_state(path: Path) -> dict[str, Tensor]:
    """All weights of a folder by our names, those that are no part of a draft left out.

    Raises:
        CheckpointError: as `read_weights`.
    """
    named = ((native_name(name), value) for name, value in read_weights(path).items())
    return {name: value for name, value in named if name is not None}
