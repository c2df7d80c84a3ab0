"""The cost curve: how many steps a second the target verifies, over the tokens of a step and the context behind them.

Beside it stands what whole rounds of our own decoder take, by the number of requests and of verified tokens: a step of
the target is not all of a round, and cutting blocks costs something too. Read from our own profile or from SGLang's
table, written as both. The module knows neither models nor torch.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from deepspec.errors import DataError
from deepspec.files import write_json

SCHEMA = 1
# Steps per second that a clock can have measured: beyond them, seconds and their ratios leave the floats.
_SLOWEST, _FASTEST = 1e-9, 1e12
Lookup = Literal["left", "linear"]
Kind = Literal["plain", "whole", "even", "cut"]


class RoundCosts(NamedTuple):
    """Seconds of whole rounds of our own decoder with so many requests in flight, the draft's own step left out.

    Attributes:
        requests: in flight.
        plain: a round without a draft.
        whole: a round that verifies every draft token.
        even_tokens: verified in rounds that cut all blocks alike, over all requests and with their anchors; ascending.
        even: seconds of these rounds.
        cut_tokens: verified in rounds that cut blocks unevenly, likewise.
        cut: seconds of these rounds.
    """

    requests: int
    plain: float
    whole: float
    even_tokens: tuple[int, ...]
    even: tuple[float, ...]
    cut_tokens: tuple[int, ...]
    cut: tuple[float, ...]

    def seconds(self, kind: Kind, each: float, lookup: Lookup) -> float:
        """Of a round that verifies `each` tokens a request, anchor included, between points as `CostCurve.rate`."""
        if kind in ("plain", "whole"):
            return self.plain if kind == "plain" else self.whole
        points, values = (self.even_tokens, self.even) if kind == "even" else (self.cut_tokens, self.cut)
        tokens, last = each * self.requests, points[-1]
        if tokens > last:
            return values[-1] * tokens / last
        index = max(bisect.bisect_right(points, tokens) - 1, 0)
        if lookup == "left" or tokens <= points[index]:
            return values[index]
        return _between(points[index : index + 2], values[index : index + 2], tokens)


@dataclass(frozen=True)
class CostCurve:
    """Steps per second SPS(B), one line of points for each measured context.

    Attributes:
        tokens: B of the measured points, ascending.
        contexts: tokens that each request has behind it, ascending; (0,) where the profile does not say.
        steps_per_second: one tuple for each context, one value for each of `tokens`.
        draft_requests: numbers of requests for which the draft was timed, ascending; empty where it was not.
        draft_seconds: seconds that drafting (and taking in what was accepted) takes a round, for each of them.
        rounds: whole rounds of our own decoder at the first of `contexts`, requests ascending; empty where none were
            played, as in an engine's profile.
    """

    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    steps_per_second: tuple[tuple[float, ...], ...]
    draft_requests: tuple[int, ...] = ()
    draft_seconds: tuple[float, ...] = ()
    rounds: tuple[RoundCosts, ...] = ()

    def __post_init__(self) -> None:
        """Refuse points that cannot have been measured.

        Raises:
            DataError: points are missing, out of order, not positive, or not as many as there should be.
        """
        points_of_rounds = [
            pair for one in self.rounds for pair in ((one.even_tokens, one.even), (one.cut_tokens, one.cut))
        ]
        problems = [
            (not self.tokens, "it has no point"),
            (_do_not_ascend(self.tokens), "tokens do not ascend"),
            (list(self.contexts) != sorted(set(self.contexts)), "contexts do not ascend"),
            (len(self.contexts) != len(self.steps_per_second), "not one line of points a context"),
            (any(len(line) != len(self.tokens) for line in self.steps_per_second), "not one value for every point"),
            (
                any(not _SLOWEST <= rate <= _FASTEST for line in self.steps_per_second for rate in line),
                f"a rate is not positive, or not within {_SLOWEST:g} to {_FASTEST:g} steps a second",
            ),
            (list(self.draft_requests) != sorted(set(self.draft_requests)), "numbers of requests do not ascend"),
            (len(self.draft_requests) != len(self.draft_seconds), "not one draft time for every number of requests"),
            (any(not 0 <= value < math.inf for value in self.draft_seconds), "a draft time is negative"),
            (_do_not_ascend([one.requests for one in self.rounds]), "rounds do not ascend in requests"),
            (any(_do_not_ascend(points) for points, _ in points_of_rounds), "tokens of rounds do not ascend"),
            (any(not 0 < len(p) == len(values) for p, values in points_of_rounds), "not one time for every round"),
            (
                any(not 0 < value < math.inf for one in self.rounds for value in (one.plain, one.whole))
                or any(not 0 < value < math.inf for _, values in points_of_rounds for value in values),
                "the time of a round is not positive",
            ),
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

    def beside_draft(
        self, requests: int, tokens: int, context: int = 0, kind: Kind = "cut", lookup: Lookup = "linear"
    ) -> float:
        """Seconds of a round that verifies so many tokens of so many requests, the draft's own step left out.

        Where whole rounds were played, it is what they took at the nearest numbers of requests and as many tokens each,
        linear between them and in proportion to requests past the last; longer at another context by as much as a step
        of the target. Where none were, it is the step of the target alone.

        Args:
            requests: in flight.
            tokens: verified over all requests, anchors included.
            context: tokens behind each.
            kind: without a draft, with whole blocks, or with blocks that a schedule has cut, alike or not.
            lookup: how points are read.
        """
        step = 1 / self.rate(tokens, context, lookup)
        if not self.rounds:
            return step
        index = max(bisect.bisect_right([one.requests for one in self.rounds], requests) - 1, 0)
        below, above = self.rounds[index], self.rounds[min(index + 1, len(self.rounds) - 1)]
        found = below.seconds(kind, tokens / requests, lookup)
        if above is not below and requests > below.requests:
            more = above.seconds(kind, tokens / requests, lookup)
            found = _between((below.requests, above.requests), (found, more), requests)
        elif requests > below.requests:
            found *= requests / below.requests
        # Rounds were played at the first context; a longer one is never faster, its clock may be.
        return found + max(0.0, step - 1 / self.rate(tokens, self.contexts[0], lookup))

    def rates(self, requests: int, slots: int, context: int, lookup: Lookup, with_draft: bool) -> tuple[float, ...]:
        """Rounds per second with 0, 1, .. `slots` draft tokens verified beside the anchors of `requests` requests."""
        return _rates(self, requests, slots, context, lookup, with_draft)


@lru_cache(maxsize=4096)
def _rates(
    curve: CostCurve, requests: int, slots: int, context: int, lookup: Lookup, with_draft: bool
) -> tuple[float, ...]:
    draft = curve.draft_time(requests) if with_draft else 0.0
    found = (curve.beside_draft(requests, requests + extra, context, "cut", lookup) for extra in range(slots + 1))
    return tuple(1 / (seconds + draft) for seconds in found)


def _do_not_ascend(numbers: Sequence[int]) -> bool:
    return list(numbers) != sorted(set(numbers)) or min(numbers, default=1) < 1


def _between(points: Sequence[int], values: Sequence[float], at: float) -> float:
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
            "rounds": [one._asdict() for one in curve.rounds],
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
            # Profiles of before have none: they say what they always said, the step of the target and of the draft.
            tuple(_round_costs(one) for one in found.get("rounds", ())),
        )
    except DataError as error:
        raise DataError(f"cost curve {file}: {error}") from error
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"cost curve {file} is damaged ({type(error).__name__}: {error}). Profile again.") from error


def _round_costs(row: Mapping[str, Any]) -> RoundCosts:
    return RoundCosts(
        int(row["requests"]),
        float(row["plain"]),
        float(row["whole"]),
        tuple(int(value) for value in row["even_tokens"]),
        tuple(float(value) for value in row["even"]),
        tuple(int(value) for value in row["cut_tokens"]),
        tuple(float(value) for value in row["cut"]),
    )
