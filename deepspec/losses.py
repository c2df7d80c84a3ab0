"""The language-model head and every loss on it, in one pass over chunks of rows.

Logits are never held for more than one chunk: each chunk's losses and its gradients with respect to hidden rows, Markov
latents and trainable vocabulary weights are made together, in the forward. The operator knows rows, labels and teacher
positions; it knows nothing of blocks, steps or algorithms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 32 * 2**20


class Teacher(NamedTuple):
    """The target's distribution at unique positions.

    Attributes:
        hidden: [P, H] last hidden states of the target.
        rows: [R] which of the P positions teaches each row; sorting rows by it saves work.
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
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, RowTerms]:
    """Losses of draft rows against labels and teacher, and an objective with its gradients ready.

    Draft logits are `cap(hidden @ weight.T) + latent @ latent_weight.T`; probabilities are fp32 (fp64 for fp64 input),
    products use the autocast dtype where autocast is on, else the dtype of `hidden`.

    Args:
        hidden: [R, H] normed hidden rows of the draft.
        labels: [R] label ids in the draft vocabulary, -1 where outside.
        teacher: the target's distributions.
        coefficients: factor of each loss of each row.
        weight: [Vd, H] head of the draft; differentiated only if it requires a gradient.
        latent: [R, r] Markov latents, or None.
        latent_weight: [Vd, r] their projection, with `latent`.
        softcap: cap of base logits.
        chunk_bytes: budget of one chunk of fp32 logits.

    Returns:
        The objective (scalar, sum of coefficients times losses) and the terms of each row.
    """
    device = hidden.device.type
    product = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        outputs = _HeadLosses.apply(  # type: ignore[no-untyped-call]
            hidden, latent, weight, latent_weight, labels, teacher, coefficients, softcap, product, chunk_bytes
        )
    return outputs[0], RowTerms(*outputs[1:])


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
        chunk_bytes: int,
    ) -> tuple[Tensor, ...]:
        rows, exact = hidden.shape[0], torch.float64 if hidden.dtype == torch.float64 else torch.float32
        sources = (hidden, latent, weight, latent_weight)
        grads = [
            torch.zeros_like(source, dtype=exact) if needed and source is not None else None
            for source, needed in zip(sources, ctx.needs_input_grad[:4], strict=True)
        ]
        low = [None if source is None else source.detach().to(product) for source in sources]
        low_teacher = low[2] if teacher.weight is weight else teacher.weight.to(product)
        assert low[0] is not None
        assert low[2] is not None
        assert low_teacher is not None
        terms = [hidden.new_zeros(rows, dtype=exact) for _ in RowTerms._fields]
        step = max(16, chunk_bytes // (4 * weight.shape[0]))
        for begin in range(0, rows, step):
            chunk = slice(begin, min(begin + step, rows))
            logits, slope = _draft_logits(low[0][chunk], low[2], softcap, exact)
            if low[1] is not None and low[3] is not None:
                logits += low[1][chunk] @ low[3].T
            probs, known = _teacher_probs(teacher, chunk, low_teacher, softcap, product, exact)
            gradient = _chunk_terms(
                logits, probs, known, labels[chunk], coefficients, chunk, terms, any(g is not None for g in grads)
            )
            if gradient is not None:
                _accumulate(gradient, slope, chunk, low, grads, product)
        ctx.save_for_backward(*[grad for grad in grads if grad is not None])
        ctx.present = [grad is not None for grad in grads]
        ctx.dtypes = [None if source is None else source.dtype for source in sources]
        ce, tv, soft_ce, acceptance, is_top = terms
        objective = (coefficients.ce * ce + coefficients.tv * tv + coefficients.soft_ce * soft_ce).sum()
        ctx.mark_non_differentiable(*terms)
        return objective, ce, tv, soft_ce, acceptance, is_top

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        grads = [
            (next(saved) * outer[0]).to(dtype) if present else None
            for present, dtype in zip(ctx.present, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None, None, None)


def _draft_logits(
    hidden: Tensor, weight: Tensor, softcap: float | None, exact: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Base logits [r, Vd] and the slope of the soft-cap, None without one."""
    logits = (hidden @ weight.T).to(exact)
    if softcap is None:
        return logits, None
    bent = torch.tanh(logits / softcap)
    return bent * softcap, 1.0 - bent.square()


def _teacher_probs(
    teacher: Teacher, chunk: slice, weight: Tensor, softcap: float | None, product: torch.dtype, exact: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Teacher's p of each row of the chunk [r, Vd], and how much of its mass the draft vocabulary holds [r]."""
    positions, inverse = torch.unique_consecutive(teacher.rows[chunk], return_inverse=True)
    logits = (teacher.hidden[positions].to(product) @ weight.T).to(exact)
    if softcap is not None:
        logits = torch.tanh_(logits.div_(softcap)).mul_(softcap)
    if teacher.log_normaliser is None:
        probs = torch.softmax(logits, dim=-1)
        return probs[inverse], torch.ones(len(inverse), dtype=exact, device=probs.device)
    probs = (logits - teacher.log_normaliser[positions, None].to(exact)).exp_()
    # Rounding of the low-precision product can lift the sum a little above one.
    return probs[inverse], probs.sum(dim=-1).clamp(max=1.0)[inverse]


def _chunk_terms(
    logits: Tensor,
    probs: Tensor,
    known: Tensor,
    labels: Tensor,
    coefficients: RowCoefficients,
    chunk: slice,
    terms: list[Tensor],
    needs_gradient: bool,
) -> Tensor | None:
    """Fill the terms of a chunk; return the gradient of the objective with respect to its logits."""
    inside = labels >= 0
    index = labels.clamp(min=0)[:, None]
    normaliser = torch.logsumexp(logits, dim=-1)
    terms[0][chunk] = torch.where(inside, normaliser - logits.gather(1, index)[:, 0], 0.0)
    terms[2][chunk] = probs.sum(dim=-1) * normaliser - torch.einsum("rv,rv->r", probs, logits)
    terms[4][chunk] = ((logits.argmax(dim=-1) == labels) & inside).to(logits.dtype)
    draft = logits.sub_(normaliser[:, None]).exp_()
    difference = draft - probs
    terms[1][chunk] = difference.abs().sum(dim=-1) + (1.0 - known)
    terms[3][chunk] = 1.0 - 0.5 * terms[1][chunk]
    if not needs_gradient:
        return None
    ce = torch.where(inside, coefficients.ce[chunk], 0.0).to(logits.dtype)
    tv, soft_ce = coefficients.tv[chunk].to(logits.dtype), coefficients.soft_ce[chunk].to(logits.dtype)
    sign = difference.sign_()
    centre = torch.einsum("rv,rv->r", draft, sign)
    scale = ce + soft_ce * probs.sum(dim=-1) - tv * centre
    gradient = draft.mul_(sign.mul_(tv[:, None]).add_(scale[:, None]))
    gradient.addcmul_(probs, soft_ce[:, None], value=-1.0)
    return gradient.scatter_add_(1, index, -ce[:, None])


def _accumulate(
    gradient: Tensor,
    slope: Tensor | None,
    chunk: slice,
    low: list[Tensor | None],
    grads: list[Tensor | None],
    product: torch.dtype,
) -> None:
    """Send a chunk's logit gradient to hidden rows, latents and vocabulary weights."""
    hidden, latent, weight, latent_weight = low
    if latent is not None and latent_weight is not None and (grads[1] is not None or grads[3] is not None):
        direct = gradient.to(product)
        if grads[1] is not None:
            grads[1][chunk] = (direct @ latent_weight).to(grads[1].dtype)
        if grads[3] is not None:
            grads[3] += direct.T @ latent[chunk]
    if grads[0] is not None or grads[2] is not None:
        through = (gradient if slope is None else gradient.mul_(slope)).to(product)
        assert hidden is not None
        assert weight is not None
        if grads[0] is not None:
            grads[0][chunk] = (through @ weight).to(grads[0].dtype)
        if grads[2] is not None:
            grads[2] += through.T @ hidden[chunk]
