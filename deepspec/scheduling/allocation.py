"""Which slots of a batch are verified: ranking by survival, and two ways to choose how many.

Pure functions of tensors that wait for no device. Losslessness rests on two facts: a slot's survival is known before
its own token is drawn, and slots are visited by descending survival, in which a slot comes before all behind it.
Letters: B requests, K draft tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def survival(confidence: Tensor, proposed: Tensor) -> Tensor:
    """a_{r,j}, the predicted probability that slots 0..j are all accepted: [B, K] float64, 0 past `proposed`."""
    slots = torch.arange(confidence.shape[1], device=confidence.device)
    return confidence.double().cumprod(dim=1) * (slots < proposed[:, None])


def ranked(chances: Tensor) -> tuple[Tensor, Tensor]:
    """Survivals in the order of Algorithm 1: descending, among equals the smaller slot, then the smaller row.

    Args:
        chances: [B, K] from `survival`.

    Returns:
        [B * K] survivals, and the index of each in the transposed table [K, B].
    """
    found = torch.sort(chances.T.reshape(-1), descending=True, stable=True)
    return found.values, found.indices


def causal_number(descending: Tensor, requests: int | Tensor, rates: Tensor) -> Tensor:
    """Algorithm 1: admit slots as long as each raises the expected tokens per second, and stop at the first that fails.

    Whether a slot is admitted depends on survivals before it in the order alone, so the stop keeps sampling lossless.

    Args:
        descending: [N] survivals in the order of `ranked`.
        requests: how many requests are active, each of which yields one token without any draft.
        rates: [N + 1] steps per second with 0, 1, .. N slots.

    Returns:
        0-d int64, how many slots are admitted.
    """
    speeds = _speeds(descending, requests, rates)
    is_admitted = (speeds[1:] > speeds[:-1]) & (descending > 0)
    return is_admitted.long().cumprod(dim=0).sum()


def best_number(descending: Tensor, requests: int | Tensor, rates: Tensor) -> Tensor:
    """The number of slots with most expected tokens per second, searched over all numbers; arguments as above.

    Lossless only with survivals that know nothing of the present round.
    """
    speeds = _speeds(descending, requests, rates)
    positive = (descending > 0).sum()
    numbers = torch.arange(len(speeds), device=speeds.device)
    return torch.where(numbers <= positive, speeds, -torch.inf).argmax()


def first_slots(order: Tensor, number: Tensor, batch: int, block: int) -> Tensor:
    """How many slots of each row are among the first `number` of the order, [B] int64."""
    is_taken = torch.zeros(batch * block, dtype=torch.int64, device=order.device)
    is_taken[order] = (torch.arange(batch * block, device=order.device) < number).long()
    return is_taken.view(block, batch).sum(dim=0)


def _speeds(descending: Tensor, requests: int | Tensor, rates: Tensor) -> Tensor:
    """Expected tokens per second with 0, 1, .. N slots."""
    expected = torch.cat([descending.new_zeros(1), descending.cumsum(dim=0)]) + requests
    return expected * rates
