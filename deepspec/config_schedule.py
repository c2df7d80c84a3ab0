"""The types of the group `schedule`: how many draft tokens are verified, one model a schedule.

Values are in config/schedule/. The module imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from deepspec.config_base import FilePath, Settings, Share

_Window = Annotated[tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]], Field(strict=False)]


class FullScheduleConfig(Settings):
    """Every draft token is verified."""

    name: Literal["full"]


class FixedScheduleConfig(Settings):
    """As many for every request, by the load alone; windows are [from so many requests on, so many tokens]."""

    name: Literal["fixed"]
    windows: Annotated[tuple[_Window, ...], Field(strict=False, min_length=1)]

    @model_validator(mode="after")
    def _windows_cover_every_load(self) -> Self:
        loads = [load for load, _ in self.windows]
        if loads[0] != 1 or loads != sorted(set(loads)):
            raise ValueError(
                f"windows {[list(window) for window in self.windows]} must begin with 1 request and ascend, such as "
                "[[1,5],[16,2]]."
            )
        return self


class _ConfidentSettings(Settings):
    """Where confidences come from.

    Attributes:
        confidence: the draft's confidence head, the largest probability of each slot, or the head where there is one.
        calibration: temperatures of `deepspec calibrate`: `auto` uses those stored with the draft, where there are any;
            `none` uses none; anything else is the folder that they were written to.
    """

    confidence: Literal["auto", "head", "max_prob"]
    calibration: FilePath


class ThresholdScheduleConfig(_ConfidentSettings):
    """A block is cut before the first slot whose confidence is lower than the threshold."""

    name: Literal["threshold"]
    threshold: Share


class _CostSettings(_ConfidentSettings):
    """What a step costs.

    Attributes:
        curve: file of `deepspec profile`, or SGLang's table.
        lookup: how the curve is read between its points.
        with_draft: count the draft's time as part of a step, where the curve knows it.
    """

    curve: FilePath
    lookup: Literal["left", "linear"]
    with_draft: bool


class ThroughputScheduleConfig(_CostSettings):
    """Algorithm 1: one budget for the batch, spent as long as it raises expected tokens per second."""

    name: Literal["throughput"]


class AsynchronousScheduleConfig(_CostSettings):
    """A budget from confidences two rounds old, spent on the slots that are likeliest now."""

    name: Literal["asynchronous"]


ScheduleConfig = Annotated[
    FullScheduleConfig
    | FixedScheduleConfig
    | ThresholdScheduleConfig
    | ThroughputScheduleConfig
    | AsynchronousScheduleConfig,
    Field(discriminator="name"),
]
