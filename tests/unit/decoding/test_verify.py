"""The acceptance rule against a naive loop, exact enumeration and a chi-square test, with verifiers that must fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from deepspec.decoding.sampling import Sampling, prompt_key, round_uniforms, sample, warp
from deepspec.decoding.verify import Verdict, verify, verify_greedy

Verifier = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Verdict]
BELOW_ONE = 1 - 2.0**-53


def random_distributions(*shape: int, seed: int, share_of_zeros: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(*shape, generator=generator, dtype=torch.float64) + 1e-3
    zeros = torch.rand(*shape, generator=generator) < share_of_zeros
    zeros[..., 0] = False
    weights = weights.masked_fill(zeros, 0.0)
    return weights / weights.sum(dim=-1, keepdim=True)


def draw(weights: list[float], uniform: float) -> int:
    target, mass = uniform * sum(weights), 0.0
    for token, weight in enumerate(weights):
        mass += weight
        if target < mass:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def naive_verify(
    tokens: list[int], q: list[list[float]], p: list[list[float]], length: int, u: list[float]
) -> list[int]:
    """One row in Python floats: [accepted, bonus]."""
    block = len(tokens)
    for slot in range(length):
        token = tokens[slot]
        ratio = p[slot][token] / q[slot][token] if q[slot][token] > 0 else (1.0 if p[slot][token] > 0 else 0.0)
        if u[slot] >= min(1.0, ratio):
            residual = [max(a - b, 0.0) for a, b in zip(p[slot], q[slot], strict=True)]
            return [slot, draw(residual if sum(residual) > 0 else p[slot], u[block])]
    return [length, draw(p[length], u[block + 1])]


def reversed_ratio(tokens: Tensor, q: Tensor, p: Tensor, lengths: Tensor, uniforms: Tensor) -> Verdict:
    """A broken verifier: keeps x with probability min(1, q(x) / p(x))."""
    ones = torch.ones_like(p[:, -1:])
    accepted = verify(tokens, p[:, :-1], torch.cat([q, ones], dim=1), lengths, uniforms).accepted
    row = torch.arange(len(accepted))
    padded = torch.cat([q, torch.zeros_like(ones)], dim=1)
    residual = (p - padded).clamp_min(0)[row, accepted]
    weights = torch.where(((accepted < lengths) & (residual.sum(-1) > 0)).unsqueeze(-1), residual, p[row, accepted])
    return Verdict(accepted, sample(weights, uniforms[:, -1]))


def bonus_from_target(tokens: Tensor, q: Tensor, p: Tensor, lengths: Tensor, uniforms: Tensor) -> Verdict:
    """A broken verifier: after a rejection it draws from p instead of the residual."""
    accepted = verify(tokens, q, p, lengths, uniforms).accepted
    return Verdict(accepted, sample(p[torch.arange(len(accepted)), accepted], uniforms[:, -1]))


class TinyModel(NamedTuple):
    """Target and draft given by tables: entry k is [V^k, V], the distribution after each prefix of k tokens."""

    p: list[Tensor]
    q: list[Tensor]

    @property
    def block(self) -> int:
        return len(self.q)

    @property
    def vocab_size(self) -> int:
        return self.p[0].shape[-1]

    def prefixes(self, tokens: Tensor) -> list[Tensor]:
        """The table row of each prefix of [N, T] tokens: T + 1 tensors [N]."""
        rows = [torch.zeros(len(tokens), dtype=torch.int64)]
        for column in tokens.unbind(dim=1):
            rows.append(rows[-1] * self.vocab_size + column)
        return rows

    def law(self) -> Tensor:
        """[V^(K+1)] the target's exact joint law of the next K + 1 tokens."""
        joint = torch.ones(1, 1, dtype=torch.float64)
        for table in self.p:
            joint = (joint.reshape(-1, 1) * table).reshape(-1)
        return joint


def model_on_a_grid(vocab_size: int, block: int, seed: int) -> TinyModel:
    """Probabilities that are quarters; those of the draft are 0, 1/4, 1/2 or 1, so that p / q are quarters too."""
    chooser = random.Random(seed)

    def table(rows: int, *, is_draft: bool) -> Tensor:
        chosen: list[list[int]] = []
        while len(chosen) < rows:
            ends = sorted(chooser.randint(0, 4) for _ in range(vocab_size - 1))
            parts = [b - a for a, b in zip([0, *ends], [*ends, 4], strict=True)]
            if not (is_draft and 3 in parts):
                chosen.append(parts)
        return torch.tensor(chosen, dtype=torch.float64) / 4

    p = [table(vocab_size**k, is_draft=False) for k in range(block + 1)]
    return TinyModel(p, [table(vocab_size**k, is_draft=True) for k in range(block)])


def enumerated_law(verifier: Verifier, model: TinyModel, choose_lengths: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[V^(K+1)] the exact law of K + 1 tokens: what one round emits, then the target's own continuation.

    Every block of draft tokens meets every cell of the uniforms. All thresholds are quarters (acceptance) or twelfths
    (a bonus from quarters that sum to 1, 2, 3 or 4 of them), so the midpoints of those cells integrate exactly.
    """
    block, vocab_size = model.block, model.vocab_size
    axes = [torch.arange(vocab_size)] * block + [torch.arange(4)] * block + [torch.arange(12)]
    cells = torch.cartesian_prod(*axes)
    tokens, tests, last = cells[:, :block], (cells[:, block:-1] + 0.5) / 4, (cells[:, -1:] + 0.5) / 12
    rows = model.prefixes(tokens)
    q = torch.stack([model.q[k][rows[k]] for k in range(block)], dim=1)
    p = torch.stack([model.p[k][rows[k]] for k in range(block + 1)], dim=1)
    chosen = q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    weight = chosen.prod(dim=-1) / (4**block * 12)
    # One uniform serves for both bonus draws: only one of the two is used.
    uniforms = torch.cat([tests, last, last], dim=1).double()
    verdict = verifier(tokens, q, p, choose_lengths(tokens, chosen), uniforms)

    law = torch.zeros(vocab_size ** (block + 1), dtype=torch.float64)
    for accepted in range(block + 1):
        ended = verdict.accepted == accepted
        emitted = rows[accepted][ended] * vocab_size + verdict.bonus[ended]
        joint = torch.zeros(vocab_size ** (accepted + 1), dtype=torch.float64)
        joint = joint.index_add(0, emitted, weight[ended])
        for table in model.p[accepted + 1 :]:
            joint = (joint.reshape(-1, 1) * table).reshape(-1)
        law += joint
    return law


def always(length: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda tokens, chosen: torch.full((len(tokens),), length)


def by_earlier_token(tokens: Tensor, chosen: Tensor) -> Tensor:
    """Verify past slot 0 only after token 0: known before slot 1 is drawn."""
    return torch.where(tokens[:, 0] == 0, tokens.shape[1], 1)


def by_own_probability(tokens: Tensor, chosen: Tensor) -> Tensor:
    """Cut before the first token that the draft itself finds improbable: depends on the token it cuts off."""
    return (chosen >= 0.5).long().cumprod(dim=-1).sum(dim=-1)


SIZES = [(3, 2), (4, 2), (5, 2), (3, 3)]


def enumerated_error(
    verifier: Verifier, choose_lengths: Callable[[Tensor, Tensor], Tensor], size: tuple[int, int]
) -> float:
    """The largest error of any joint probability over several random models."""
    models = [model_on_a_grid(*size, seed) for seed in range(6)]
    return max(float((enumerated_law(verifier, m, choose_lengths) - m.law()).abs().max()) for m in models)


@pytest.mark.parametrize("size", SIZES)
def test_emitted_tokens_have_exactly_the_joint_law_of_the_target(size: tuple[int, int]) -> None:
    for length in range(size[1] + 1):
        assert enumerated_error(verify, always(length), size) < 1e-12
    assert enumerated_error(verify, by_earlier_token, size) < 1e-12


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("broken", [reversed_ratio, bonus_from_target])
def test_enumeration_catches_a_broken_verifier(broken: Verifier, size: tuple[int, int]) -> None:
    assert enumerated_error(broken, always(size[1]), size) > 0.01


@pytest.mark.parametrize("size", SIZES)
def test_enumeration_catches_lengths_steered_by_the_probability_of_the_token_they_cut(size: tuple[int, int]) -> None:
    assert enumerated_error(verify, by_own_probability, size) > 0.01


def chi_square_p_value(counts: Tensor, law: Tensor) -> float:
    """Upper tail of Pearson's statistic; cells expected less than 5 times are pooled; 0 if the impossible occurred."""
    if bool((counts[law == 0] > 0).any()):
        return 0.0
    expected = law * counts.sum()
    small = expected < 5
    expected = torch.cat([expected[~small], expected[small].sum().reshape(1)])
    observed = torch.cat([counts[~small], counts[small].sum().reshape(1)]).double()
    present = expected > 0
    statistic = ((observed - expected)[present].square() / expected[present]).sum()
    freedom = torch.tensor(float(present.sum()) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def sampled_p_value(verifier: Verifier, *, vocab_size: int, block: int, seed: int) -> float:
    """Run 40,000 rounds in float32 with the decoder's own random numbers and test the joint law of K + 1 tokens."""
    num_rounds = 40_000
    p = [random_distributions(vocab_size**k, vocab_size, seed=seed + k, share_of_zeros=0.1) for k in range(block + 1)]
    q = [random_distributions(vocab_size**k, vocab_size, seed=seed + 50 + k, share_of_zeros=0.2) for k in range(block)]
    model = TinyModel(p, q)
    keys = torch.full((num_rounds,), prompt_key("chi-square"))
    uniforms = round_uniforms(seed, keys, torch.arange(num_rounds), 3 * block + 2)

    tokens = torch.zeros(num_rounds, 0, dtype=torch.int64)
    for k in range(block):
        token = sample(model.q[k][model.prefixes(tokens)[-1]].float(), uniforms[:, k])
        tokens = torch.cat([tokens, token.unsqueeze(-1)], dim=1)
    rows = model.prefixes(tokens)
    draft_probs = torch.stack([model.q[k][rows[k]] for k in range(block)], dim=1).float()
    target_probs = torch.stack([model.p[k][rows[k]] for k in range(block + 1)], dim=1).float()
    lengths = torch.full((num_rounds,), block)
    verdict = verifier(tokens, draft_probs, target_probs, lengths, uniforms[:, block : 2 * block + 2])

    counts = torch.zeros(vocab_size ** (block + 1), dtype=torch.int64)
    for accepted in range(block + 1):
        ended = verdict.accepted == accepted
        emitted = rows[accepted][ended] * vocab_size + verdict.bonus[ended]
        for k in range(accepted + 1, block + 1):
            token = sample(model.p[k][emitted].float(), uniforms[ended, 2 * block + 1 + k])
            emitted = emitted * vocab_size + token
        counts += torch.bincount(emitted, minlength=len(counts))
    return chi_square_p_value(counts, model.law())


@pytest.mark.parametrize(("vocab_size", "block"), [(4, 2), (5, 3)])
def test_sampled_rounds_pass_a_chi_square_test_that_broken_verifiers_fail(vocab_size: int, block: int) -> None:
    p_values = [sampled_p_value(verify, vocab_size=vocab_size, block=block, seed=seed) for seed in (100, 200, 300)]
    assert min(p_values) > 1e-3
    assert max(p_values) < 1 - 1e-3  # too good a fit would mean that the draws are not independent
    assert sampled_p_value(reversed_ratio, vocab_size=vocab_size, block=block, seed=100) < 1e-9
    assert sampled_p_value(bonus_from_target, vocab_size=vocab_size, block=block, seed=100) < 1e-9


def random_round(
    rows: int, block: int, vocab_size: int, seed: int, share_of_zeros: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = random_distributions(rows, block, vocab_size, seed=seed + 1, share_of_zeros=share_of_zeros)
    p = random_distributions(rows, block + 1, vocab_size, seed=seed + 2, share_of_zeros=share_of_zeros)
    p[:, :block] = 0.3 * p[:, :block] + 0.7 * q  # close enough for every number of accepted tokens to occur
    tokens = torch.randint(vocab_size, (rows, block), generator=generator)
    lengths = torch.randint(block + 1, (rows,), generator=generator)
    return tokens, q, p, lengths, torch.rand(rows, block + 2, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("share_of_zeros", [0.0, 0.3])
def test_verdicts_equal_a_naive_loop(share_of_zeros: float) -> None:
    tokens, q, p, lengths, uniforms = random_round(2000, 5, 9, 17, share_of_zeros)
    verdict = verify(tokens, q, p, lengths, uniforms)
    rows = zip(tokens.tolist(), q.tolist(), p.tolist(), lengths.tolist(), uniforms.tolist(), strict=True)
    assert torch.stack(verdict, dim=1).tolist() == [naive_verify(*row) for row in rows]
    assert set(verdict.accepted.tolist()) == set(range(6))


def test_accepted_never_exceeds_the_lengths_and_the_bonus_is_possible() -> None:
    tokens, q, p, lengths, uniforms = random_round(3000, 4, 6, 23, 0.5)
    verdict = verify(tokens, q.float(), p.float(), lengths, uniforms)
    assert bool((verdict.accepted <= lengths).all())
    assert bool((p[torch.arange(3000), verdict.accepted, verdict.bonus] > 0).all())


def test_what_lies_past_the_lengths_changes_nothing() -> None:
    tokens, q, p, lengths, uniforms = random_round(1000, 4, 6, 29, 0.2)
    verdict = verify(tokens, q, p, lengths, uniforms)
    past = torch.arange(4) >= lengths.unsqueeze(-1)
    other_tokens = torch.where(past, (tokens + 1) % 6, tokens)
    other_q = torch.where(past.unsqueeze(-1), q.flip(-1), q)
    other_uniforms = uniforms.clone()
    other_uniforms[:, :4] = torch.where(past, 0.0, uniforms[:, :4])
    for left, right in zip(verify(other_tokens, other_q, p, lengths, other_uniforms), verdict, strict=True):
        assert torch.equal(left, right)


def test_distributions_side_by_side_are_read_where_they_lie() -> None:
    tokens, q, p, lengths, uniforms = random_round(500, 4, 6, 37, 0.2)
    real = torch.arange(5) <= lengths.unsqueeze(-1)
    places = torch.zeros(500, 5, dtype=torch.int64)
    places[real] = torch.arange(int(real.sum()))
    flat = verify(tokens, q, p[real], lengths, uniforms, places)
    for left, right in zip(flat, verify(tokens, q, p, lengths, uniforms), strict=True):
        assert torch.equal(left, right)
    with pytest.raises(ValueError, match="places has shape"):
        verify(tokens, q, p[real], lengths, uniforms, places[:, :4])


def test_rows_do_not_depend_on_their_batch() -> None:
    tokens, q, p, lengths, uniforms = random_round(50, 4, 6, 31, 0.2)
    together = torch.stack(verify(tokens, q, p, lengths, uniforms), dim=1)
    for row in range(50):
        at = slice(row, row + 1)
        assert torch.equal(
            torch.stack(verify(tokens[at], q[at], p[at], lengths[at], uniforms[at]), dim=1), together[at]
        )


@pytest.mark.parametrize("block", [0, 3])
def test_length_zero_is_plain_sampling_from_the_target(block: int) -> None:
    tokens, q, p, _, uniforms = random_round(500, block, 7, 37, 0.2)
    verdict = verify(tokens, q, p, torch.zeros(500, dtype=torch.int64), uniforms)
    assert not bool(verdict.accepted.any())
    assert torch.equal(verdict.bonus, sample(p[:, 0], uniforms[:, block + 1]))


def test_a_token_that_the_target_finds_impossible_is_never_accepted() -> None:
    q = torch.tensor([[[0.5, 0.5, 0.0]]])
    p = torch.tensor([[[0.0, 0.4, 0.6], [1.0, 0.0, 0.0]]])
    for uniform in (0.0, 0.5, BELOW_ONE):
        uniforms = torch.tensor([[uniform, 0.9, 0.1]], dtype=torch.float64)
        # The residual is (0, 0, 0.6): token 2, which the draft's reduced vocabulary lacks.
        verdict = verify(torch.tensor([[0]]), q, p, torch.tensor([1]), uniforms)
        assert (verdict.accepted.tolist(), verdict.bonus.tolist()) == ([0], [2])


def test_equal_distributions_are_always_accepted() -> None:
    p = random_distributions(400, 4, 50, seed=41, share_of_zeros=0.3)
    for dtype in (torch.float32, torch.float64):
        probs = p.to(dtype)
        tokens = sample(probs[:, :3], torch.rand(400, 3, generator=torch.Generator().manual_seed(1)).double())
        uniforms = torch.full((400, 5), BELOW_ONE, dtype=torch.float64)
        assert verify(tokens, probs[:, :3], probs, torch.full((400,), 3), uniforms).accepted.tolist() == [3] * 400


def test_an_empty_residual_falls_back_to_the_target() -> None:
    # p lies below q everywhere by rounding alone, so a rejection is possible and leaves nothing to draw from.
    q = torch.tensor([[[0.5, 0.5 + 2.0**-20, 0.0]]])
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]])
    for uniform, token in ((0.2, 0), (0.8, 1)):
        uniforms = torch.tensor([[BELOW_ONE, uniform, 0.0]], dtype=torch.float64)
        verdict = verify(torch.tensor([[1]]), q, p, torch.tensor([1]), uniforms)
        assert (verdict.accepted.tolist(), verdict.bonus.tolist()) == ([0], [token])


def test_greedy_keeps_the_prefix_that_agrees_with_the_target_whatever_the_uniforms() -> None:
    generator = torch.Generator().manual_seed(43)
    logits = torch.randn(200, 5, 4, generator=generator)
    target_probs = warp(logits, Sampling(temperature=0.0))
    draft_logits = logits[:, :4] + 0.3 * torch.randn(200, 4, 4, generator=generator)
    draft_probs = warp(draft_logits, Sampling(temperature=0.0))
    tokens, best = draft_logits.argmax(dim=-1), logits.argmax(dim=-1)
    expected = (tokens == best[:, :4]).long().cumprod(dim=-1).sum(dim=-1)
    for uniform in (0.0, 0.5, BELOW_ONE):
        uniforms = torch.full((200, 6), uniform, dtype=torch.float64)
        verdict = verify(tokens, draft_probs, target_probs, torch.full((200,), 4), uniforms)
        assert torch.equal(verdict.accepted, expected)
        assert torch.equal(verdict.bonus, best[torch.arange(200), expected])


@pytest.mark.parametrize("block", [0, 1, 4])
def test_greedy_verdicts_from_choices_equal_those_from_one_hot_distributions(block: int) -> None:
    generator = torch.Generator().manual_seed(61)
    rows, vocab_size = 3000, 3
    tokens = torch.randint(vocab_size, (rows, block), generator=generator)
    choices = torch.randint(vocab_size, (rows, block + 1), generator=generator)
    lengths = torch.randint(block + 1, (rows,), generator=generator)
    uniforms = torch.rand(rows, block + 2, generator=generator, dtype=torch.float64)
    one_hot = torch.eye(vocab_size)
    expected = verify(tokens, one_hot[tokens], one_hot[choices], lengths, uniforms)
    found = verify_greedy(tokens, choices, lengths)
    assert torch.equal(found.accepted, expected.accepted)
    assert torch.equal(found.bonus, expected.bonus)
    assert set(found.accepted.tolist()) == set(range(block + 1))


def test_verification_never_waits_for_the_device() -> None:
    # A tensor on the meta device has no values, so reading one back raises.
    tokens, q, p, lengths, uniforms = (tensor.to("meta") for tensor in random_round(4, 3, 6, 47, 0.0))
    for verdict in (verify(tokens, q, p, lengths, uniforms), verify_greedy(tokens, p[..., 0].long(), lengths)):
        assert [tuple(tensor.shape) for tensor in verdict] == [(4,), (4,)]


@pytest.mark.parametrize("position", [1, 2, 3, 4])
def test_shapes_that_do_not_fit_are_refused_by_name(position: int) -> None:
    arguments = list(random_round(4, 3, 6, 53, 0.0))
    name = ["draft_tokens", "draft_probs", "target_probs", "lengths", "uniforms"][position]
    arguments[position] = arguments[position][:, :-1] if arguments[position].dim() > 1 else arguments[position][:-1]
    with pytest.raises(ValueError, match=f"{name} has shape"):
        verify(*arguments)


def test_probabilities_in_half_precision_are_refused() -> None:
    tokens, q, p, lengths, uniforms = random_round(4, 3, 6, 59, 0.0)
    with pytest.raises(ValueError, match=r"draft_probs is torch\.bfloat16"):
        verify(tokens, q.bfloat16(), p, lengths, uniforms)
