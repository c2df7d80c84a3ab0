"""The language-model head and every loss on it, in one pass over chunks of rows.

Logits are never held for more than one chunk: each chunk's losses and its gradients with respect to hidden rows, Markov
latents and trainable vocabulary weights are made together, in the forward. A chunk is as large as matrix products like
it; softmax and losses go through it in tiles that stay in the processor's cache. The operator knows rows, labels and
teacher positions; it knows nothing of blocks, steps or algorithms.

Base logits are added onto the Markov ones inside their own product, so the sum is rounded once. One product of
hidden|latent and weight|latent_weight ran at the same rate, forward and backward, and would hold a copy of the head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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


class RowCoefficients(NamedTuple):
    """Factor of each loss of each row in the objective, each [R]."""

    ce: Tensor
    tv: Tensor
    soft_ce: Tensor


class RowTerms(NamedTuple):
    """Losses of each row, unweighted and detached, each [R].

    Attributes:
        ce: -log q(label); 0 where the label lies outside the draft vocabulary.
        tv: sum over the whole vocabulary of |q - p| (the full L1 distance).
        soft_ce: -sum p log q.
        acceptance: alpha = sum min(p, q), the probability that speculative sampling accepts this row's draft.
        is_top: 1 where the label is the draft's most likely token.
    """

    ce: Tensor
    tv: Tensor
    soft_ce: Tensor
    acceptance: Tensor
    is_top: Tensor


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


class _Tile(NamedTuple):
    """Rows that go through the losses together, and the unique teacher positions that teach them."""

    rows: slice
    positions: slice


class _Space(NamedTuple):
    """Memory for one tile [r, Vd] that all tiles share: the allocator would return fresh pages for each tensor.

    The gradient takes the place of `logits` once the terms are known.
    """

    logits: Tensor
    draft: Tensor
    probs: Tensor
    work: Tensor
    slope: Tensor | None

    def first(self, rows: int) -> _Space:
        slope = None if self.slope is None else self.slope[:rows]
        return _Space(self.logits[:rows], self.draft[:rows], self.probs[:rows], self.work[:rows], slope)


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
        coefficients = RowCoefficients(*(factors.detach().to(exact) for factors in coefficients))
        positions, taught_by = torch.unique_consecutive(teacher.rows, return_inverse=True)
        # The soft-cap bends base logits alone, so beside it Markov logits stay apart until the tile.
        is_apart = softcap is not None and latent is not None
        row_bytes = len(weight) * product.itemsize * (3 if is_apart else 2)
        tile_rows, chunk_rows = _sizes(row_bytes, len(weight) * exact.itemsize, budgets, hidden.is_cpu)
        tiles = _tiles(taught_by, tile_rows)
        positions, taught_by = (tensor.to(hidden.device, non_blocking=True) for tensor in (positions, taught_by))
        # Chunks of equal size: products of a few left-over rows are slow.
        chunk_tiles = -(-len(tiles) // max(1, -(-len(hidden) // chunk_rows)))
        shape = (min(tile_rows * chunk_tiles, len(hidden)), len(weight))
        base_space, teacher_space = (hidden.new_empty(shape, dtype=product) for _ in range(2))
        markov_space = hidden.new_empty(shape, dtype=product) if is_apart else None
        logits, draft, probs, work, slope = (hidden.new_empty(tile_rows, len(weight), dtype=exact) for _ in range(5))
        tile_space = _Space(logits, draft, probs, work, None if softcap is None else slope)
        for begin in range(0, len(tiles), max(1, chunk_tiles)):
            chunk = tiles[begin : begin + chunk_tiles]
            rows = slice(chunk[0].rows.start, chunk[-1].rows.stop)
            taught = slice(chunk[0].positions.start, chunk[-1].positions.stop)
            base, markov = _draft_products(low, rows, base_space, markov_space)
            teacher_hidden = teacher.hidden.detach()[positions[taught]].to(product)
            teacher_logits = torch.mm(teacher_hidden, low_teacher.T, out=teacher_space[: taught.stop - taught.start])
            for tile in chunk:
                here = _shifted(tile.rows, rows.start)
                space = tile_space.first(here.stop - here.start)
                normaliser = teacher.log_normaliser
                mass = _fill_probs(
                    space,
                    teacher_logits[_shifted(tile.positions, taught.start)],
                    taught_by[tile.rows] - tile.positions.start,
                    softcap,
                    None if normaliser is None else normaliser[positions[tile.positions]].to(exact),
                )
                _fill_logits(space, base[here], None if markov is None else markov[here], softcap)
                factors = RowCoefficients(*(factor[tile.rows] for factor in coefficients))
                found, gradient = _row_terms(space, mass, labels[tile.rows], factors, needs_gradient)
                for term, values in zip(terms, found, strict=True):
                    term[tile.rows] = values
                if gradient is not None:
                    # Logits of a tile are spent: their place takes the gradient.
                    if markov is not None:
                        markov[here] = gradient
                    base[here] = gradient if space.slope is None else gradient.mul_(space.slope)
            if needs_gradient:
                _accumulate(base, base if markov is None else markov, rows, low, grads)
        ctx.save_for_backward(*[grad for grad in grads if grad is not None])
        ctx.present = [grad is not None for grad in grads]
        ctx.dtypes = [None if source is None else source.dtype for source in sources]
        objective = coefficients.ce * terms.ce + coefficients.tv * terms.tv + coefficients.soft_ce * terms.soft_ce
        ctx.mark_non_differentiable(*terms)
        return objective.sum(), *terms

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


def _tiles(taught_by: Tensor, tile_rows: int) -> list[_Tile]:
    """Cut the rows into tiles; neighbours that share a teacher position both list it."""
    count = len(taught_by)
    starts = torch.arange(0, count, tile_rows, device=taught_by.device)
    ends = (starts + tile_rows).clamp(max=count)
    edges = torch.stack([starts, ends, taught_by[starts], taught_by[ends - 1] + 1], dim=1).tolist()
    return [_Tile(slice(start, end), slice(first, last)) for start, end, first, last in edges]


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


def _fill_logits(space: _Space, base: Tensor, markov: Tensor | None, softcap: float | None) -> None:
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


def _fill_probs(
    space: _Space, taught: Tensor, taught_by: Tensor, softcap: float | None, log_normaliser: Tensor | None
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


def _log_sum(peak: Tensor, probs: Tensor) -> Tensor:
    """Logsumexp of logits with maximum `peak` [r] and softmax `probs` [r, Vd], whose maximum cannot underflow."""
    return peak - probs.amax(dim=-1).log()


def _is_top(logits: Tensor, peak: Tensor, labels: Tensor, work: Tensor) -> Tensor:
    """Whether the first of the largest logits is the label's: argmax, but several times faster on a CPU."""
    if not logits.is_cpu:
        return logits.argmax(dim=-1) == labels
    vocab = logits.shape[-1]
    is_peak = torch.eq(logits, peak[:, None], out=work)
    from_end = torch.arange(vocab, 0, -1, dtype=logits.dtype)
    return vocab - is_peak.mul_(from_end).amax(dim=-1) == labels


def _row_terms(
    space: _Space, mass: Tensor, labels: Tensor, coefficients: RowCoefficients, needs_gradient: bool
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
    ce = torch.where(inside, normaliser - logits.gather(1, index)[:, 0], 0.0)
    soft_ce = mass * normaliser - torch.mul(probs, logits, out=work).sum(dim=-1)
    is_top = _is_top(logits, peak, labels, work)
    difference = torch.sub(draft, probs, out=logits)
    # Rounding of a low-precision product can lift the teacher's mass a little above one.
    tv = torch.abs(difference, out=work).sum(dim=-1) + (1.0 - mass.clamp(max=1.0))
    terms = RowTerms(ce, tv, soft_ce, 1.0 - 0.5 * tv, is_top)
    if not needs_gradient:
        return terms, None
    at_label = torch.where(inside, coefficients.ce, 0.0)
    gradient = difference.sign_().mul_(draft)
    scale = at_label + coefficients.soft_ce * mass - coefficients.tv * gradient.sum(dim=-1)
    gradient.mul_(coefficients.tv[:, None]).addcmul_(draft, scale[:, None])
    gradient.addcmul_(probs, coefficients.soft_ce[:, None], value=-1.0)
    return terms, gradient.scatter_add_(1, index, -at_label[:, None])


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
