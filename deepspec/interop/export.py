"""`deepspec export`: from a checked draft to a folder that an engine loads, with a model card, verified by decoding.

The folder is made beside its place and renamed into it, so a half-written one is never taken for whole.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from deepspec import console
from deepspec.algorithms.checkpoint import algorithm_of, check_target, layer_config_of, read_config
from deepspec.errors import ConfigError, DataError
from deepspec.evaluation.answers import weights_id
from deepspec.files import sync, write_json
from deepspec.interop.card import write_card
from deepspec.interop.engines import Draft, draft_facts, refusal
from deepspec.interop.folder import CONFIG, WEIGHTS, draft_folder, read_state
from deepspec.interop.hub import upload
from deepspec.interop.lint import lint, require_sound
from deepspec.interop.settings import ExportConfig
from deepspec.interop.taps import eagle3_default
from deepspec.interop.verification import check_rounds
from deepspec.interop.writing import TargetNames, Written, needed_vocabulary, write
from deepspec.scheduling.calibration import read_calibration
from deepspec.scheduling.cost import read_curve, write_sglang_table
from deepspec.targets.facts import TargetFacts, read_facts
from deepspec.targets.head_only import load_head_only
from deepspec.targets.loading import is_local_target, source_of

_EXPORTS = Path("~/checkpoints/deepspec/exports")
STS_FILE, COST_FILE = "sts.json", "sps_table.json"


class _Source(NamedTuple):
    """A draft to export, in our words."""

    path: Path
    name: str
    fields: dict[str, Any]
    state: dict[str, Tensor]
    facts: Draft


def run_export(config: ExportConfig) -> Path:
    """Write one draft in one format and return the folder.

    Raises:
        DeepSpecError: the draft is unsound, the format cannot hold it, or a file is missing; nothing is left behind.
    """
    target = read_facts(config.target)
    source = _read_source(config, target)
    folder = _free_folder(config, source.name)
    why = refusal(source.facts, config.format)
    if why is not None:
        raise ConfigError(f"{source.name} cannot be exported with format={config.format}: {why}")
    allowed = frozenset({"target_keys"} | ({"untrained"} if config.allow_untrained else set()))
    for one in require_sound(lint(source.fields, source.state), str(source.path), allowed):
        console.info(f"note: {one.text}")
    state = dict(source.state)
    needed = needed_vocabulary(source.fields, state, config.format, config.vocabulary == "own")
    if needed:
        taps = tuple(source.fields["target_layer_ids"])
        head = load_head_only(config.target.model_copy(update={"layers": taps}), torch.device("cpu")).head
        # A tied head is the embedding itself, and safetensors refuses to write one tensor under two names.
        kept = slice(None) if "d2t" not in state else state["d2t"] + torch.arange(len(state["d2t"]))
        rows = head.weight[kept].clone()
        both = {"embed_tokens.weight": head.embedding, "lm_head.weight": rows}
        state |= {name: both[name] for name in sorted(needed)}
    if config.push_to is not None and config.format == "speculators" and is_local_target(config.target):
        raise ConfigError(
            f"format=speculators names the target in config.json, and nobody else has {config.target.name_or_path}. "
            "Name it by its hub id (target.name_or_path=ORG/NAME), or leave push_to out."
        )
    names = TargetNames(str(source_of(config.target)), target.architectures)
    written = _cast(write(source.fields, state, algorithm_of(source.fields), config.format, names), config.dtype)
    with _staged(folder) as staging:
        _write_files(config, source, target, written, staging)
    if config.verify:
        check_rounds(config, source.fields, source.state, source.path, folder)
    console.info(f"{source.name} as {config.format}: {folder}")
    if config.push_to is not None:
        upload(folder, config.push_to, private=config.private)
        console.info(f"uploaded to {config.push_to}")
    return folder


def _read_source(config: ExportConfig, target: TargetFacts) -> _Source:
    path = draft_folder(config.draft)
    fields = read_config(path)
    where = config.target.name_or_path
    check_target(fields, path, where, target.hidden_size, target.num_layers, target.vocab_size, target.softcap)
    if fields["target_layer_ids"] is None:
        fields["target_layer_ids"] = list(eagle3_default(target.num_layers))
    fields.setdefault("num_target_layers", target.num_layers)
    layers = layer_config_of(fields, path).to_dict()
    parts = path.expanduser().resolve().parts
    asked = Path(config.draft).expanduser().absolute().parts
    name = (parts[-2] if parts[-1].startswith("step_") else asked[-1]).partition("@")[0]
    return _Source(
        path,
        name,
        {key: value for key, value in layers.items() if key in _FROM_LAYERS and value is not None} | fields,
        read_state(path),
        draft_facts(fields, algorithm_of(fields), target),
    )


# What a config may leave to the defaults of its class, and engines want to read.
_FROM_LAYERS = (
    "rope_parameters",
    "head_dim",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "layer_types",
)


def _free_folder(config: ExportConfig, name: str) -> Path:
    folder = Path(config.output_dir or _EXPORTS / f"{name}_{config.format}").expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"output_dir {folder} exists. Remove it, or give another output_dir.")
    return folder


def _cast(written: Written, dtype: str | None) -> Written:
    state = written.state
    if dtype is not None:
        wanted: torch.dtype = getattr(torch, dtype)
        state = {name: value.to(wanted) if value.is_floating_point() else value for name, value in state.items()}
    found = str(state["fc.weight"].dtype).removeprefix("torch.")
    fields = dict(written.fields)
    inner = fields.get("transformer_layer_config")
    if isinstance(inner, dict):
        fields["transformer_layer_config"] = inner | {"dtype": found}
    return Written(fields | {"dtype": found}, state)


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """A folder beside its place that is renamed into it when all of it is written, and removed when it is not."""
    staging: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        yield staging
        for file in staging.iterdir():
            sync(file)
        # mkdtemp makes the folder private.
        staging.chmod(0o755)
        sync(staging)
        if folder.exists():
            folder.rmdir()
        os.replace(staging, folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{folder} cannot be written ({error}); nothing is left of it. Free some space or give another output_dir."
        ) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def _write_files(config: ExportConfig, source: _Source, target: TargetFacts, written: Written, folder: Path) -> None:
    state = {name: value.detach().cpu().contiguous() for name, value in written.state.items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(written.fields, indent=2) + "\n", encoding="utf-8")
    tables = []
    if config.format == "sglang":
        tables = _write_tables(config, source, folder)
    write_card(config, source.name, source.path, source.facts, tables, folder)


def _write_tables(config: ExportConfig, source: _Source, folder: Path) -> list[str]:
    """Temperatures and cost curve where SGLang's scheduler reads them; returns the files' names."""
    made = []
    given = Path(config.calibration) if config.calibration is not None else _calibration_beside(source.path)
    if given is not None:
        write_json(folder / STS_FILE, _temperatures(given, source.facts))
        made.append(STS_FILE)
    if config.cost is not None:
        curve = read_curve(config.cost)
        context = curve.contexts[0] if config.cost_context is None else config.cost_context
        if context not in curve.contexts:
            raise ConfigError(
                f"cost_context {context}: {config.cost} has lines for {', '.join(map(str, curve.contexts))}."
            )
        write_sglang_table(folder / COST_FILE, curve, context)
        made.append(COST_FILE)
    return made


def _calibration_beside(folder: Path) -> Path | None:
    """The temperatures that lie with a draft for SGLang, where they were fitted to the weights that lie there."""
    beside = folder / "sglang_sts_head.json"
    if not beside.is_file():
        return None
    try:
        made_for = read_calibration(folder, "head", weights_id(folder))
    except DataError as error:
        raise DataError(
            f"{beside} would be exported, but {error} Or name another file with calibration=FILE."
        ) from error
    if made_for is None:
        raise DataError(
            f"{beside} lies there without calibration_head.json, so nothing says which weights it was fitted to. "
            "Calibrate the draft again (deepspec calibrate), delete the file, or name it with calibration=FILE."
        )
    return beside


def _temperatures(path: Path, facts: Draft) -> dict[str, Any]:
    """SGLang's calibration file, checked: one positive temperature a slot."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"calibration {path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise DataError(f"calibration {path} is not JSON ({error}).") from error
    values = content.get("temperatures") if isinstance(content, dict) else None
    slots = facts.algorithm.num_draft_tokens
    if (
        not isinstance(values, list)
        or len(values) != slots
        or not all(isinstance(value, int | float) and value > 0 for value in values)
    ):
        raise DataError(
            f"calibration {path}: temperatures must be {slots} positive numbers, one a slot. Make it with "
            "`deepspec calibrate`."
        )
    keys = ("temperatures", "dataset", "num_samples", "ece_before", "ece_after")
    return {key: content[key] for key in keys if key in content}
