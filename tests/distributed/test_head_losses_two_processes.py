"""The chunked head operator inside DDP over two processes (gloo) against one; run as a script it is a worker."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deepspec.losses import RowCoefficients, Teacher, head_losses

ROOT = Path(__file__).parents[2]
H, RANK, VOCAB, ROWS = 8, 3, 23, 60
# Micro-batches of the two processes differ in size; one is empty.
SPLITS = ((slice(0, 25), slice(25, 31)), (slice(31, 31), slice(31, 60)))


class Draft(nn.Module):
    """A body, a Markov head and a head of its own, with the operator inside the forward as drafts have it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / 2)

        self.body, self.head = draw(H, H), draw(VOCAB, H)
        self.embedding, self.markov = draw(VOCAB, RANK), draw(VOCAB, RANK)

    def forward(self, inputs: Tensor, labels: Tensor, teacher: Teacher, coefficients: RowCoefficients) -> Tensor:
        hidden, latent = torch.tanh(inputs @ self.body), self.embedding[labels]
        objective, _ = head_losses(
            hidden,
            labels,
            teacher,
            coefficients,
            self.head,
            latent=latent,
            latent_weight=self.markov,
            softcap=3.0,
            chunk_bytes=8 * 3 * 8 * VOCAB,
        )
        return objective


def accumulate(model: nn.Module, splits: tuple[slice, ...], scale: float) -> None:
    """Add the gradients of the micro-batches, synchronising with the last one only."""
    generator = torch.Generator().manual_seed(1)
    inputs, hidden, frozen = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((ROWS, H), (9, H), (VOCAB, H))
    )
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    rows = torch.randint(0, 9, (ROWS,), generator=generator).sort().values
    factors = torch.rand(3, ROWS, generator=generator, dtype=torch.float64) * scale / ROWS
    for number, split in enumerate(splits):
        is_last = number == len(splits) - 1
        waits = isinstance(model, DistributedDataParallel) and not is_last
        with model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
            teacher = Teacher(hidden, rows[split], frozen, None)
            model(inputs[split], labels[split], teacher, RowCoefficients(*factors[:, split])).backward()


def work(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    draft = Draft()
    # DDP averages over processes, so each scales its sum by their number.
    accumulate(DistributedDataParallel(draft), SPLITS[rank], scale=2.0)
    if rank == 0:
        gradients = {name: value.grad for name, value in draft.named_parameters() if value.grad is not None}
        save_file(gradients, folder / "gradients.safetensors")
    dist.barrier()
    # gloo's clean-up can hang where one process takes its group down before the other.
    os._exit(0)


@pytest.mark.distributed
def test_two_processes_with_uneven_micro_batches_have_the_gradients_of_one(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    workers = [
        subprocess.Popen([sys.executable, __file__, str(tmp_path), str(rank)], env=environment, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for worker in workers:
        _, error = worker.communicate(timeout=120)
        assert worker.returncode == 0, error.decode()
    draft = Draft()
    accumulate(draft, (slice(0, ROWS),), scale=1.0)
    found = load_file(tmp_path / "gradients.safetensors")
    assert found.keys() == {name for name, _ in draft.named_parameters()}
    for name, value in draft.named_parameters():
        torch.testing.assert_close(found[name], value.grad, rtol=1e-10, atol=1e-12, msg=name)


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
