"""Warping, inverse-CDF sampling and the counter-based random numbers of decoding."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from deepspec.decoding.sampling import (
    Sampling,
    check_sampling,
    choose,
    draw,
    prompt_key,
    round_uniforms,
    sample,
    warp,
)
from deepspec.errors import ConfigError

BELOW_ONE = 1 - 2.0**-53


def naive_warp(logits: list[float], sampling: Sampling) -> list[float]:
    """The warpers of transformers, one after the other, in Python floats; logits without ties."""
    scaled = [logit / sampling.temperature for logit in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    kept = order[: sampling.top_k] if sampling.top_k else order
    weights = {token: math.exp(scaled[token] - scaled[order[0]]) for token in kept}
    total = sum(weights.values())
    mass, nucleus = 0.0, []
    for token in kept:
        if mass < sampling.top_p:
            nucleus.append(token)
        mass += weights[token] / total
    final = [token for token in nucleus if weights[token] >= sampling.min_p * weights[order[0]]]
    total = sum(weights[token] for token in final)
    return [weights[token] / total if token in final else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(temperature=1.7),
        Sampling(top_k=3),
        Sampling(top_k=1),
        Sampling(top_k=100),
        Sampling(top_p=0.8),
        Sampling(top_p=0.05),
        Sampling(min_p=0.2),
        Sampling(0.7, 5, 0.9, 0.0),
        Sampling(1.3, 7, 0.95, 0.1),
        Sampling(1.0, 0, 0.9, 0.3),
    ],
)
def test_warp_equals_a_naive_loop(sampling: Sampling) -> None:
    logits = torch.randn(6, 4, 17, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2
    probs = warp(logits, sampling)
    expected = torch.tensor([[naive_warp(row, sampling) for row in rows] for rows in logits.tolist()])
    assert torch.equal(probs > 0, expected > 0)
    torch.testing.assert_close(probs, expected.double(), rtol=0, atol=1e-7)  # `expected` went through float32
    torch.testing.assert_close(warp(logits.float(), sampling), expected, rtol=0, atol=1e-6)


def test_warp_keeps_float64_and_raises_everything_else_to_float32() -> None:
    logits = torch.randn(2, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for temperature in (0.0, 1.0, 0.5):
            assert warp(logits.to(dtype), Sampling(temperature)).dtype == torch.float32
    assert warp(logits.double(), Sampling(0.5, 3, 0.9, 0.1)).dtype == torch.float64


def test_warp_leaves_its_argument_alone() -> None:
    logits = torch.randn(2, 8)
    before = logits.clone()
    for sampling in (Sampling(0.0), Sampling(0.5), Sampling(1.0, 3, 0.9, 0.1)):
        warp(logits, sampling)
    assert torch.equal(logits, before)


def test_temperature_zero_is_one_hot_at_the_lowest_id_among_the_best() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, -1.0, 5.0, 5.0], [-math.inf, -math.inf, -3.0, -math.inf]])
    expected = torch.tensor([[0.0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]])
    assert torch.equal(warp(logits, Sampling(temperature=0.0)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [7, 128, 512, 1000, 1024])
def test_choices_are_the_lowest_ids_among_the_best_of_any_vocabulary(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    # Few values, so that every row has many that tie for the best.
    logits = torch.randint(-3, 3, (5, 40, vocab_size), generator=generator).to(dtype)
    logits[0] = -math.inf
    logits[1, :, vocab_size // 2] = math.nan
    logits[2] = torch.randn(40, vocab_size, generator=generator).to(dtype)
    found = choose(logits)
    for row, values in enumerate(logits.flatten(0, 1).tolist()):
        broken = [index for index, value in enumerate(values) if math.isnan(value)]
        expected = broken[0] if broken else values.index(max(values))
        assert found.flatten()[row].item() == expected
    assert choose(logits[:0]).shape == (0, 40)


def test_warp_survives_the_lowest_temperature_and_masked_logits() -> None:
    logits = torch.tensor([[-math.inf, 3e4, 2.9e4, -math.inf]])
    assert torch.equal(warp(logits, Sampling(temperature=1e-5)), torch.tensor([[0.0, 1, 0, 0]]))


def test_tokens_that_tie_with_the_last_kept_one_are_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0]])
    assert (warp(logits, Sampling(top_k=2)) > 0).tolist() == [[True, False, True, True, True]]
    assert (warp(logits, Sampling(top_p=0.6)) > 0).tolist() == [[True, False, True, True, True]]
    assert (warp(logits, Sampling(top_k=2, top_p=0.6)) > 0).tolist() == [[True, False, True, True, True]]
    assert (warp(logits, Sampling(top_k=2, top_p=0.4)) > 0).tolist() == [[True, False, False, False, False]]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=-0.1),
        Sampling(temperature=1e-9),
        Sampling(temperature=math.inf),
        Sampling(temperature=math.nan),
        Sampling(top_k=-1),
        Sampling(top_p=0.0),
        Sampling(top_p=1.01),
        Sampling(top_p=math.nan),
        Sampling(min_p=1.0),
        Sampling(min_p=-0.1),
    ],
)
def test_settings_outside_their_range_are_refused_by_name(sampling: Sampling) -> None:
    (name,) = [field for field, value in sampling._asdict().items() if value != Sampling()._asdict()[field]]
    with pytest.raises(ConfigError, match=f"sampling.{name}"):
        check_sampling(sampling)


def test_settings_at_the_ends_of_their_range_are_accepted() -> None:
    for sampling in (Sampling(), Sampling(0.0), Sampling(1e-5, 0, 1.0, 0.0), Sampling(2.0, 1, 1e-3, 0.999)):
        assert check_sampling(sampling) == sampling


def test_sample_equals_a_naive_inverse_of_the_cumulative_distribution() -> None:
    generator = torch.Generator().manual_seed(5)
    probs = torch.rand(500, 11, generator=generator, dtype=torch.float64)
    probs = torch.where(probs < 0.3, 0.0, probs)
    probs /= probs.sum(dim=-1, keepdim=True)
    uniforms = torch.rand(500, generator=generator, dtype=torch.float64)
    expected = []
    for row, uniform in zip(probs.tolist(), uniforms.tolist(), strict=True):
        mass, token = 0.0, -1
        while mass <= uniform:
            token += 1
            mass += row[token]
        expected.append(token)
    assert sample(probs, uniforms).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sample_never_draws_a_token_of_probability_zero(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    probs = torch.randn(300, 3000, generator=generator).mul(4).softmax(dim=-1).to(dtype)
    probs[torch.rand(300, 3000, generator=generator) < 0.5] = 0
    probs[:, -100:] = 0
    probs[:, :100] = 0
    for uniform in (0.0, 2.0**-53, 0.5, 1 - 2.0**-24, BELOW_ONE, 1.0):
        tokens = sample(probs, torch.full((300,), uniform, dtype=torch.float64))
        assert bool((probs.gather(-1, tokens.unsqueeze(-1)) > 0).all())


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e-30, 1e-40, 1e20])
def test_sample_needs_no_normalised_weights(size: float) -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0]) * size
    uniforms = torch.tensor([0.0, 0.24, 0.26, BELOW_ONE], dtype=torch.float64)
    assert sample(weights.expand(4, 5), uniforms).tolist() == [1, 1, 3, 3]


def test_sample_is_exact_on_one_hot_rows_of_any_leading_shape() -> None:
    tokens = torch.randint(0, 49152, (3, 4), generator=torch.Generator().manual_seed(1))
    probs = torch.zeros(3, 4, 49152).scatter_(-1, tokens.unsqueeze(-1), 1.0)
    for uniform in (0.0, 0.3, BELOW_ONE):
        assert torch.equal(sample(probs, torch.full((3, 4), uniform, dtype=torch.float64)), tokens)


def test_sample_follows_the_distribution_over_a_large_vocabulary() -> None:
    probs = torch.randn(49152, generator=torch.Generator().manual_seed(2)).mul(3).softmax(dim=-1)
    grid = (torch.arange(800, dtype=torch.float64) + 0.5) / 800
    tokens = sample(probs.expand(800, -1), grid)
    # An inverse CDF on an even grid puts at most one point too many or too few on every prefix of the vocabulary.
    drawn = torch.bincount(tokens, minlength=49152).double().cumsum(0) / 800
    exact = probs.double().cumsum(0) / probs.double().sum()
    assert float((drawn - exact).abs().max()) <= 1 / 800


def uniforms_of(seed: int, prompts: list[str], rounds: list[int], count: int) -> Tensor:
    keys = torch.tensor([prompt_key(prompt) for prompt in prompts])
    return round_uniforms(seed, keys, torch.tensor(rounds), count)


def test_prompt_keys_are_stable_distinct_and_63_bits_wide() -> None:
    assert prompt_key("human_eval/0") == 5877083527083783218
    keys = {prompt_key(f"prompt {index}") for index in range(2000)}
    assert len(keys) == 2000
    assert min(keys) >= 0
    assert 2**62 < max(keys) < 2**63


def test_round_uniforms_equal_a_naive_splitmix64() -> None:
    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
        return value ^ (value >> 31)

    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of the published generator seeded with 0
    drawn = uniforms_of(-3, ["a", "b"], [0, 9], 4)
    for row, (prompt, number) in enumerate([("a", 0), ("b", 9)]):
        state = mix(mix(mix(-3 % 2**64) ^ prompt_key(prompt)) ^ number)
        expected = [(mix(state + column * 0x9E3779B97F4A7C15) >> 11) / 2**53 for column in range(1, 5)]
        assert drawn[row].tolist() == expected


def test_round_uniforms_do_not_depend_on_the_composition_of_the_batch() -> None:
    prompts, rounds = [f"task/{index}" for index in range(40)], [index % 7 for index in range(40)]
    together = uniforms_of(11, prompts, rounds, 16)
    order = random.Random(0).sample(range(40), 40)
    shuffled = uniforms_of(11, [prompts[i] for i in order], [rounds[i] for i in order], 16)
    assert torch.equal(shuffled, together[order])
    for index in range(40):
        alone = uniforms_of(11, prompts[index : index + 1], rounds[index : index + 1], 5)
        assert torch.equal(alone[0], together[index, :5])


def test_round_uniforms_leave_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    uniforms_of(0, ["a"], [0], 8)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_round_uniforms_are_uniform_in_every_column() -> None:
    prompts = [f"p{index}" for index in range(200)]
    drawn = torch.cat([uniforms_of(1, prompts, [number] * 200, 16) for number in range(100)])
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) < 1
    count = drawn.shape[0]
    ranks = torch.arange(count, dtype=torch.float64).unsqueeze(-1)
    ordered = drawn.sort(dim=0).values
    distance = torch.maximum(ordered - ranks / count, (ranks + 1) / count - ordered).amax(dim=0)
    # Kolmogorov: sqrt(n) D exceeds 2.3 with probability 5e-5 in a column.
    assert float(distance.max()) * math.sqrt(count) < 2.3


def test_round_uniforms_of_other_rounds_prompts_columns_and_seeds_are_uncorrelated() -> None:
    prompts = [f"p{index}" for index in range(100)]
    drawn = torch.stack(
        [
            torch.stack([uniforms_of(seed, prompts, [number] * 100, 8) for number in range(50)], dim=1)
            for seed in range(4)
        ]
    )  # [seed, prompt, round, column]
    centred = (drawn - 0.5) * math.sqrt(12)
    for axis in range(4):
        for distance in (1, 2, 3):
            first = centred.narrow(axis, 0, centred.shape[axis] - distance)
            second = centred.narrow(axis, distance, centred.shape[axis] - distance)
            # The mean of n products of independent unit variables: standard deviation 1 / sqrt(n).
            assert abs(float((first * second).mean())) < 4.5 / math.sqrt(first.numel())
    assert len(set(drawn.flatten().tolist())) == drawn.numel()


def test_drawing_never_waits_for_the_device() -> None:
    # A tensor on the meta device has no values, so reading one back raises.
    keys = torch.zeros(3, dtype=torch.int64, device="meta")
    uniforms = round_uniforms(5, keys, keys, 4)
    assert sample(torch.rand(3, 9, device="meta"), uniforms[:, 0]).device.type == "meta"
    assert warp(torch.rand(3, 9, device="meta"), Sampling(0.5, 3, 0.9, 0.1)).device.type == "meta"


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95, 0.999999])
def test_nucleus_of_a_large_vocabulary_is_the_smallest_that_reaches_top_p(spread: float, top_p: float) -> None:
    logits = spread * torch.randn(4, 20_000, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    kept = warp(logits, Sampling(top_p=top_p)) > 0
    probs = logits.softmax(dim=-1)
    smallest = torch.where(kept, probs, 2.0).amin(dim=-1)
    mass = (probs * kept).sum(dim=-1)
    above = (probs * (probs > smallest.unsqueeze(-1))).sum(dim=-1)
    assert torch.equal(kept, probs >= smallest.unsqueeze(-1))
    assert bool((mass >= top_p - 1e-12).all())  # sums in another order differ in the last bits
    assert bool((above < top_p + 1e-12).all())


def test_an_empty_batch_is_warped_and_sampled_to_an_empty_batch() -> None:
    for sampling in (Sampling(), Sampling(0.0), Sampling(0.5, 3, 0.9, 0.1), Sampling(top_p=0.9)):
        probs = warp(torch.zeros(0, 5), sampling)
        assert tuple(probs.shape) == (0, 5)
        assert tuple(sample(probs, torch.zeros(0, dtype=torch.float64)).shape) == (0,)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(), Sampling(temperature=0.7, top_p=0.9)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_drawing_from_logits_is_sampling_from_what_warping_makes_of_them(
    sampling: Sampling, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(3)
    # In steps of a quarter, so that many rows have several best tokens.
    logits = (torch.randn(400, 30, generator=generator) * 4).round().div(4).to(dtype)
    uniforms = torch.rand(400, generator=generator, dtype=torch.float64)
    uniforms[:3] = torch.tensor([0.0, BELOW_ONE, 0.5])
    assert (logits == logits.amax(dim=-1, keepdim=True)).sum(dim=-1).max() > 1
    assert torch.equal(draw(logits, sampling, uniforms), sample(warp(logits, sampling), uniforms))
