"""From logits to tokens: warping, inverse-CDF sampling and the random numbers that decoding uses.

Everything here is a pure function of its arguments. It knows nothing of drafts, targets or rounds beyond the integers
that name them, and never touches a global generator. Letters: B requests, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

from deepspec.errors import ConfigError

# Below this the rounding errors of the logits decide alone, and greedy decoding is what was meant.
_LOWEST_TEMPERATURE = 1e-5

# The integer weight of a row's most probable token: sums over a vocabulary of 2^22 stay inside int64.
_LARGEST_WEIGHT = 2**40

# Ids that `choose` takes together on a CPU.
_CHOICE_RUN = 128

# The generator splitmix64 (Steele, Lea and Flood 2014): its Weyl increment, the odd integer nearest to 2^64 divided by
# the golden ratio, and the two multipliers of its finaliser (Stafford's mix 13).
_INCREMENT = 0x9E3779B97F4A7C15
_FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
_SECOND_MULTIPLIER = 0x94D049BB133111EB


class Sampling(NamedTuple):
    """How tokens are drawn from logits; the defaults draw from the model's own distribution.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the fewest most probable tokens whose mass reaches top_p; 1 keeps all.
        min_p: keep tokens at least min_p times as probable as the most probable one; 0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def check_sampling(sampling: Sampling) -> Sampling:
    """Return `sampling` as it is when every value lies in its range.

    Raises:
        ConfigError: a value lies outside its range.
    """
    temperature = sampling.temperature
    if not (temperature == 0 or _LOWEST_TEMPERATURE <= temperature < math.inf):
        raise ConfigError(
            f"sampling.temperature {temperature} is neither 0 (greedy) nor a number from {_LOWEST_TEMPERATURE} up. "
            "Use 0 for greedy decoding, 1 for the model's own distribution."
        )
    if sampling.top_k < 0:
        raise ConfigError(f"sampling.top_k {sampling.top_k} is negative. Use 0 to keep every token, or a count.")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"sampling.top_p {sampling.top_p} is not in (0, 1]. Use 1 to keep every token.")
    if not 0 <= sampling.min_p < 1:
        raise ConfigError(f"sampling.min_p {sampling.min_p} is not in [0, 1). Use 0 to keep every token.")
    return sampling


def choose(logits: Tensor) -> Tensor:
    """The most probable token of each row of logits [..., V], the lowest id among equals; [...] int64."""
    if logits.device.type != "cpu" or logits.shape[-1] % _CHOICE_RUN or not logits.shape[-1]:
        return logits.argmax(dim=-1)
    # On a CPU the largest value is found several times faster than its place (measured: 4x at V 49,152 in fp32), so
    # the place is looked for in the first run of ids that holds the largest value.
    runs = torch.unflatten(logits, -1, (-1, _CHOICE_RUN))
    best = runs.amax(dim=-1).argmax(dim=-1, keepdim=True)
    inside = runs.take_along_dim(best.unsqueeze(-1), dim=-2).squeeze(-2).argmax(dim=-1)
    return best.squeeze(-1) * _CHOICE_RUN + inside


@torch.no_grad()
def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Turn logits into the distribution that tokens are drawn from and scored with.

    The filters act in the order of transformers: temperature, top_k, top_p, min_p. Tokens that tie with the last one
    that top_k or top_p keeps are kept too, so the result does not depend on how a sort breaks ties. No gradient flows
    through it.

    Args:
        logits: [..., V], any floating dtype.
        sampling: checked settings; temperature 0 ignores the rest.

    Returns:
        [..., V] probabilities, float64 for float64 logits and else float32. At temperature 0 they are one-hot at the
        argmax (the lowest id among equals).
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    vocab_size = logits.shape[-1]
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, choose(logits).unsqueeze(-1), 1.0)
    if sampling == Sampling():
        return logits.softmax(dim=-1)
    # In place from here on: with large vocabularies fresh memory costs more than the arithmetic.
    scaled = logits / sampling.temperature
    num_candidates = min(sampling.top_k, vocab_size) if sampling.top_k else vocab_size
    if num_candidates < vocab_size:
        last_kept = scaled.topk(num_candidates, dim=-1).values[..., -1:]
        scaled.masked_fill_(scaled < last_kept, -math.inf)
    probs = torch.softmax(scaled, dim=-1, out=scaled)
    if sampling.top_p == 1 and sampling.min_p == 0:
        return probs

    floor = probs.amax(dim=-1, keepdim=True) * sampling.min_p
    if sampling.top_p < 1:
        if num_candidates == vocab_size and probs.device.type == "cpu" and probs.numel():
            # Tokens below (1 - top_p) / V hold less than 1 - top_p together, so none can be kept; half of that leaves
            # room for rounding. Sorting the others alone is several times faster, and reading on a CPU waits for none.
            is_candidate = probs > 0.5 * (1 - sampling.top_p) / vocab_size
            num_candidates = int(is_candidate.sum(dim=-1).max())
        # Past the candidates there are only tokens that cannot be kept and ties with the last candidate of top_k.
        ranked = probs.topk(num_candidates, dim=-1).values
        mass_before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
        last = (mass_before < sampling.top_p).sum(dim=-1, keepdim=True) - 1
        floor = torch.maximum(floor, ranked.gather(-1, last.clamp_min(0)))
    probs.masked_fill_(probs < floor, 0.0)
    return probs.div_(probs.sum(dim=-1, keepdim=True))


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution; a token of probability 0 is never drawn.

    The sums are exact because they run over integers, so a row gives the same token on every device, in every batch,
    and a cumulative sum cannot rise over a token of weight 0. Tokens less probable than 2^-40 of the row's most
    probable one are not drawn.

    Args:
        probs: [..., V] non-negative weights, at least one of them positive in each row; they need not sum to one.
        uniforms: [...] in [0, 1), one for each row, float64 unless a coarser grid of draws will do.

    Returns:
        [...] int64 token ids.
    """
    if probs.dtype != torch.float64:
        probs = probs.float()
    weights = (probs / probs.amax(dim=-1, keepdim=True)).mul_(_LARGEST_WEIGHT).to(torch.int64)
    cumulative = weights.cumsum_(dim=-1)
    total = cumulative[..., -1:]
    threshold = (uniforms.unsqueeze(-1).double() * total).to(torch.int64)
    # The product can round up to the total, which lies past the last token.
    threshold = torch.minimum(threshold, total - 1)
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def draw(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> Tensor:
    """`sample` from what `warp` makes of logits; a greedy choice is made without their passes over the vocabulary.

    Args:
        logits: [..., V], any floating dtype.
        sampling: checked settings.
        uniforms: [...] in [0, 1).

    Returns:
        [...] int64 token ids.
    """
    if sampling.temperature == 0:
        return choose(logits)
    return sample(warp(logits, sampling), uniforms)


def prompt_key(prompt_id: str) -> int:
    """Hash a prompt id to 63 bits, the same on every machine and in every run."""
    return int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), "big") >> 1


def round_uniforms(seed: int, prompt_keys: Tensor, rounds: Tensor, count: int) -> Tensor:
    """Draw the uniforms of one round of each request, as a function of (seed, prompt, round, column) alone.

    They therefore do not depend on which requests share a batch, on their order, or on the number of processes. Seed,
    key and round are absorbed one after the other by a 64-bit mixer; the columns are the splitmix64 stream that starts
    at the result.

    Args:
        seed: any integer; its lowest 64 bits count.
        prompt_keys: [B] int64, from `prompt_key`.
        rounds: [B] int64, the number of the round of each request.
        count: how many numbers each request gets.

    Returns:
        [B, count] float64 in [0, 1), multiples of 2^-53, on the device of `prompt_keys`.
    """
    state = _mix(torch.full_like(prompt_keys, _signed(seed)))
    for part in (prompt_keys, rounds):
        state = _mix(state ^ part)
    columns = torch.arange(1, count + 1, dtype=torch.int64, device=prompt_keys.device)
    bits = _mix(state.unsqueeze(-1) + columns * _signed(_INCREMENT))
    return _shift_right(bits, 11).double() * 2.0**-53


def _signed(value: int) -> int:
    """The int64 with the same lowest 64 bits."""
    low_bits = value & (2**64 - 1)
    return low_bits - 2**64 if low_bits >= 2**63 else low_bits


def _shift_right(bits: Tensor, amount: int) -> Tensor:
    """Logical shift; torch's own repeats the sign bit."""
    return (bits >> amount) & ((2**64 - 1) >> amount)


def _mix(bits: Tensor) -> Tensor:
    """The increment and finaliser of splitmix64, a bijection of int64 in which products wrap around."""
    bits = bits + _signed(_INCREMENT)
    bits = (bits ^ _shift_right(bits, 30)) * _signed(_FIRST_MULTIPLIER)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(_SECOND_MULTIPLIER)
    return bits ^ _shift_right(bits, 31)
