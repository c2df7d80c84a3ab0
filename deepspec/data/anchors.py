"""Where blocks start and which of their slots are supervised: functions of the answer mask alone.

Anchors are data: they are drawn from (seed, epoch, sample) before the forward, so that a forward is deterministic, a
resumed run draws the same ones, and the denominators of the losses are known in advance. This module knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Layout = Literal["anchor_first", "fill_in"]

# Keeps these draws apart from every other draw that is made from the same seed.
_PURPOSE = 0x616E6368


def eligible_anchors(answer_mask: Sequence[bool] | npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Positions from which a block may be drafted: answer tokens whose next token is an answer token too, ascending."""
    mask = np.asarray(answer_mask, dtype=bool)
    return np.flatnonzero(mask[:-1] & mask[1:]).astype(np.int64)


def draw_anchors(
    answer_mask: Sequence[bool] | npt.NDArray[np.bool_], num_anchors: int, seed: int, epoch: int, sample_index: int
) -> npt.NDArray[np.int64]:
    """Draw up to `num_anchors` eligible positions uniformly without replacement.

    The draw depends on (seed, epoch, sample_index) and the mask only, so world size, batch size, order and resume
    cannot change it.

    Args:
        answer_mask: [L] True on the tokens that the target generated.
        num_anchors: how many to draw; all eligible positions where there are fewer.
        seed: seed of the run.
        epoch: number of the pass over the data, from 0.
        sample_index: index of the sample in its dataset.

    Returns:
        Ascending positions.
    """
    eligible = eligible_anchors(answer_mask)
    if len(eligible) <= num_anchors:
        return eligible
    sequence = np.random.SeedSequence(seed, spawn_key=(_PURPOSE, epoch, sample_index))
    keys = np.random.Generator(np.random.Philox(sequence)).random(len(eligible))
    return np.sort(eligible[np.argpartition(keys, num_anchors)[:num_anchors]])


def label_positions(anchors: Tensor, num_slots: int, layout: Layout) -> Tensor:
    """Position of the token that each slot predicts; may lie past the end of the sample.

    Args:
        anchors: [B, A] positions of the last known tokens.
        num_slots: inputs of a block: K for `anchor_first`, K + 1 for `fill_in`, whose slot 0 is the anchor itself.
        layout: `anchor_first`: slot k predicts token anchor + k + 1; `fill_in`: slot k predicts token anchor + k.

    Returns:
        [B, A, num_slots] int64.
    """
    first = 1 if layout == "anchor_first" else 0
    return anchors.unsqueeze(-1) + torch.arange(first, first + num_slots, device=anchors.device)


def slot_labels(input_ids: Tensor, positions: Tensor) -> Tensor:
    """Token ids at `positions` [B, A, K] of `input_ids` [B, L]; past the end of a row any id of that row."""
    return _gather(input_ids, positions)


def supervised_slots(
    anchors: Tensor, anchor_mask: Tensor, answer_mask: Tensor, lengths: Tensor, num_slots: int, layout: Layout
) -> Tensor:
    """Tell which slots have a label to learn from.

    A slot is supervised iff its label lies inside the sample, is an answer token, and all earlier slots of the block
    are supervised. Slot 0 of `fill_in` holds the known anchor: it is never supervised, and no slot waits for it.

    Args:
        anchors: [B, A] positions of the last known tokens.
        anchor_mask: [B, A] bool, False on slots that only fill a row.
        answer_mask: [B, L] bool, True on the tokens that the target generated.
        lengths: [B] number of real tokens of each sample.
        num_slots: inputs of a block, as in `label_positions`.
        layout: as in `label_positions`.

    Returns:
        [B, A, num_slots] bool.
    """
    positions = label_positions(anchors, num_slots, layout)
    has_label = (positions < lengths[:, None, None]) & _gather(answer_mask, positions) & anchor_mask.unsqueeze(-1)
    if layout == "anchor_first":
        return has_label.cumprod(dim=-1).bool()
    known = torch.zeros_like(has_label[..., :1])
    return torch.cat([known, has_label[..., 1:].cumprod(dim=-1).bool()], dim=-1)


def _gather(rows: Tensor, positions: Tensor) -> Tensor:
    inside = positions.clamp(max=rows.shape[1] - 1)
    return rows.gather(1, inside.flatten(start_dim=1)).view_as(inside)
