"""Everything that an evaluation needs, loaded and checked before the first token is decoded.

It knows which settings belong together and what a result depends on, and decodes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from deepspec.algorithms.base import DraftModel
from deepspec.algorithms.checkpoint import algorithm_of, load_draft, read_config
from deepspec.config import EvalConfig, TaskConfig
from deepspec.data.cache_manifest import head_hash
from deepspec.data.chat_template import ChatTemplate
from deepspec.data.prompts import Message
from deepspec.decoding.decoder import Request
from deepspec.decoding.sampling import Sampling, check_sampling
from deepspec.decoding.schedule import Confidence, Schedule
from deepspec.decoding.waiting import check_requests
from deepspec.errors import ConfigError
from deepspec.evaluation.answers import prompts_hash, weights_id
from deepspec.evaluation.crew import crew_size
from deepspec.evaluation.memory import batch_size_within
from deepspec.evaluation.report import AUTOREGRESSIVE
from deepspec.evaluation.tasks import Prompt, load_task
from deepspec.interop.folder import draft_folder
from deepspec.runtime import choose_device
from deepspec.scheduling.calibration import chosen_temperatures
from deepspec.scheduling.cost import CostCurve, read_curve
from deepspec.scheduling.schedules import make_schedule, schedule_id
from deepspec.targets.base import Target

# Settings that say where and how fast, not what: the same answers come out whatever they are.
_NOT_CONDITIONS = (
    "drafts",
    "output_dir",
    "results_dir",
    "latency_prompts",
    "latency_lengths",
    "load",
    "witness",
    "device",
    "num_processes",
    "memory_gib",
    "temperatures",
)

# How these cut a block depends on the requests beside it.
_LOAD_DEPENDENT = ("fixed", "throughput", "asynchronous")


class NamedDraft(NamedTuple):
    """A draft, the name it has in tables, its folder or hub id, its `weights_id`, and how its blocks are cut."""

    name: str
    path: str
    algorithm: str
    model: DraftModel
    weights: str
    schedule: Schedule

    @property
    def cut_by(self) -> str:
        """The `schedule_id` of the schedule."""
        return schedule_id(self.schedule)


class LoadPlan(NamedTuple):
    """What `load` reads from files: the cost of a step, and where confidences come from."""

    curve: CostCurve
    confidence: Confidence


class Prepared(NamedTuple):
    """An evaluation that is ready to start.

    Attributes:
        config: what was asked for; `config.sampling` is what counts, not `temperatures`.
        target: the target.
        drafts: the drafts.
        tasks: settings and prompts of each task.
        conditions: everything but the drafts that a number depends on.
        folder: where its records belong.
        load: for schedules with several requests in flight; None where they are not compared.
    """

    config: EvalConfig
    target: Target
    drafts: list[NamedDraft]
    tasks: list[tuple[TaskConfig, list[Prompt]]]
    conditions: dict[str, Any]
    folder: Path
    load: LoadPlan | None = None

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

    @property
    def template(self) -> ChatTemplate:
        """How the target is asked."""
        chat = self.config.target
        return ChatTemplate(self.target.tokenizer, chat.enable_thinking, chat.system_prompt)

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation up to where the answer begins."""
        template = self.template
        return template.tokenize(template.prompt(messages))

    def first_requests(self, prompts: Sequence[Prompt]) -> list[Request]:
        """The first turn of each prompt."""
        return [Request(f"{one.id}#0", self.render([Message("user", one.turns[0])])) for one in prompts]

    def load_requests(self) -> list[Request]:
        """The first turns of all tasks."""
        return [
            Request(f"{task.name}/{one.prompt_id}", one.prompt_ids)
            for task, prompts in self.tasks
            for one in self.first_requests(prompts)
        ]

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
    # A `step_latest` moves on while a training does: what is read and noted is the step it names now.
    paths = [str(Path(path).resolve()) if Path(path).exists() else path for path in config.drafts]
    fields = [read_config(path) for path in paths]
    tasks = [(task, load_task(task)) for task in config.tasks]
    # Every draft brings its own taps; a target that is too small for the default rule is then no obstacle.
    taps = fields[0]["target_layer_ids"] if fields and config.target.layers is None else None
    target = Target.load(config.target, choose_device(config.device), taps)
    drafts = []
    for name, path, found in zip(names, paths, fields, strict=True):
        folder = draft_folder(path)
        model = load_draft(folder, target)
        weights = weights_id(folder)
        schedule = make_schedule(config.schedule, folder, weights, model.has_confidence, _samplings(config))
        drafts.append(NamedDraft(name, path, algorithm_of(found).name, model, weights, schedule))
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
    return prepared if config.load.curve is None else prepared._replace(load=_plan_load(prepared))


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


def _plan_load(prepared: Prepared) -> LoadPlan:
    """Read what schedules under load need, and refuse what cannot be compared."""
    config, drafts = prepared.config, prepared.drafts
    if len(drafts) != 1:
        raise ConfigError(
            f"load.curve is given with {len(drafts)} drafts, but a cost curve holds the time of one. Give the draft "
            "that it was measured with: drafts=[FOLDER]."
        )
    if config.schedule.name != "full":
        raise ConfigError(
            f"load.curve compares all schedules itself, from rounds of full verification; schedule is "
            f"'{config.schedule.name}'. Use schedule=full."
        )
    curve = read_curve(str(config.load.curve))
    if not curve.draft_requests:
        raise ConfigError(
            f"load.curve {config.load.curve} does not know what a draft step takes. Profile with the draft: deepspec "
            f"profile TARGET draft={drafts[0].path} output={config.load.curve}"
        )
    requests = prepared.load_requests()
    largest = max(config.load.batches, default=0)
    if largest > len(requests):
        raise ConfigError(
            f"load.batches {list(config.load.batches)} has {largest} requests in flight, but the tasks have "
            f"{len(requests)} prompts. Use smaller batches, or a larger limit."
        )
    draft = drafts[0]
    check_requests(prepared.target, requests, config.load.max_new_tokens + draft.model.num_draft_tokens + 1)
    source: Literal["head", "max_prob"] = "head" if draft.model.has_confidence else "max_prob"
    temperatures = chosen_temperatures(config.load.calibration, draft.path, source, draft.weights, _samplings(config))
    return LoadPlan(curve, Confidence(source, temperatures))


def _samplings(config: EvalConfig) -> list[dict[str, Any]]:
    """What is decoded with: the sampling at every temperature."""
    sampling = config.sampling.model_dump(mode="json")
    return [{**sampling, "temperature": one} for one in config.temperatures or (config.sampling.temperature,)]


def _conditions(
    config: EvalConfig, target: Target, tasks: Sequence[tuple[TaskConfig, Sequence[Prompt]]]
) -> dict[str, Any]:
    """Everything but the drafts that a number depends on."""
    settings = config.model_dump(mode="json", exclude=set(_NOT_CONDITIONS))
    if config.schedule.name in _LOAD_DEPENDENT:
        # With batch_size, which all have among their conditions, these say how many requests are in flight together.
        settings |= {"num_processes": crew_size(config), "memory_gib": config.memory_gib}
    # A name and a revision may mean other weights later: a folder written anew, a branch moved on.
    settings["target_weights"] = head_hash(target)
    settings["target_commit"] = getattr(target.model.config, "_commit_hash", None)
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
