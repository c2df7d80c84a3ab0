"""Anchors are eligible, uniform and reproducible; slots are supervised by the rule written as loops here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspec.data.anchors import Layout, draw_anchors, eligible_anchors, label_positions, slot_labels, supervised_slots

LAYOUTS: tuple[Layout, ...] = ("anchor_first", "fill_in")
masks = st.lists(st.booleans(), max_size=40)


@given(mask=masks)
def test_a_position_is_eligible_iff_it_and_the_next_are_answer_tokens(mask: list[bool]) -> None:
    expected = [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
    assert eligible_anchors(mask).tolist() == expected


@given(
    mask=masks,
    num_anchors=st.integers(1, 50),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 9),
    index=st.integers(0, 9),
)
def test_drawn_anchors_are_ascending_distinct_eligible_and_as_many_as_there_can_be(
    mask: list[bool], num_anchors: int, seed: int, epoch: int, index: int
) -> None:
    eligible = set(eligible_anchors(mask).tolist())
    drawn = draw_anchors(mask, num_anchors, seed, epoch, index).tolist()
    assert drawn == sorted(set(drawn))
    assert set(drawn) <= eligible
    assert len(drawn) == min(num_anchors, len(eligible))


def test_the_draw_depends_on_seed_epoch_and_sample_alone() -> None:
    mask = [True] * 200
    reference = draw_anchors(mask, 8, 1, 2, 3).tolist()
    np.random.seed(0)
    torch.manual_seed(0)
    draw_anchors(mask, 5, 9, 9, 9)
    assert draw_anchors(np.array(mask), 8, 1, 2, 3).tolist() == reference
    others = [draw_anchors(mask, 8, *key).tolist() for key in [(0, 2, 3), (1, 0, 3), (1, 2, 0), (3, 2, 1), (2, 1, 3)]]
    assert all(other != reference for other in others)


def test_a_draw_leaves_the_global_generators_alone() -> None:
    np.random.seed(0)
    before = np.random.get_state(legacy=False)["state"]["key"].tolist()
    draw_anchors([True] * 50, 5, 1, 2, 3)
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == before


def test_every_eligible_position_is_drawn_equally_often() -> None:
    mask = [False] * 3 + [True] * 21
    draws = 4000
    counts = np.zeros(len(mask))
    for index in range(draws):
        counts[draw_anchors(mask, 5, 0, 0, index)] += 1
    eligible = eligible_anchors(mask)
    expected = draws * 5 / len(eligible)
    deviation = np.sqrt(draws * 0.25 * 0.75)  # binomial, 5 of 20 positions
    assert counts.sum() == draws * 5
    assert np.abs(counts[eligible] - expected).max() < 4 * deviation  # a fixed seed, so it passes always or never


def naive_supervised(
    anchor: int, is_anchor: bool, mask: list[bool], length: int, num_slots: int, layout: Layout
) -> list[bool]:
    supervised = []
    still = is_anchor
    for k in range(num_slots):
        if layout == "fill_in" and k == 0:
            supervised.append(False)
            continue
        position = anchor + k + 1 if layout == "anchor_first" else anchor + k
        still = still and position < length and mask[position]
        supervised.append(still)
    return supervised


@given(data=st.data(), num_slots=st.integers(1, 8), layout=st.sampled_from(LAYOUTS))
def test_supervised_slots_equal_the_rule_written_as_loops(data: st.DataObject, num_slots: int, layout: Layout) -> None:
    batch, width, num_anchors = 3, 12, 4
    lengths = data.draw(st.lists(st.integers(1, width), min_size=batch, max_size=batch))
    # Answer marks past the length must not count, so they are drawn too.
    mask = data.draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=batch, max_size=batch))
    rows = st.lists(st.integers(0, width - 1), min_size=num_anchors, max_size=num_anchors)
    anchors = data.draw(st.lists(rows, min_size=batch, max_size=batch))
    is_anchor = data.draw(
        st.lists(st.lists(st.booleans(), min_size=num_anchors, max_size=num_anchors), min_size=batch, max_size=batch)
    )
    supervised = supervised_slots(
        torch.tensor(anchors), torch.tensor(is_anchor), torch.tensor(mask), torch.tensor(lengths), num_slots, layout
    )
    expected = [
        [naive_supervised(anchors[b][a], is_anchor[b][a], mask[b], lengths[b], num_slots, layout) for a in range(4)]
        for b in range(batch)
    ]
    assert supervised.dtype == torch.bool
    assert supervised.tolist() == expected


@pytest.mark.parametrize(("layout", "first"), [("anchor_first", 1), ("fill_in", 0)])
def test_labels_follow_the_layout_and_stay_in_their_row_past_its_end(layout: Layout, first: int) -> None:
    input_ids = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    positions = label_positions(torch.tensor([[0, 2], [1, 3]]), 3, layout)
    assert positions.tolist() == [[[a + first + k for k in range(3)] for a in row] for row in [[0, 2], [1, 3]]]
    expected = [
        [[10 * (b + 1) + min(3, p) for p in block] for block in row] for b, row in enumerate(positions.tolist())
    ]
    assert slot_labels(input_ids, positions).tolist() == expected


def test_the_layouts_supervise_the_same_tokens_when_fill_in_has_one_slot_more() -> None:
    mask = torch.tensor([[False, True, True, True, True, False, True, True]])
    anchors, lengths = torch.tensor([[1, 3, 6]]), torch.tensor([8])
    is_anchor = torch.ones(1, 3, dtype=torch.bool)
    anchor_first = supervised_slots(anchors, is_anchor, mask, lengths, 4, "anchor_first")
    fill_in = supervised_slots(anchors, is_anchor, mask, lengths, 5, "fill_in")
    assert torch.equal(fill_in[..., 1:], anchor_first)
    assert not fill_in[..., 0].any()
