"""Requests that wait for a free place in the batch; several processes may share one list of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepspec.decoding.lane import Request


class Waiting:
    """Requests in the order of decoding, the longest prompt first: prompts of one prefill are padded to the longest.

    Args:
        requests: in any order; processes that share them give the same ones in the same order.
        claim: takes so many for this process and returns the index of the first; None where nobody shares them.
    """

    def __init__(self, requests: Sequence[Request], claim: Callable[[int], int] | None = None) -> None:
        self.requests = sorted(requests, key=lambda request: -len(request.prompt_ids))
        self._claim = claim or self._claim_alone
        self._known_taken = 0

    def __len__(self) -> int:
        """How many nobody has taken, as far as this process knows."""
        return max(0, len(self.requests) - self._known_taken)

    def take(self, count: int) -> list[Request]:
        """Take up to so many; fewer, or none, where others were faster."""
        first = self._claim(count)
        self._known_taken = first + count
        return self.requests[first : first + count]

    def _claim_alone(self, count: int) -> int:
        return self._known_taken
