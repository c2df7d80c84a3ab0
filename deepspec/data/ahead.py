"""Features of the next micro-batch while the draft still learns from this one.

On a GPU the target's pass over the next batch runs on a stream of its own, beside the draft's step. Elsewhere it runs
between two steps, which gains nothing and is there so that every machine can show that the numbers stay the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from deepspec.data.features import OnlineFeatures
from deepspec.data.loader import distinct
from deepspec.types import FeatureBatch, TokenBatch


class AheadFeatures:
    """An online source that begins with the next announced batch as soon as one is asked for.

    Passes run in the order in which they were announced and over the very tensors that they would see in their turn, so
    no number changes. One feature batch more is alive during a step, on a GPU also what the target's pass needs.
    """

    def __init__(self, source: OnlineFeatures, device: torch.device) -> None:
        """Wrap a source whose target is on the device."""
        self._source = source
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._announced: deque[TokenBatch] = deque()
        self._ahead: FeatureBatch | None = None

    def upcoming(self, micro_batches: Sequence[TokenBatch]) -> None:
        """Hear which batches come next; the target runs over the first of them with the next `complete`."""
        self._announced.extend(distinct(micro_batches))

    def complete(self, tokens: TokenBatch, before: FeatureBatch | None = None) -> FeatureBatch:
        """See `FeatureSource`; a batch that was not announced is completed in its turn."""
        if before is not None and before.tokens.sample_index is tokens.sample_index:
            return before._replace(tokens=tokens)
        batch = self._taken(tokens) or self._source.complete(tokens)
        if self._ahead is None and self._announced:
            self._ahead = self._begun(self._announced.popleft())
        return batch._replace(tokens=tokens)

    def _taken(self, tokens: TokenBatch) -> FeatureBatch | None:
        """The batch if it was begun; what was announced before it and never asked for is dropped."""
        if self._ahead is not None and self._ahead.tokens.sample_index is tokens.sample_index:
            batch, self._ahead = self._ahead, None
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
            return batch
        if any(announced.sample_index is tokens.sample_index for announced in self._announced):
            self._ahead = None
            while self._announced.popleft().sample_index is not tokens.sample_index:
                pass
        return None

    def _begun(self, tokens: TokenBatch) -> FeatureBatch:
        if self._stream is None:
            return self._source.complete(tokens)
        # A pass writes where features of earlier batches were, which work in the draft's stream may still have to read
        # when the host has let go of them: so it waits for all of that work, and no batch is ever overwritten. It also
        # keeps the host from queueing passes, and their memory, without end.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            ids = tokens.input_ids.pin_memory().to(self._device, non_blocking=True)
            # Masks stay on the host, where looking at them waits for nothing.
            return self._source.complete(tokens._replace(input_ids=ids))
