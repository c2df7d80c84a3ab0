"""How much of the logits the chunked head operator holds at once, counted on every tensor that torch makes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspec.losses import RowCoefficients, Teacher, head_losses

VOCAB, HIDDEN, RANK = 1009, 13, 11
CHUNK_ROWS, TILE_ROWS = 32, 4


class LogitBytes(TorchDispatchMode):
    """The largest sum of bytes of living tensors [rows, vocabulary]; transposed weights are none."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            is_tensor = isinstance(tensor, Tensor) and tensor.dim() == 2
            if is_tensor and tensor.shape[1] == VOCAB and tensor.shape[0] not in (HIDDEN, RANK):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def measure(rows: int, dtype: torch.dtype, softcap: float | None, has_latent: bool, per_position: int) -> int:
    """Peak bytes of logits through forward and backward of the given number of rows."""
    generator = torch.Generator().manual_seed(0)
    hidden, latent = (torch.randn(rows, size, generator=generator).requires_grad_() for size in (HIDDEN, RANK))
    projection = torch.randn(VOCAB, RANK, generator=generator).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCAB, (rows,), generator=generator)
    taught_by = torch.arange(rows) // per_position
    teacher = Teacher(torch.randn(rows, HIDDEN, generator=generator), taught_by, weight, None)
    factors = RowCoefficients(*torch.rand(3, rows, generator=generator))
    logits_per_row = 3 if softcap is not None and has_latent else 2
    with LogitBytes() as counted, torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        objective, _ = head_losses(
            hidden,
            labels,
            teacher,
            factors,
            weight,
            latent=latent if has_latent else None,
            latent_weight=projection if has_latent else None,
            softcap=softcap,
            chunk_bytes=CHUNK_ROWS * logits_per_row * dtype.itemsize * VOCAB,
            tile_bytes=TILE_ROWS * 4 * VOCAB,
        )
        objective.backward()
    return counted.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("softcap", "has_latent"), [(None, True), (None, False), (2.0, True), (2.0, False)])
@pytest.mark.parametrize("per_position", [1, 7])
def test_never_more_than_a_chunk_of_logits_is_alive_however_many_rows_there_are(
    dtype: torch.dtype, softcap: float | None, has_latent: bool, per_position: int
) -> None:
    few, many = (measure(rows, dtype, softcap, has_latent, per_position) for rows in (64, 640))
    chunk = CHUNK_ROWS * (3 if softcap is not None and has_latent else 2) * dtype.itemsize * VOCAB
    tile = TILE_ROWS * 4 * VOCAB
    assert few == many
    assert chunk < many <= chunk + 8 * tile
