"""Softmax, losses and their gradient for a tile: as many rows of logits as stay in the processor's cache.

Elementwise work on a tile is too short to be shared out among threads (waking one costs as much as the work), so on a
CPU each thread takes tiles of its own. This module knows rows of logits; it knows nothing of products or weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor


class RowCoefficients(NamedTuple):
    """Factor of each loss of each row in the objective, each [R]; None where a loss has none, which saves its work."""

    ce: Tensor | None
    tv: Tensor | None
    soft_ce: Tensor | None


class RowTerms(NamedTuple):
    """Losses of each row, unweighted and detached, each [R].

    Attributes:
        ce: -log q(label); 0 where the label lies outside the draft vocabulary.
        tv: sum over the whole vocabulary of |q - p| (the full L1 distance).
        soft_ce: -sum p log q; NaN where no coefficients of it are given.
        acceptance: alpha = sum min(p, q), the probability that speculative sampling accepts this row's draft.
        is_top: 1 where the label is the draft's most likely token.
    """

    ce: Tensor
    tv: Tensor
    soft_ce: Tensor
    acceptance: Tensor
    is_top: Tensor


class Tile(NamedTuple):
    """Rows that go through the losses together, and the unique teacher positions that teach them."""

    rows: slice
    positions: slice


class Space(NamedTuple):
    """Memory for one tile [r, Vd] that many tiles share: the allocator would return fresh pages for each tensor.

    The gradient takes the place of `logits` once the terms are known.
    """

    logits: Tensor
    draft: Tensor
    probs: Tensor
    work: Tensor
    slope: Tensor | None

    @classmethod
    def like(cls, source: Tensor, rows: int, vocab: int, dtype: torch.dtype, *, has_slope: bool) -> Space:
        """Room for a tile on the device of `source`."""
        logits, draft, probs, work, slope = (source.new_empty(rows, vocab, dtype=dtype) for _ in range(5))
        return cls(logits, draft, probs, work, slope if has_slope else None)

    def first(self, rows: int) -> Space:
        """The first rows of every part."""
        slope = None if self.slope is None else self.slope[:rows]
        return Space(self.logits[:rows], self.draft[:rows], self.probs[:rows], self.work[:rows], slope)


def cut_tiles(taught_by: Tensor, tile_rows: int) -> list[Tile]:
    """Cut the rows into tiles; neighbours that share a teacher position both list it."""
    count = len(taught_by)
    starts = torch.arange(0, count, tile_rows, device=taught_by.device)
    ends = (starts + tile_rows).clamp(max=count)
    edges = torch.stack([starts, ends, taught_by[starts], taught_by[ends - 1] + 1], dim=1).tolist()
    return [Tile(slice(start, end), slice(first, last)) for start, end, first, last in edges]


def tile_threads() -> int:
    """Threads that share the tiles of a chunk on a CPU."""
    return torch.get_num_threads()


def share_out(work: Callable[[Tile, Space], None], tiles: Sequence[Tile], spaces: Sequence[Space]) -> None:
    """Do the work of every tile, in as many threads as there are spaces, each on one core."""
    # Subclasses of tensors (fake ones) live in dispatch modes that other threads do not have.
    if len(spaces) == 1 or type(spaces[0].logits) is not Tensor:
        for tile in tiles:
            work(tile, spaces[0])
        return
    before = torch.get_num_threads()

    def run(index: int) -> None:
        torch.set_num_threads(1)
        with torch.no_grad():
            for tile in tiles[index :: len(spaces)]:
                work(tile, spaces[index])

    try:
        with ThreadPoolExecutor(len(spaces)) as pool:
            for done in [pool.submit(run, index) for index in range(len(spaces))]:
                done.result()
    finally:
        # Each thread has a number of its own; the last one set is what later threads begin with.
        torch.set_num_threads(before)


def fill_logits(space: Space, base: Tensor, markov: Tensor | None, softcap: float | None) -> None:
    """Capped logits, and the slope of the soft-cap."""
    logits = space.logits.copy_(base)
    if softcap is None:
        return
    assert space.slope is not None
    logits.div_(softcap).tanh_()
    torch.mul(logits, logits, out=space.slope).neg_().add_(1.0)
    logits.mul_(softcap)
    if markov is not None:
        logits.add_(space.work.copy_(markov))


def fill_probs(
    space: Space, taught: Tensor, taught_by: Tensor, softcap: float | None, log_normaliser: Tensor | None
) -> Tensor:
    """The teacher's p of each row inside the draft vocabulary, from the logits of its positions; its sums [r]."""
    logits = space.work[: len(taught)].copy_(taught)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    probs = torch.softmax(logits, dim=-1, out=space.draft[: len(taught)])
    if log_normaliser is None:
        torch.index_select(probs, 0, taught_by, out=space.probs)
        return torch.ones_like(space.probs[:, 0])
    mass = torch.exp(_log_sum(logits.amax(dim=-1), probs) - log_normaliser)
    torch.index_select(probs.mul_(mass[:, None]), 0, taught_by, out=space.probs)
    return mass[taught_by]


def row_terms(
    space: Space, mass: Tensor, labels: Tensor, coefficients: RowCoefficients, needs_gradient: bool
) -> tuple[RowTerms, Tensor | None]:
    """Terms of a tile from its logits and p, and the gradient of the objective with respect to the logits [r, Vd].

    With s = sign(q - p) that gradient is q (tv (s - sum q s) + ce + soft_ce sum p) - soft_ce p, less ce at the label.
    """
    logits, probs, work = space.logits, space.probs, space.work
    inside = labels >= 0
    index = labels.clamp(min=0)[:, None]
    peak = logits.amax(dim=-1)
    draft = torch.softmax(logits, dim=-1, out=space.draft)
    normaliser = _log_sum(peak, draft)
    label_logit = logits.gather(1, index)[:, 0]
    ce = torch.where(inside, normaliser - label_logit, 0.0)
    soft_ce = torch.full_like(ce, torch.nan)
    if coefficients.soft_ce is not None:
        soft_ce = mass * normaliser - torch.mul(probs, logits, out=work).sum(dim=-1)
    is_top = _is_top(logits, peak, labels, label_logit)
    difference = torch.sub(draft, probs, out=logits)
    # Rounding of a low-precision product can lift the teacher's mass a little above one.
    tv = torch.abs(difference, out=work).sum(dim=-1) + (1.0 - mass.clamp(max=1.0))
    terms = RowTerms(ce, tv, soft_ce, 1.0 - 0.5 * tv, is_top)
    if not needs_gradient:
        return terms, None
    scale = torch.zeros_like(ce) if coefficients.ce is None else torch.where(inside, coefficients.ce, 0.0)
    at_label = -scale
    if coefficients.soft_ce is not None:
        scale = scale + coefficients.soft_ce * mass
    if coefficients.tv is None:
        gradient = torch.mul(draft, scale[:, None], out=difference)
    else:
        gradient = difference.sign_().mul_(draft)
        scale = scale - coefficients.tv * gradient.sum(dim=-1)
        gradient.mul_(coefficients.tv[:, None]).addcmul_(draft, scale[:, None])
    if coefficients.soft_ce is not None:
        gradient.addcmul_(probs, coefficients.soft_ce[:, None], value=-1.0)
    return terms, gradient.scatter_add_(1, index, at_label[:, None])


def _log_sum(peak: Tensor, probs: Tensor) -> Tensor:
    """Logsumexp of logits with maximum `peak` [r] and softmax `probs` [r, Vd], whose maximum cannot underflow."""
    return peak - probs.amax(dim=-1).log()


def _is_top(logits: Tensor, peak: Tensor, labels: Tensor, label_logit: Tensor) -> Tensor:
    """Whether the first of the largest logits is the label's: argmax, but many times faster on a CPU."""
    if not logits.is_cpu or type(logits) is not Tensor:
        return logits.argmax(dim=-1) == labels
    is_top, table, ids, peaks = (
        tensor.numpy() for tensor in ((label_logit == peak) & (labels >= 0), logits, labels, peak)
    )
    for row in is_top.nonzero()[0]:
        is_top[row] = (table[row, : ids[row]] < peaks[row]).all()
    return torch.from_numpy(is_top)
