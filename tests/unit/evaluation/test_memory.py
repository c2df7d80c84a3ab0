"""The memory estimate bounds what decoding holds, and a budget bounds the batch."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch
from helpers import kind_of_draft, tiny_target

from deepspec.decoding.decoder import Request, generate
from deepspec.decoding.kv_cache import RaggedCache
from deepspec.decoding.sampling import Sampling
from deepspec.errors import ConfigError
from deepspec.evaluation.memory import PeakMemory, batch_size_within, bytes_per_request

NEW = 150


@pytest.mark.parametrize("kind", ["dspark-vanilla", "eagle3"])
@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_caches_never_hold_more_than_the_estimate(kind: str, family: str) -> None:
    target = tiny_target(family)
    draft = kind_of_draft(target, kind).eval()
    requests = [Request(f"p{index}", [4 + index] * (5 + 12 * (index % 6))) for index in range(18)]
    longest = max(len(request.prompt_ids) for request in requests)
    bound = bytes_per_request(target, draft, longest, NEW).of_batch(6)
    gc.collect()
    others = {id(one) for one in gc.get_objects() if type(one) is RaggedCache}
    held = []
    for _ in generate(target, draft, requests, Sampling(), max_new_tokens=NEW, batch_size=6, timers=False):
        caches = [one for one in gc.get_objects() if type(one) is RaggedCache and id(one) not in others]
        held.append(sum(one.nbytes for one in caches))
    assert 0.05 * bound < max(held) <= bound


def test_a_budget_lowers_the_batch_in_proportion_and_never_raises_it() -> None:
    target = tiny_target()
    draft = kind_of_draft(target, "dspark-vanilla").eval()
    one = bytes_per_request(target, draft, 20, NEW)

    def size(requests: int, share: float = 1.001) -> int:
        return batch_size_within(share * one.of_batch(requests) / 2**30, 16, target, draft, 20, NEW)

    assert [size(requests) for requests in (1, 2, 5, 16, 900)] == [1, 2, 5, 16, 16]
    assert [size(requests, 0.999) for requests in (2, 5, 16)] == [1, 4, 15]
    # Half as many prompts are read ahead, beside those that fill the rows.
    assert one.of_batch(4) == 4 * one.held + max(4 * one.round + 2 * one.prompt, 6 * (one.prompt + one.reading))
    assert batch_size_within(None, 16, target, draft, 20, NEW) == 16
    with pytest.raises(ConfigError, match=r"memory_gib .* does not hold one request of 20 prompt and 150 new tokens"):
        size(1, 0.9)


def test_longer_answers_and_prompts_need_more() -> None:
    target = tiny_target()
    plain = bytes_per_request(target, None, 20, NEW).of_batch(1)
    assert bytes_per_request(target, None, 20, 2 * NEW).of_batch(1) > plain
    assert bytes_per_request(target, None, 400, NEW).of_batch(1) > plain
    assert bytes_per_request(target, kind_of_draft(target, "eagle3").eval(), 20, NEW).of_batch(1) > plain


def test_peak_memory_sees_what_was_freed_again() -> None:
    peak = PeakMemory(torch.device("cpu"))
    before = peak.read()
    if before is None:
        pytest.skip("this system does not say how much memory a process held")
    # From the system itself: an allocator may have it left over from others.
    held = torch.frombuffer(mmap.mmap(-1, 64 * 2**20), dtype=torch.uint8).fill_(1)
    del held
    after = peak.read()
    assert after is not None
    assert after - before > 48 * 2**20
    # A new one begins with what is held now.
    again = PeakMemory(torch.device("cpu")).read()
    assert again is not None
    assert again < after - 32 * 2**20
