"""The types of the commands calibrate, profile, simulate and sweep; their values are in config/<command>.yaml.

The module imports no torch.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field, field_validator

from deepspec.config import TargetConfig
from deepspec.config_base import Count, FilePath, Seed, Settings, Share, Texts, Weight

_Counts = Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]
_Positive = Annotated[float, Field(gt=0.0)]

ScheduleName = Literal["autoregressive", "mtp1", "full", "fixed", "threshold", "throughput", "asynchronous", "oracle"]


class _RecordSettings(Settings):
    """Jobs over round records.

    Attributes:
        records: output folders of `deepspec eval`.
        draft: name or folder of the draft; None where the records hold only one.
        confidence: the draft's head, the largest probability of each slot, or the head where there is one.
    """

    records: Annotated[Texts, Field(min_length=1)]
    draft: str | None = None
    confidence: Literal["auto", "head", "max_prob"]

    @field_validator("records")
    @classmethod
    def _expand_home(cls, records: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(os.path.expanduser(folder) for folder in records)


class CalibrateConfig(_RecordSettings):
    """`deepspec calibrate`: temperatures for one draft; `output_dir` None stores them with the checkpoint."""

    output_dir: FilePath | None = None


class ProfileConfig(Settings):
    """`deepspec profile`: the cost curve of a target on this machine.

    Attributes:
        target: whose steps are timed.
        draft: folder of a draft to time as well, None for none.
        tokens: B, tokens of a verification step.
        contexts: tokens behind each request.
        tokens_per_request: how the tokens of a step are spread over requests.
        num_draft_tokens: K, where no draft says it.
        draft_requests: numbers of requests for which the draft is timed.
        temperature: of the acceptance test.
        repeats: timed turns; medians count.
        device: auto, cpu or cuda.
        output: the curve; SGLang's tables are written beside it.
    """

    target: TargetConfig
    draft: FilePath | None = None
    tokens: _Counts
    contexts: _Counts
    tokens_per_request: Count
    num_draft_tokens: Count
    draft_requests: _Counts
    temperature: Weight
    repeats: Count
    device: Literal["auto", "cpu", "cuda"]
    output: FilePath

    @field_validator("tokens", "contexts", "draft_requests")
    @classmethod
    def _ascending(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(values)))


class SimulateConfig(_RecordSettings):
    """`deepspec simulate`: a serving load played through the schedules.

    Attributes:
        curve: cost curve of the target (and of the draft, where it was timed).
        draft_seconds: T_draft of a round, where the curve does not know it or to replace what it knows.
        one_token_draft_seconds: T_draft of the one-token draft; None takes the draft's own divided by K.
        prefill_seconds: time of a prompt that joins, during which nothing else runs.
        schedules: what to compare.
        threshold: of `threshold`.
        thresholds: of the curve over thresholds, at the middle one of the loads.
        lookup: how `throughput` and `asynchronous` read the curve; simulated time always interpolates it.
        concurrency: requests in flight, one run each (arrivals `closed`).
        arrivals: `closed` replaces every finished request at once; `poisson` draws arrivals at `rates`.
        rates: requests per second, one run each (arrivals `poisson`); `concurrency` then limits those in flight.
        rounds: rounds of each run that count, after a warm-up of as many as the longest answer needs; `closed` starts
            with requests at all stages of their answers, and needs no more than `rounds` to warm up.
        max_new_tokens: of every request; None takes the lengths of the recorded answers.
        repeats: independent runs, each with conversations drawn anew, for intervals.
        calibration: `auto` uses the temperatures stored with the draft, where there are any; `none` uses none; anything
            else is the folder that `deepspec calibrate` wrote them to.
        seed: of all draws.
        output_dir: page, numbers.
    """

    curve: FilePath
    draft_seconds: Weight | None = None
    one_token_draft_seconds: Weight | None = None
    prefill_seconds: Weight
    schedules: Annotated[tuple[ScheduleName, ...], Field(strict=False, min_length=1)]
    threshold: Share
    thresholds: Annotated[tuple[Share, ...], Field(strict=False)]
    lookup: Literal["left", "linear"]
    concurrency: _Counts
    arrivals: Literal["closed", "poisson"]
    rates: Annotated[tuple[_Positive, ...], Field(strict=False)]
    rounds: Annotated[int, Field(ge=10)]
    max_new_tokens: Annotated[int, Field(ge=2)] | None = None
    repeats: Annotated[int, Field(ge=2)]
    calibration: FilePath
    seed: Seed
    output_dir: FilePath


class SweepConfig(Settings):
    """`deepspec sweep`: what changes with a threshold, with K, or with the draft's depth, over recorded rounds.

    Attributes:
        over: what is swept.
        records: output folders of `deepspec eval`.
        draft: name or folder of the only draft to look at; None takes all.
        confidence: the draft's head, the largest probability of each slot, or the head where there is one.
        calibration: as for simulate.
        thresholds: of the threshold sweep.
        curve: cost curve, for milliseconds a token; None leaves them out.
        output_dir: page, numbers.
    """

    over: Literal["threshold", "k", "depth"]
    records: Annotated[Texts, Field(min_length=1)]
    draft: str | None = None
    confidence: Literal["auto", "head", "max_prob"]
    calibration: FilePath
    thresholds: Annotated[tuple[Share, ...], Field(strict=False, min_length=1)]
    curve: FilePath | None = None
    output_dir: FilePath

    @field_validator("records")
    @classmethod
    def _expand_home(cls, records: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(os.path.expanduser(folder) for folder in records)
