"""What it costs how threads of a CPU wait for each other: asleep at once, spinning for microseconds, as OpenMP likes.

    python -m benchmarks.waiting [DRAFT] [--prompts 32] [--tokens 32] [--repeats 3] [--tiny]

Whole processes, whose environment differs: one alone, then two that begin each part at once and want twice the cores
that there are. Each decodes held-out prompts in a batch of 16 (of the embedded target, greedy; DRAFT as in
benchmarks.evaluator) and plays train steps of a made-up DSpark draft (hidden 576, vocabulary 49,152). Nine minutes on
two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks import cases
from benchmarks.evaluator import decode, embedded, made_up
from benchmarks.train_step import Step

WAYS = {
    "asleep at once": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
    "3,000 spins, as the scripts say": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"},
    "OpenMP's own choice": {},
}
BATCH = 16
PARTS, READY = 2, "ready"


def play(chosen: argparse.Namespace) -> tuple[float, float]:
    """Seconds of decoding and of a train step in this process."""
    target, draft, requests = made_up(chosen.prompts) if chosen.tiny else embedded(chosen.draft, chosen.prompts)
    decode(target, draft, requests[:2], 4, BATCH)
    await_others()
    decoding = decode(target, draft, requests, chosen.tokens, BATCH)[0]
    made = cases.make_target(cases.TINY if chosen.tiny else cases.SMOLLM2)
    trained = cases.make_draft(made)
    step = Step(trained, [cases.make_batch(made, cases.answer_lengths(150, 8), 64)], 64)
    step.ours()
    await_others()
    return decoding, median(cases.seconds(step.ours, step.device) for _ in range(3))


def await_others() -> None:
    """Say that this process is ready for its next part, and begin it when all are."""
    print(READY, flush=True)
    sys.stdin.readline()


def run(way: dict[str, str], processes: int, arguments: Sequence[str]) -> list[tuple[float, float]]:
    """What that many processes at once measured."""
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, "-m", "benchmarks.waiting", *arguments, "--inside"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = [subprocess.Popen(command, env={**kept, **way}, text=True, **pipes) for _ in range(processes)]
    for _ in range(PARTS):
        for process in started:
            while process.stdout.readline() not in (f"{READY}\n", ""):
                pass
        for process in started:
            if process.poll() is None:
                process.stdin.write("\n")
                process.stdin.flush()
    outputs = [process.communicate()[0] for process in started]
    for process in started:
        if process.returncode:
            raise SystemExit(process.returncode)
    return [tuple(json.loads(output.splitlines()[-1])) for output in outputs]


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", nargs="?", default=None, help="folder of a draft of SmolLM2-135M")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--results", type=Path, default=None, help="folder of the result file")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.tiny:
        chosen.prompts, chosen.tokens, chosen.repeats = 4, 8, 1
    if chosen.inside:
        print(json.dumps(play(chosen)))
        return
    cells = [(name, processes) for processes in ((1,) if chosen.tiny else (1, 2)) for name in WAYS]
    found: dict[tuple[str, int], list[tuple[float, float]]] = {cell: [] for cell in cells}
    for _ in range(chosen.repeats):
        for name, processes in cells:
            found[name, processes] += run(WAYS[name], processes, arguments)
            print(f"{processes} at once, {name}: {found[name, processes][-1]}", flush=True)
        cells = cells[::-1]
    rows = []
    for name, processes in sorted(found, key=lambda cell: cell[1]):
        row: list[object] = [name, processes]
        for part in (0, 1):
            mine, slowest = (median(one[part] for one in found[cell, processes]) for cell in (name, "asleep at once"))
            row += [f"{mine:.2f}", f"{slowest / mine:.2f}x"]
        rows.append(row)
    text = [
        f"{chosen.prompts} held-out prompts, answers of at most {chosen.tokens} tokens, batch {BATCH}; train step of 8 "
        f"sequences x 64 anchors, answers of 150 tokens on average. {torch.get_num_threads()} threads a process; "
        f"medians of {chosen.repeats} runs of as many processes at once, in changing order. Speed: over sleeping "
        "at once. How threads wait is said in each row.",
        cases.table(["waiting threads", "processes", "decoding, s", "speed", "train step, s", "speed"], rows),
    ]
    device = torch.device("cpu")
    print(
        cases.write_result("waiting", "Waiting threads", "\n\n".join(text), device, folder=cases.results_folder(chosen))
    )


if __name__ == "__main__":
    main()
