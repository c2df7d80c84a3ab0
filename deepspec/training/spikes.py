"""Jumps of logged numbers that mean trouble before anything is NaN; it knows names, not how the numbers are made."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from deepspec import console

# The confidence loss is a logarithm of probabilities near 0 and 1, which is the first to suffer from low precision.
WATCHED = ("loss/confidence", "gradient_norm")
_FACTOR = 5.0
_MOST_LINES, _FEWEST_LINES = 20, 5


class SpikeAlarm:
    """Compares the watched numbers of each log line with their medians over the lines before it.

    A median does not follow a single spike, and it follows a lasting change.
    """

    def __init__(self) -> None:
        """Start without a past."""
        self._past: dict[str, deque[float]] = {name: deque(maxlen=_MOST_LINES) for name in WATCHED}
        self._has_warned: set[str] = set()

    def recall(self, line: Mapping[str, Any]) -> None:
        """Take a line of before as past; None stands for a number that was not finite."""
        for name, past in self._past.items():
            value = line.get(name)
            if value is not None and math.isfinite(value):
                past.append(value)

    def look(self, line: Mapping[str, Any]) -> int:
        """Count the watched numbers that are spikes in the next line, and warn of the first one of each."""
        found = 0
        for name, past in self._past.items():
            value, usual = line.get(name, math.nan), statistics.median(past) if len(past) >= _FEWEST_LINES else 0.0
            if usual > 0.0 and value > _FACTOR * usual:
                found += 1
                if name not in self._has_warned:
                    self._has_warned.add(name)
                    console.error(
                        f"warning: {name} jumped to {value:.4g} in the line of step {line['step']}; the median of the "
                        f"{len(past)} lines before is {usual:.4g}. Such lines are counted as `spikes` in the metrics. "
                        "If they go on, lower optimizer.learning_rate or optimizer.clip_norm."
                    )
        self.recall(line)
        return found
