"""Requests before they are decoded: what is refused, and who waits for a free place in the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deepspec.decoding.lane import Request
from deepspec.errors import DataError
from deepspec.targets.base import Target


def most_ahead(batch_size: int) -> int:
    """How many prompts are read before there is room for them: a pass over few costs nearly as much as over some."""
    return batch_size // 2


class Waiting:
    """Requests in the order of decoding, the longest prompt first: prompts of one pass are then of like length.

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


def check_requests(target: Target, requests: Sequence[Request], room: int) -> None:
    """Refuse prompts that cannot be answered.

    Args:
        target: the target.
        requests: prompts.
        room: positions needed after each: max_new_tokens, one block and its bonus token.

    Raises:
        DataError: a prompt is empty, repeated, or too long for the target.
    """
    seen: set[str] = set()
    for request in requests:
        if request.prompt_id in seen:
            raise DataError(f"prompt id '{request.prompt_id}' occurs twice; ids seed the draws and must be unique.")
        seen.add(request.prompt_id)
        if not request.prompt_ids:
            raise DataError(f"prompt '{request.prompt_id}' is empty. Leave it out or give it at least one token.")
        if len(request.prompt_ids) + room > target.context_length:
            raise DataError(
                f"prompt '{request.prompt_id}' has {len(request.prompt_ids)} tokens; with max_new_tokens and one block "
                f"it needs {len(request.prompt_ids) + room}, but {target.name} has {target.context_length} positions. "
                "Shorten the prompt or lower max_new_tokens."
            )
