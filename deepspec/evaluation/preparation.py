"""Everything that an evaluation needs, loaded and checked before the first token is decoded.

It knows which settings belong together and what a result depends on, and decodes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspec.algorithms.base import DraftModel
from deepspec.algorithms.checkpoint import algorithm_of, load_draft, read_config
from deepspec.config import EvalConfig, TaskConfig
from deepspec.data.chat import render_prompt
from deepspec.data.prompts import Message
from deepspec.decoding.decoder import Request, check_requests
from deepspec.decoding.sampling import Sampling, check_sampling
from deepspec.decoding.schedule import Schedule
from deepspec.errors import ConfigError
from deepspec.evaluation.answers import prompts_hash, weights_id
from deepspec.evaluation.memory import batch_size_within
from deepspec.evaluation.report import AUTOREGRESSIVE
from deepspec.evaluation.tasks import Prompt, load_task
from deepspec.interop.folder import draft_folder
from deepspec.runtime import choose_device
from deepspec.scheduling.schedules import make_schedule
from deepspec.targets.base import Target

# Settings that say where and how fast, not what: the same answers come out whatever they are.
_NOT_CONDITIONS = (
    "drafts",
    "output_dir",
    "results_dir",
    "latency_prompts",
    "latency_lengths",
    "device",
    "num_processes",
    "memory_gib",
    "temperatures",
)


class NamedDraft(NamedTuple):
    """A draft, the name it has in tables, the `weights_id` of its model, and how its blocks are cut."""

    name: str
    path: str
    algorithm: str
    model: DraftModel
    weights: str
    schedule: Schedule


class Prepared(NamedTuple):
    """An evaluation that is ready to start.

    Attributes:
        config: what was asked for; `config.sampling` is what counts, not `temperatures`.
        target: the target.
        drafts: the drafts.
        tasks: settings and prompts of each task.
        conditions: everything but the drafts that a number depends on.
        folder: where its records belong.
    """

    config: EvalConfig
    target: Target
    drafts: list[NamedDraft]
    tasks: list[tuple[TaskConfig, list[Prompt]]]
    conditions: dict[str, Any]
    folder: Path

    @property
    def sampling(self) -> Sampling:
        """Warpers of target and draft."""
        return Sampling(**self.config.sampling.model_dump())

    def at(self, temperature: float) -> Prepared:
        """The same at another temperature, with a folder of its own."""
        sampling = self.config.sampling.model_copy(update={"temperature": temperature})
        output = self.config.output_dir
        folder = None if output is None else str(Path(output) / f"temperature_{temperature:g}")
        config = self.config.model_copy(update={"sampling": sampling, "output_dir": folder})
        conditions = _conditions(config, self.target, self.tasks)
        return self._replace(config=config, conditions=conditions, folder=_folder(config, conditions))

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation up to where the answer begins."""
        return render_prompt(
            self.target.tokenizer,
            messages,
            enable_thinking=self.config.target.enable_thinking,
            system_prompt=self.config.target.system_prompt,
        )

    def first_requests(self, prompts: Sequence[Prompt]) -> list[Request]:
        """The first turn of each prompt."""
        return [Request(f"{one.id}#0", self.render([Message("user", one.turns[0])])) for one in prompts]

    def room(self, draft: DraftModel) -> int:
        """Positions that an answer needs behind its prompt: its tokens, one block and the bonus token."""
        return self.config.max_new_tokens + draft.num_draft_tokens + 1

    def batch_size(self, draft: DraftModel, longest_prompt: int) -> int:
        """Requests in flight, as many as were asked for or as fit into the memory budget."""
        config = self.config
        return batch_size_within(
            config.memory_gib, config.batch_size, self.target, draft, longest_prompt, config.max_new_tokens
        )


def prepare(config: EvalConfig) -> Prepared:
    """Load everything and refuse what does not fit.

    Raises:
        DeepSpecError: a setting, task, draft or prompt cannot be used; nothing was decoded or written.
    """
    check_sampling(Sampling(**config.sampling.model_dump()))
    names = draft_names(config.drafts)
    fields = [read_config(path) for path in config.drafts]
    tasks = [(task, load_task(task)) for task in config.tasks]
    # Every draft brings its own taps; a target that is too small for the default rule is then no obstacle.
    taps = fields[0]["target_layer_ids"] if fields and config.target.layers is None else None
    target = Target.load(config.target, choose_device(config.device), taps)
    drafts = []
    for name, folder, found in zip(names, config.drafts, fields, strict=True):
        model = load_draft(folder, target)
        weights = weights_id(model)
        schedule = make_schedule(config.schedule, draft_folder(folder), weights, model.has_confidence)
        drafts.append(NamedDraft(name, folder, algorithm_of(found).name, model, weights, schedule))
    conditions = _conditions(config, target, tasks)
    prepared = Prepared(config, target, drafts, tasks, conditions, _folder(config, conditions))
    longest_block = max((draft.model.num_draft_tokens for draft in drafts), default=0)
    _check_lengths(config, drafts)
    for _, prompts in tasks:
        requests = prepared.first_requests(prompts)
        check_requests(target, requests, config.max_new_tokens + longest_block + 1)
        longest = max(len(request.prompt_ids) for request in requests)
        for draft in drafts:
            prepared.batch_size(draft.model, longest)
    return prepared


def draft_names(paths: Sequence[str]) -> list[str]:
    """Short distinct names of draft folders: the run's name, with the step's where two would be equal.

    Raises:
        ConfigError: the same folder is given twice.
    """
    if len({Path(path).expanduser().resolve() for path in paths}) < len(paths):
        raise ConfigError(f"drafts names a folder twice: {', '.join(paths)}. Give each draft once.")
    parts = [Path(path).expanduser().absolute().parts for path in paths]
    is_step = [part[-1].startswith("step_") and len(part) > 1 for part in parts]
    names = [part[-2] if step else part[-1] for part, step in zip(parts, is_step, strict=True)]
    # Plain decoding has a row of its own under its name.
    if len(set(names)) < len(names) or AUTOREGRESSIVE in names:
        names = ["_".join(part[-2:]) for part in parts]
    if len(set(names)) < len(names):
        names = [f"{name}_{index + 1}" for index, name in enumerate(names)]
    return names


def _check_lengths(config: EvalConfig, drafts: Sequence[NamedDraft]) -> None:
    longest = max((draft.model.num_draft_tokens for draft in drafts), default=0)
    if drafts and max(config.latency_lengths, default=0) > longest:
        raise ConfigError(
            f"latency_lengths {list(config.latency_lengths)}: no draft proposes more than {longest} tokens. "
            f"Use lengths 1..{longest}."
        )


def _conditions(
    config: EvalConfig, target: Target, tasks: Sequence[tuple[TaskConfig, Sequence[Prompt]]]
) -> dict[str, Any]:
    """Everything but the drafts that a number depends on."""
    settings = config.model_dump(mode="json", exclude=set(_NOT_CONDITIONS))
    template = str(target.tokenizer.chat_template or "")
    settings["template_hash"] = hashlib.sha256(template.encode()).hexdigest()[:16]
    settings["dtype"] = config.target.dtype
    settings["device"] = str(target.device)
    settings["prompts_hash"] = {task.name: prompts_hash(prompts) for task, prompts in tasks}
    return settings


def _folder(config: EvalConfig, conditions: Mapping[str, Any]) -> Path:
    if config.output_dir is not None:
        return Path(config.output_dir)
    tasks = "-".join(task.name for task in config.tasks)
    key = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:8]
    name = f"{tasks[:40]}_temperature{config.sampling.temperature:g}_{key}"
    return Path(config.results_dir) / config.target.short_name / name
