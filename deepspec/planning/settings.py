"""What `deepspec plan` is asked: a training run, and the few numbers that a configuration of one does not hold.

Overrides are those of train.py and the keys of config/plan.yaml beside them. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, ValidationError, model_validator
from typing_extensions import Self

from deepspec.config import TrainConfig, compose_train, config_folder
from deepspec.config_base import Count, Settings, Weight
from deepspec.errors import ConfigError
from deepspec.lookup import nearest

_Positive = Annotated[float, Field(gt=0.0)]


class PlanInputs(Settings):
    """Numbers about data and machine; values in config/plan.yaml.

    Attributes:
        mean_length: tokens of a sequence, on average over the data.
        mean_answer: tokens of it that the target generated.
        num_samples: sequences in the data, for runs whose length is given in epochs and for the size of a cache.
        rate_tflops: TFLOP per second that one device reaches over the whole step, pauses included.
        gpu_gib: memory of the GPUs to judge, in GiB.
        reserve_gib: memory of a GPU that tensors cannot have: the CUDA context, and what the allocator strands.
        length: length of the sequences that memory is planned for; None takes data.max_length, the longest.
    """

    mean_length: Annotated[int, Field(ge=3)]
    mean_answer: Annotated[int, Field(ge=2)]
    num_samples: Count
    rate_tflops: _Positive
    gpu_gib: Annotated[tuple[_Positive, ...], Field(strict=False, min_length=1)]
    reserve_gib: Weight
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
    file = config_folder() / "plan.yaml"
    values = _plain(OmegaConf.load(file))
    mine = [word for word in overrides if word.partition("=")[0] in values]
    for word in mine:
        if "=" not in word:
            raise ConfigError(f"'{word}' cannot be read as key=value.")
    try:
        values |= _plain(OmegaConf.from_dotlist(mine))
        inputs = PlanInputs.model_validate(values)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' '.join(mine)}: {error}") from error
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(dict(problem)) for problem in error.errors())) from error
    others = [word for word in overrides if word not in mine]
    try:
        train = compose_train(others)
    except ConfigError as error:
        unknown = str(error).partition(": there is no such key")[0]
        alike = nearest(unknown, values) if unknown != str(error) else ""
        raise ConfigError(f"{error} Of the plan's own keys:{alike}" if alike else str(error)) from error
    if inputs.length is not None and inputs.length > train.data.max_length:
        raise ConfigError(
            f"length {inputs.length} is above data.max_length {train.data.max_length}: no sequence is longer. "
            f"Use length={train.data.max_length} or less."
        )
    return PlanConfig(train=train, inputs=inputs)


def _plain(values: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(values, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _explain(problem: dict[str, Any]) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return f"{path}: got {problem['input']!r}; it should {problem['msg'].removeprefix('Input should ')}."
