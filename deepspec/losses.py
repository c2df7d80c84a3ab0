"""The language-model head and every loss on it, in one pass over chunks of rows.

Logits are never held for more than one chunk: each chunk's losses and its gradients with respect to hidden rows, Markov
latents and trainable vocabulary weights are made together, in the forward. A chunk is as large as matrix products like
it; softmax and losses go through it in tiles that stay in the processor's cache. The operator knows rows, labels and
teacher positions; it knows nothing of blocks, steps or algorithms.

Base logits are added onto the Markov ones inside their own product, so the sum is rounded once. One product of
hidden|latent and weight|latent_weight ran at the same rate, forward and backward, and would hold a copy of the head.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspec.loss_tiles import (
    RowCoefficients,
    RowTerms,
    Space,
    Tile,
    cut_tiles,
    fill_logits,
    fill_probs,
    row_terms,
    share_out,
    tile_threads,
)

__all__ = ["RowCoefficients", "RowTerms", "Teacher", "head_losses"]

# Measured on a CPU at vocabularies of 8k, 49k and 152k: below about 200 rows products lose speed, tiles of 512 KiB and
# less to the calls and those of 4 MiB and more to memory.
CPU_CHUNK_BYTES, CPU_TILE_BYTES = 64 * 2**20, 2 * 2**20
LEAST_CHUNK_ROWS = 192
# On accelerators a kernel must be worth its launch.
DEVICE_CHUNK_BYTES, DEVICE_TILE_BYTES = 512 * 2**20, 64 * 2**20


class Teacher(NamedTuple):
    """The target's distribution at unique positions.

    Attributes:
        hidden: [P, H] last hidden states of the target.
        rows: [R] which of the P positions teaches each row; sorting rows by it saves work. On the host, nothing waits
            for the device.
        weight: [Vd, H] the target's head, or its rows inside the draft vocabulary.
        log_normaliser: [P] logsumexp of the logits over the whole vocabulary, for a reduced draft vocabulary whose
            probabilities must not be renormalised; None normalises over the rows of `weight`.
    """

    hidden: Tensor
    rows: Tensor
    weight: Tensor
    log_normaliser: Tensor | None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def head_losses(
    hidden: Tensor,
    labels: Tensor,
    teacher: Teacher,
    coefficients: RowCoefficients,
    weight: Tensor,
    *,
    latent: Tensor | None = None,
    latent_weight: Tensor | None = None,
    softcap: float | None = None,
    chunk_bytes: int | None = None,
    tile_bytes: int | None = None,
) -> tuple[Tensor, RowTerms]:
    """Losses of draft rows against labels and teacher, and an objective with its gradients ready.

    Draft logits are `cap(hidden @ weight.T) + latent @ latent_weight.T`; probabilities are fp32 (fp64 for fp64 input),
    products use the autocast dtype where autocast is on, else the dtype of `hidden`. torch.compile breaks its graph at
    this call: the operator makes its own gradients, chunk by chunk.

    Args:
        hidden: [R, H] normed hidden rows of the draft.
        labels: [R] label ids in the draft vocabulary, -1 where outside.
        teacher: the target's distributions.
        coefficients: factor of each loss of each row.
        weight: [Vd, H] head of the draft; differentiated only if it requires a gradient.
        latent: [R, r] Markov latents, or None.
        latent_weight: [Vd, r] their projection, with `latent`.
        softcap: cap of base logits.
        chunk_bytes: budget of one chunk's draft and teacher logits, in the dtype of the products; None: by device,
            and at least LEAST_CHUNK_ROWS rows.
        tile_bytes: budget of each fp32 tensor [rows of a tile, Vd], five of which are alive; None: by device.

    Returns:
        The objective (scalar, sum of coefficients times losses) and the terms of each row.
    """
    device = hidden.device.type
    product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        outputs = _HeadLosses.apply(  # type: ignore[no-untyped-call]
            hidden,
            latent,
            weight,
            latent_weight,
            labels,
            teacher,
            coefficients,
            softcap,
            product,
            (chunk_bytes, tile_bytes),
        )
    return outputs[0], RowTerms(*outputs[1:])


class _Sources(NamedTuple):
    """What the products read, in their dtype."""

    hidden: Tensor
    latent: Tensor | None
    weight: Tensor
    latent_weight: Tensor | None


class _Chunk(NamedTuple):
    """Logits of neighbouring rows, [r, Vd] each, and where their rows and teacher positions begin."""

    base: Tensor
    markov: Tensor | None
    teacher_logits: Tensor
    first_row: int
    first_position: int


class _HeadLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        latent: Tensor | None,
        weight: Tensor,
        latent_weight: Tensor | None,
        labels: Tensor,
        teacher: Teacher,
        coefficients: RowCoefficients,
        softcap: float | None,
        product: torch.dtype,
        budgets: tuple[int | None, int | None],
    ) -> tuple[Tensor, ...]:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        sources = (hidden, latent, weight, latent_weight)
        grads = [
            torch.zeros_like(source, dtype=exact) if needed and source is not None else None
            for source, needed in zip(sources, ctx.needs_input_grad[:4], strict=True)
        ]
        needs_gradient = any(grad is not None for grad in grads)
        low = _Sources(
            hidden.detach().to(product),
            None if latent is None else latent.detach().to(product),
            weight.detach().to(product),
            None if latent_weight is None else latent_weight.detach().to(product),
        )
        low_teacher = low.weight if teacher.weight is weight else teacher.weight.detach().to(product)
        terms = RowTerms(*(hidden.new_empty(len(hidden), dtype=exact) for _ in RowTerms._fields))
        coefficients = RowCoefficients(*(None if one is None else one.detach().to(exact) for one in coefficients))
        positions, taught_by = torch.unique_consecutive(teacher.rows, return_inverse=True)
        # The soft-cap bends base logits alone, so beside it Markov logits stay apart until the tile.
        is_apart = softcap is not None and latent is not None
        row_bytes = len(weight) * product.itemsize * (3 if is_apart else 2)
        tile_rows, chunk_rows = _sizes(row_bytes, len(weight) * exact.itemsize, budgets, hidden.is_cpu)
        tiles = cut_tiles(taught_by, tile_rows)
        positions, taught_by = (tensor.to(hidden.device, non_blocking=True) for tensor in (positions, taught_by))
        # Chunks of equal size: products of a few left-over rows are slow.
        chunk_tiles = -(-len(tiles) // max(1, -(-len(hidden) // chunk_rows)))
        shape = (min(tile_rows * chunk_tiles, len(hidden)), len(weight))
        base_space, teacher_space = (hidden.new_empty(shape, dtype=product) for _ in range(2))
        markov_space = hidden.new_empty(shape, dtype=product) if is_apart else None
        spaces = [
            Space.like(hidden, tile_rows, len(weight), exact, has_slope=softcap is not None)
            for _ in range(max(1, min(tile_threads(), chunk_tiles)) if hidden.is_cpu else 1)
        ]

        def through_losses(chunk: _Chunk, tile: Tile, whole_space: Space) -> None:
            """Write a tile's terms, and its gradient where its logits were."""
            here = _shifted(tile.rows, chunk.first_row)
            space = whole_space.first(here.stop - here.start)
            normaliser, markov = teacher.log_normaliser, chunk.markov
            mass = fill_probs(
                space,
                chunk.teacher_logits[_shifted(tile.positions, chunk.first_position)],
                taught_by[tile.rows] - tile.positions.start,
                softcap,
                None if normaliser is None else normaliser[positions[tile.positions]].to(exact),
            )
            fill_logits(space, chunk.base[here], None if markov is None else markov[here], softcap)
            factors = RowCoefficients(*(None if one is None else one[tile.rows] for one in coefficients))
            found, gradient = row_terms(space, mass, labels[tile.rows], factors, needs_gradient)
            for term, values in zip(terms, found, strict=True):
                term[tile.rows] = values
            if gradient is not None:
                if markov is not None:
                    markov[here] = gradient
                chunk.base[here] = gradient if space.slope is None else gradient.mul_(space.slope)

        for begin in range(0, len(tiles), max(1, chunk_tiles)):
            chunk_of_tiles = tiles[begin : begin + chunk_tiles]
            rows = slice(chunk_of_tiles[0].rows.start, chunk_of_tiles[-1].rows.stop)
            taught = slice(chunk_of_tiles[0].positions.start, chunk_of_tiles[-1].positions.stop)
            base, markov = _draft_products(low, rows, base_space, markov_space)
            teacher_hidden = teacher.hidden.detach()[positions[taught]].to(product)
            teacher_logits = torch.mm(teacher_hidden, low_teacher.T, out=teacher_space[: taught.stop - taught.start])
            chunk = _Chunk(base, markov, teacher_logits, rows.start, taught.start)
            share_out(functools.partial(through_losses, chunk), chunk_of_tiles, spaces)
            if needs_gradient:
                _accumulate(base, base if markov is None else markov, rows, low, grads)
        ctx.save_for_backward(*[grad for grad in grads if grad is not None])
        ctx.present = [grad is not None for grad in grads]
        ctx.dtypes = [None if source is None else source.dtype for source in sources]
        weighted = [one * term for one, term in zip(coefficients, terms[:3], strict=True) if one is not None]
        objective = torch.stack(weighted).sum()
        ctx.mark_non_differentiable(*terms)
        return objective, *terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        grads = [
            (next(saved) * outer[0]).to(dtype) if present else None
            for present, dtype in zip(ctx.present, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None, None, None)


def _sizes(
    row_bytes: int, exact_row_bytes: int, budgets: tuple[int | None, int | None], is_cpu: bool
) -> tuple[int, int]:
    """Rows of a tile, and rows of a chunk, a multiple of them."""
    chunk_bytes, tile_bytes = budgets
    if chunk_bytes is None:
        chunk_bytes = max(CPU_CHUNK_BYTES if is_cpu else DEVICE_CHUNK_BYTES, LEAST_CHUNK_ROWS * row_bytes)
    if tile_bytes is None:
        tile_bytes = CPU_TILE_BYTES if is_cpu else DEVICE_TILE_BYTES
    chunk_rows = max(4, chunk_bytes // row_bytes)
    tile_rows = min(chunk_rows, max(4, tile_bytes // exact_row_bytes))
    return tile_rows, chunk_rows // tile_rows * tile_rows


def _shifted(span: slice, origin: int) -> slice:
    return slice(span.start - origin, span.stop - origin)


def _draft_products(
    low: _Sources, rows: slice, base_space: Tensor, markov_space: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Base logits [r, Vd] and, where they have a space of their own, Markov logits; else both in one sum."""
    base = base_space[: rows.stop - rows.start]
    if low.latent is None or low.latent_weight is None:
        return torch.mm(low.hidden[rows], low.weight.T, out=base), None
    markov = base if markov_space is None else markov_space[: rows.stop - rows.start]
    torch.mm(low.latent[rows], low.latent_weight.T, out=markov)
    if markov_space is None:
        return base.addmm_(low.hidden[rows], low.weight.T), None
    return torch.mm(low.hidden[rows], low.weight.T, out=base), markov


def _accumulate(through: Tensor, direct: Tensor, rows: slice, low: _Sources, grads: list[Tensor | None]) -> None:
    """Send a chunk's gradients, through the soft-cap and past it, to rows, latents and vocabulary weights."""
    hidden, latent, weight, latent_weight = grads
    if hidden is not None:
        hidden[rows] = through @ low.weight
    if weight is not None:
        _add_product(weight, through, low.hidden[rows])
    if latent is not None and low.latent_weight is not None:
        latent[rows] = direct @ low.latent_weight
    if latent_weight is not None and low.latent is not None:
        _add_product(latent_weight, direct, low.latent[rows])


def _add_product(total: Tensor, gradient: Tensor, source: Tensor) -> None:
    """Add gradient.T @ source [Vd, .] to the total, in slices: a whole low-precision product would be widened first."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.T, source)
        return
    product = gradient.T @ source
    for begin in range(0, len(total), 1024):
        total[begin : begin + 1024] += product[begin : begin + 1024]
