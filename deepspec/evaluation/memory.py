"""How much memory decoding takes: what a request needs, how many fit into a budget, and the peak that was reached.

Letters: B requests, K draft tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import torch

from deepspec.algorithms.base import DraftModel, Observation
from deepspec.decoding.kv_cache import RaggedCache
from deepspec.decoding.waiting import most_ahead
from deepspec.errors import ConfigError
from deepspec.targets.base import Target

_PROBE_TOKENS = 64
# Buffers of keys and values grow by half, so up to that much of them may be unused.
_GROWTH = 1.5
# Logits, warped and sorted copies, probabilities of target and draft: fp32 arrays of V for every token of a round.
_VOCABULARY_ARRAYS = 6
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class RequestBytes(NamedTuple):
    """Upper estimates of what a request takes beside the weights, in bytes.

    Attributes:
        held: keys and values of its whole length, and states of a round, as long as it has a row.
        round: what a round of it computes with.
        prompt: keys and values of its prompt, until it has a row.
        reading: what the pass over its prompt computes with.
    """

    held: int
    round: int
    prompt: int
    reading: int

    def of_batch(self, size: int) -> int:
        """Bytes with so many requests in flight: in a round, or while others are read for all their rows and ahead."""
        ahead = most_ahead(size)
        reading = (size + ahead) * (self.prompt + self.reading)
        return size * self.held + max(size * self.round + ahead * self.prompt, reading)


def bytes_per_request(
    target: Target, draft: DraftModel | None, longest_prompt: int, max_new_tokens: int
) -> RequestBytes:
    """Estimate the memory of a request.

    Keys and values are measured on a few tokens, in the target and in the draft; the rest follows from sizes.

    Args:
        target: the target.
        draft: the draft, None for plain decoding.
        longest_prompt: tokens.
        max_new_tokens: limit of the answer.
    """
    block = 0 if draft is None else draft.num_draft_tokens
    if draft is not None:
        target.tap(draft.spec.layer_ids)
    cache = RaggedCache.for_batch(1)
    places = torch.arange(_PROBE_TOKENS, device=target.device)[None]
    ids = torch.zeros_like(places)
    with torch.inference_mode():
        features, last_hidden = target.forward_cached(ids, places, cache, _PROBE_TOKENS)
        per_token = cache.nbytes / _PROBE_TOKENS
        if draft is not None:
            state = draft.new_state(1)
            starts = torch.zeros_like(places[:, 0])
            draft.observe(state, Observation(features, ids, starts, starts + _PROBE_TOKENS, _PROBE_TOKENS))
            per_token += state.cache.nbytes / _PROBE_TOKENS
    length = longest_prompt + max_new_tokens + block + 1
    item = target.dtype.itemsize
    states = item * (features.shape[-1] + last_hidden.shape[-1])
    width = int(getattr(target.config, "intermediate_size", 4 * target.hidden_size))
    # While a prompt is read: tapped states, a layer's own arrays, and one mask of the prompt over itself.
    prefill = longest_prompt * (2 * states + item * (3 * width + 8 * target.hidden_size)) + 4 * longest_prompt**2
    vocabulary = _VOCABULARY_ARRAYS * 4 * target.vocab_size * (block + 1)
    return RequestBytes(
        held=int(_GROWTH * per_token * (length + _PROBE_TOKENS) + (block + 1) * states),
        round=vocabulary,
        prompt=int(_GROWTH * per_token * (longest_prompt + _PROBE_TOKENS)),
        reading=prefill,
    )


def batch_size_within(
    budget_gib: float | None, batch_size: int, target: Target, draft: DraftModel | None, longest: int, new: int
) -> int:
    """The largest batch up to `batch_size` whose requests fit into a budget; without a budget that one.

    Args:
        budget_gib: for requests in flight and those read ahead, weights not counted; None for no limit.
        batch_size: wanted.
        target: the target.
        draft: the draft, None for plain decoding.
        longest: tokens of the longest prompt.
        new: max_new_tokens.

    Raises:
        ConfigError: not even one request fits.
    """
    if budget_gib is None:
        return batch_size
    one = bytes_per_request(target, draft, longest, new)
    for size in range(batch_size, 0, -1):
        if one.of_batch(size) <= budget_gib * 2**30:
            return size
    raise ConfigError(
        f"memory_gib {budget_gib:g} does not hold one request of {longest} prompt and {new} new tokens, which "
        f"takes about {one.of_batch(1) / 2**30:.3g} GiB. Raise it, or lower max_new_tokens."
    )


class PeakMemory:
    """The most memory that this process held since it was made: of the GPU where there is one, else resident."""

    def __init__(self, device: torch.device) -> None:
        """Forget earlier peaks, where the system can."""
        self._device = device
        self._is_known = True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            _CLEAR.write_text("5")
        except OSError:
            self._is_known = False

    def read(self) -> int | None:
        """Bytes, or None where the system does not say."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        if self._is_known:
            with contextlib.suppress(OSError, ValueError, IndexError):
                lines = _STATUS.read_text(encoding="utf-8").splitlines()
                return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
        return None
