"""What `deepspec plan` is asked: a training run, and the few numbers that a configuration of one does not hold.

Overrides are those of train.py and the keys of config/plan.yaml beside them. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator
from typing_extensions import Self

from deepspec.config import TrainConfig, compose_job, compose_train
from deepspec.config_base import Count, Gib, Settings
from deepspec.errors import ConfigError
from deepspec.lookup import nearest

_Positive = Annotated[float, Field(gt=0.0)]
_Gib = Annotated[float, Field(gt=0.0, le=2.0**20)]


class PlanInputs(Settings):
    """Numbers about data and machine; values in config/plan.yaml.

    Attributes:
        mean_length: tokens of a sequence, on average over the data.
        mean_answer: tokens of it that the target generated.
        num_samples: sequences in the data, for runs whose length is given in epochs and for the size of a cache.
        rate_tflops: TFLOP per second that one device reaches over the whole step, pauses included; None for a CPU
            whose rate was not given.
        gpu_gib: memory of the GPUs to judge, in GiB.
        reserve_gib: memory of a GPU that tensors cannot have: the CUDA context, and what the allocator strands.
        length: length of the sequences that memory is planned for; None takes data.max_length, the longest.
    """

    mean_length: Annotated[int, Field(ge=3)]
    mean_answer: Annotated[int, Field(ge=2)]
    num_samples: Count
    rate_tflops: _Positive | None
    gpu_gib: Annotated[tuple[_Gib, ...], Field(strict=False, min_length=1)]
    reserve_gib: Gib
    length: Annotated[int, Field(ge=2)] | None = None

    @model_validator(mode="after")
    def _an_answer_follows_a_prompt(self) -> Self:
        if self.mean_answer >= self.mean_length:
            raise ValueError(
                f"mean_answer {self.mean_answer} must be below mean_length {self.mean_length}, which counts the prompt "
                "as well. Give both."
            )
        return self


class PlanConfig(Settings):
    """A training run and what is assumed about its data and machine."""

    train: TrainConfig
    inputs: PlanInputs


def compose_plan(overrides: Sequence[str]) -> PlanConfig:
    """Compose and check a plan from overrides of train.py and keys of config/plan.yaml.

    Raises:
        ConfigError: a key, choice, value or combination is not possible.
    """
    names = PlanInputs.model_fields
    mine = [word for word in overrides if word.partition("=")[0] in names]
    inputs = compose_job("plan", PlanInputs, mine)
    others = [word for word in overrides if word not in mine]
    try:
        train = compose_train(others)
    except ConfigError as error:
        unknown = str(error).partition(": there is no such key")[0]
        alike = nearest(unknown, names) if unknown != str(error) else ""
        raise ConfigError(f"{error} Of the plan's own keys:{alike}" if alike else str(error)) from error
    if inputs.length is not None and inputs.length > train.data.max_length:
        raise ConfigError(
            f"length {inputs.length} is above data.max_length {train.data.max_length}: no sequence is longer. "
            f"Use length={train.data.max_length} or less."
        )
    # The assumed rate is one of GPUs.
    if train.engine.device == "cpu" and not any(word.startswith("rate_tflops=") for word in mine):
        inputs = inputs.model_copy(update={"rate_tflops": None})
    return PlanConfig(train=train, inputs=inputs)
