from __future__ import annotations

import itertools

from deepspec.decoding.lane import Request
from deepspec.decoding.waiting import Waiting


def requests(*lengths: int) -> list[Request]:
    return [Request(f"r{index}", [1] * length) for index, length in enumerate(lengths)]


def test_the_longest_prompt_comes_first_and_equals_keep_their_order() -> None:
    waiting = Waiting(requests(2, 5, 2, 9))
    assert [one.prompt_id for one in waiting.take(3)] == ["r3", "r1", "r0"]
    assert len(waiting) == 1
    assert [one.prompt_id for one in waiting.take(3)] == ["r2"]
    assert len(waiting) == 0
    assert waiting.take(1) == []


def test_processes_that_share_a_list_take_every_request_once() -> None:
    taken = itertools.count()

    def claim(count: int) -> int:
        first, *_ = [next(taken) for _ in range(count)]
        return first

    both = [Waiting(requests(*range(1, 12)), claim) for _ in range(2)]
    found = []
    for turn in range(20):
        found += both[turn % 2].take(1 + turn % 3)
    assert sorted(one.prompt_id for one in found) == sorted(f"r{index}" for index in range(11))
    assert [len(waiting) for waiting in both] == [0, 0]
