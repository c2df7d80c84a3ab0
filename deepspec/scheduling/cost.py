"""The cost curve: how many steps a second the target verifies, over the tokens of a step and the context behind them.

Read from our own profile or from SGLang's table, written as both. The module knows neither models nor torch.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from deepspec.errors import DataError
from deepspec.files import write_json

SCHEMA = 1
Lookup = Literal["left", "linear"]


@dataclass(frozen=True)
class CostCurve:
    """Steps per second SPS(B), one line of points for each measured context.

    Attributes:
        tokens: B of the measured points, ascending.
        contexts: tokens that each request has behind it, ascending; (0,) where the profile does not say.
        steps_per_second: one tuple for each context, one value for each of `tokens`.
        draft_requests: numbers of requests for which the draft was timed, ascending; empty where it was not.
        draft_seconds: seconds that drafting (and taking in what was accepted) takes a round, for each of them.
    """

    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    steps_per_second: tuple[tuple[float, ...], ...]
    draft_requests: tuple[int, ...] = ()
    draft_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse points that cannot have been measured.

        Raises:
            DataError: points are missing, out of order, not positive, or not as many as there should be.
        """
        problems = [
            (not self.tokens, "it has no point"),
            (list(self.tokens) != sorted(set(self.tokens)) or min(self.tokens, default=1) < 1, "tokens do not ascend"),
            (list(self.contexts) != sorted(set(self.contexts)), "contexts do not ascend"),
            (len(self.contexts) != len(self.steps_per_second), "not one line of points a context"),
            (any(len(line) != len(self.tokens) for line in self.steps_per_second), "not one value for every point"),
            (any(not 0 < v < math.inf for line in self.steps_per_second for v in line), "a rate is not positive"),
            (list(self.draft_requests) != sorted(set(self.draft_requests)), "numbers of requests do not ascend"),
            (len(self.draft_requests) != len(self.draft_seconds), "not one draft time for every number of requests"),
            (any(not 0 <= value < math.inf for value in self.draft_seconds), "a draft time is negative"),
        ]
        for is_wrong, what in problems:
            if is_wrong:
                raise DataError(f"this is no cost curve: {what} (tokens {list(self.tokens)}). Profile again.")

    def rate(self, tokens: int, context: int = 0, lookup: Lookup = "left") -> float:
        """SPS of a step of `tokens` tokens, at the largest measured context that is not above `context`.

        Between two points `left` takes the one before, as the paper does and engines do; `linear` interpolates seconds.
        Past the last point a step takes as much longer as it has more tokens; before the first it takes as long.
        """
        line = self.steps_per_second[max(bisect.bisect_right(self.contexts, context) - 1, 0)]
        last = self.tokens[-1]
        if tokens > last:
            return line[-1] * last / tokens
        index = max(bisect.bisect_right(self.tokens, tokens) - 1, 0)
        if lookup == "left" or tokens <= self.tokens[index]:
            return line[index]
        return 1 / _between(self.tokens[index : index + 2], [1 / line[index], 1 / line[index + 1]], tokens)

    def draft_time(self, requests: int) -> float:
        """Seconds of a draft step of so many requests, linear between points; 0 where nothing was timed."""
        if not self.draft_requests:
            return 0.0
        points, index = self.draft_requests, bisect.bisect_right(self.draft_requests, requests)
        if index == 0:
            return self.draft_seconds[0]
        if index == len(points):
            return self.draft_seconds[-1] * max(1.0, requests / points[-1])
        return _between(points[index - 1 : index + 1], self.draft_seconds[index - 1 : index + 1], requests)

    def rates(self, requests: int, slots: int, context: int, lookup: Lookup, with_draft: bool) -> tuple[float, ...]:
        """Steps per second with 0, 1, .. `slots` draft tokens verified beside the anchors of `requests` requests."""
        return _rates(self, requests, slots, context, lookup, with_draft)


@lru_cache(maxsize=4096)
def _rates(
    curve: CostCurve, requests: int, slots: int, context: int, lookup: Lookup, with_draft: bool
) -> tuple[float, ...]:
    draft = curve.draft_time(requests) if with_draft else 0.0
    found = (curve.rate(requests + extra, context, lookup) for extra in range(slots + 1))
    return tuple(1 / (1 / rate + draft) if draft else rate for rate in found)


def _between(points: Sequence[int], values: Sequence[float], at: int) -> float:
    share = (at - points[0]) / (points[1] - points[0])
    return values[0] + share * (values[1] - values[0])


def non_increasing(rates: Sequence[float]) -> tuple[float, ...]:
    """Rates with every value above an earlier one lowered to it: a longer step is never faster, its clock may be."""
    lowest, out = math.inf, []
    for rate in rates:
        lowest = min(lowest, rate)
        out.append(lowest)
    return tuple(out)


def write_curve(path: Path, curve: CostCurve, details: Mapping[str, Any]) -> None:
    """Write a curve as JSON, atomically.

    Args:
        path: the file.
        curve: the points.
        details: how they were made: provenance, single measurements.
    """
    write_json(
        path,
        {
            "schema": SCHEMA,
            "kind": "deepspec cost curve",
            "tokens": list(curve.tokens),
            "contexts": list(curve.contexts),
            "steps_per_second": [list(line) for line in curve.steps_per_second],
            "draft_requests": list(curve.draft_requests),
            "draft_seconds": list(curve.draft_seconds),
            **details,
        },
    )


def write_sglang_table(path: Path, curve: CostCurve, context: int) -> None:
    """Write the line of one context as the table that SGLang's --speculative-dspark-sps-table-path reads."""
    line = curve.steps_per_second[curve.contexts.index(context)]
    write_json(
        path,
        {
            "sample_batch_tokens": list(curve.tokens),
            "sample_steps_per_sec": list(line),
            "max_batch_tokens": curve.tokens[-1],
        },
    )


def read_curve(path: str | Path) -> CostCurve:
    """Read a curve that `deepspec profile` wrote, or SGLang's table.

    Raises:
        DataError: the file is missing, is not JSON, or is neither.
    """
    file = Path(path).expanduser()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"cost curve {file} cannot be read ({error.strerror}). Make one: deepspec profile target=... output={file}"
        ) from error
    except ValueError as error:
        raise DataError(f"cost curve {file} is not JSON ({error}). Profile again.") from error
    found = content if isinstance(content, dict) else {}
    try:
        if "sample_batch_tokens" in found:
            rates = tuple(float(value) for value in found["sample_steps_per_sec"])
            return CostCurve(tuple(int(value) for value in found["sample_batch_tokens"]), (0,), (rates,))
        if "bias_seconds" in found:
            raise DataError("this is SGLang's additive table, whose cost depends on two numbers; give the plain one.")
        if found.get("schema") != SCHEMA or "tokens" not in found:
            raise DataError("it has neither our keys (schema, tokens, ..) nor SGLang's (sample_batch_tokens, ..).")
        return CostCurve(
            tuple(int(value) for value in found["tokens"]),
            tuple(int(value) for value in found["contexts"]),
            tuple(tuple(float(value) for value in line) for line in found["steps_per_second"]),
            tuple(int(value) for value in found["draft_requests"]),
            tuple(float(value) for value in found["draft_seconds"]),
        )
    except DataError as error:
        raise DataError(f"cost curve {file}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"cost curve {file} is damaged ({type(error).__name__}: {error}). Profile again.") from error
