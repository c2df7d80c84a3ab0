"""Our head-and-loss operator against the losses that speculators trains DSpark with, on the same tensors.

    python -m benchmarks.peers --peer_python FILE [--tiny]

FILE is the Python of an environment of its own with `pip install speculators`; without it that of
DEEPSPEC_SPECULATORS_PYTHON, which the conformance tests read too. Both take turns on one draft's hidden
rows: logits of draft and teacher, Markov bias, cross-entropy and total variation, and the gradients with respect to the
hidden rows and both Markov matrices. Objective and gradients are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import cases
from deepspec.losses import RowCoefficients, Teacher, head_losses
from deepspec.runtime import available_cpus

BLOCK, RANK, DECAY = 7, 256, 4
# bf16 products round in other places, and where q is about p the sign of the total variation's gradient turns over.
TOLERANCE, GRADIENT_TOLERANCE = 0.01, 0.1
REPEATS = 3


def make_tensors(shape: cases.Shape, blocks: int) -> dict[str, Tensor]:
    """Rows of `blocks` full blocks at neighbouring anchors: with K slots a position teaches up to K rows."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=generator).mul_(scale)

    rows = torch.arange(blocks)[:, None] + torch.arange(BLOCK)
    weight = draw(shape.vocab, shape.hidden, scale=3 * shape.hidden**-0.5).bfloat16()
    teacher = draw(blocks + BLOCK, shape.hidden).bfloat16()
    # The peer's labels are the teacher's most likely tokens.
    labels = torch.cat([(part @ weight.T).argmax(dim=-1) for part in teacher.split(256)])[rows.flatten()]
    return {
        "hidden": (0.7 * teacher[rows.flatten()] + 0.7 * draw(rows.numel(), shape.hidden).bfloat16()).contiguous(),
        "teacher": teacher,
        "rows": rows.flatten(),
        "labels": labels,
        "previous": torch.randint(0, shape.vocab, (rows.numel(),), generator=generator),
        "weight": weight,
        "w1": draw(shape.vocab, RANK, scale=0.1),
        "w2": draw(shape.vocab, RANK, scale=0.1),
        "block": torch.tensor(BLOCK),
        "decay": torch.tensor(DECAY),
    }


class Ours:
    """The operator of deepspec.losses on the tensors of a case."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.trained = {name: tensors[name].clone().requires_grad_() for name in ("hidden", "w1", "w2")}
        slots = torch.arange(BLOCK).repeat(len(tensors["rows"]) // BLOCK)
        weights = torch.exp(-slots / DECAY) / len(slots)
        # As the draft does: rows that one position teaches stand together.
        self.order = tensors["rows"].argsort(stable=True)
        self.coefficients = RowCoefficients(0.1 * weights[self.order], 0.9 * weights[self.order], None)

    def work(self) -> float:
        """Forward and backward; returns the objective."""
        tensors, order = self.tensors, self.order
        teacher = Teacher(tensors["teacher"], tensors["rows"][order], tensors["weight"], None)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            objective, _ = head_losses(
                self.trained["hidden"][order],
                tensors["labels"][order],
                teacher,
                self.coefficients,
                tensors["weight"],
                latent=torch.nn.functional.embedding(tensors["previous"][order], self.trained["w1"]),
                latent_weight=self.trained["w2"],
            )
        objective.backward()  # type: ignore[no-untyped-call]
        return float(objective.detach())

    def clear(self) -> None:
        """Forget the gradients."""
        for tensor in self.trained.values():
            tensor.grad = None


class Peer:
    """The process of the peer's environment."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.versions = self._read()

    def ask(self, word: str) -> Any:
        """Send a word and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer's process ended with status {self._process.wait()}; its own words are above.")
        return json.loads(line)


@contextmanager
def started(python: str, tensors: Path) -> Iterator[Peer]:
    """The peer, waiting for words."""
    command = [python, "-m", "benchmarks.peer_speculators", str(tensors)]
    # Its threads are set by torch; ours must not reach it by PYTHONPATH.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield Peer(process)
        finally:
            process.terminate()


class Line(NamedTuple):
    """One line of the comparison."""

    vocab: int
    threads: int
    rows: int
    peer_seconds: float
    our_seconds: float
    peer_peak: int
    our_peak: int
    apart: float


def compare(
    shape: cases.Shape, blocks: int, threads: Sequence[int], python: str, repeats: int
) -> tuple[list[Line], dict[str, str]]:
    """Check that both compute one thing, then time them in turns with each number of threads."""
    torch.set_num_threads(max(threads))
    cpu, tensors = torch.device("cpu"), make_tensors(shape, blocks)
    ours = Ours(tensors)
    with tempfile.TemporaryDirectory(prefix="deepspec-peers-") as name:
        path, gradients = Path(name) / "tensors.safetensors", Path(name) / "gradients.safetensors"
        save_file(tensors, path)
        with started(python, path) as peer:
            peer.ask(f"threads {max(threads)}")
            objectives = ours.work(), peer.ask(f"gradients {gradients}")
            assert abs(objectives[0] / objectives[1] - 1.0) <= TOLERANCE, f"other objectives: {objectives}"
            apart = 0.0
            for key, wanted in load_file(gradients).items():
                found = ours.trained[key].grad
                assert found is not None
                apart = max(apart, float((found.float() - wanted).norm() / wanted.norm()))
            assert apart <= GRADIENT_TOLERANCE, f"the gradients are {apart:.3f} apart"
            ours.clear()
            peaks = peer.ask("peak"), cases.peak_bytes(ours.work, cpu)
            lines = []
            for count in threads:
                torch.set_num_threads(peer.ask(f"threads {count}"))
                times: tuple[list[float], list[float]] = ([], [])
                for _ in range(repeats):
                    times[0].append(peer.ask("seconds"))
                    ours.clear()
                    times[1].append(cases.seconds(ours.work, cpu))
                ours.clear()
                lines.append(Line(shape.vocab, count, blocks * BLOCK, *map(median, times), *peaks, apart))
                print(lines[-1], f"ratio {lines[-1].peer_seconds / lines[-1].our_seconds:.1f}", flush=True)
            return lines, peer.versions


def body(lines: Sequence[Line], versions: dict[str, str]) -> str:
    header = ["vocabulary", "threads", "rows", "speculators s", "ours s", "ratio", "its peak GiB", "our peak GiB"]
    rows = [
        [
            *line[:3],
            f"{line.peer_seconds:.2f}",
            f"{line.our_seconds:.2f}",
            f"**{line.peer_seconds / line.our_seconds:.1f}x**",
            f"{line.peer_peak / 2**30:.2f}",
            f"{line.our_peak / 2**30:.2f}",
        ]
        for line in lines
    ]
    apart = max(line.apart for line in lines)
    return (
        f"speculators {versions['version']} on torch {versions['torch']}, in its own environment; its eager losses, "
        "since the fused ones need a GPU. bf16 autocast, no dummy rows on either side (its trainer adds them), "
        "cross-entropy 0.1 and L1 0.9 with its decay 4, no confidence head. Seconds are medians of a forward and "
        "backward pass, the two in turns. Gradients of hidden rows and Markov matrices were at most "
        f"{apart:.3f} of their norm apart.\n\n" + cases.table(header, rows)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Our losses against those of speculators, on the same tensors.")
    named = os.environ.get("DEEPSPEC_SPECULATORS_PYTHON")
    parser.add_argument(
        "--peer_python", default=named, required=not named, help="Python of an environment with speculators"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, available_cpus()}))
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--results", help="folder of the result file")
    chosen = parser.parse_args(arguments)
    shapes = {cases.TINY: 4} if chosen.tiny else {cases.SMOLLM2: 128, cases.SMOLLM2_152K: 32}
    found = [
        compare(shape, blocks, chosen.threads, chosen.peer_python, 1 if chosen.tiny else REPEATS)
        for shape, blocks in shapes.items()
    ]
    text = body([line for lines, _ in found for line in lines], found[0][1])
    folder = cases.results_folder(chosen)
    print(cases.write_result("peers", "Losses against speculators", text, torch.device("cpu"), folder=folder))


if __name__ == "__main__":
    main()
