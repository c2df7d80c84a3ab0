"""Prompts per second of the evaluator's batched decoding against a loop that decodes one prompt after the other.

    python -m benchmarks.evaluator [DRAFT] [--prompts 64] [--tokens 32 64] [--batches 16] [--repeats 3] [--only-draft]
                                   [--tiny]

On the embedded target with held-out prompts, greedy, all cores; DRAFT is the folder of a draft of SmolLM2-135M, such as
the quickstart's. Without one a fresh draft is used, whose tokens are nearly all refused: the costs are the same. Both
sides must accept the same tokens up to rounding. About 25 minutes on two cores, eleven with --only-draft. While the
last prompts are decoded places of the batch stay empty, so few prompts measure the batch's end and not the batch; short
answers measure the pass over the prompts, which gains less from a batch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.cases import TINY, Path, make_target, results_folder, table, write_result
from benchmarks.cases import make_draft as make_up_draft
from deepspec.algorithms.base import DraftModel, build_draft
from deepspec.algorithms.checkpoint import load_draft
from deepspec.config import compose_eval, compose_train
from deepspec.data.chat import render_prompt
from deepspec.data.prompts import Message
from deepspec.decoding.decoder import Finished, Request, generate
from deepspec.decoding.sampling import Sampling
from deepspec.evaluation.memory import bytes_per_request
from deepspec.evaluation.tasks import load_task
from deepspec.runtime import choose_device
from deepspec.targets.base import Target

GOAL, GOAL_BATCH = 5.0, 16


def embedded(draft: str | None, prompts: int) -> tuple[Target, DraftModel, list[Request]]:
    """The embedded target, a draft of it, and held-out prompts as an evaluation renders them."""
    config = compose_eval(["target=smollm2_135m", "task=held_out", f"task.limit={prompts}"])
    target = Target.load(config.target, choose_device("auto"))
    made = (
        load_draft(draft, target)
        if draft is not None
        else build_draft(compose_train(["experiment=dspark_smollm2_135m"]).algorithm, target).to(target.dtype).eval()
    )
    requests = [
        Request(
            prompt.id,
            render_prompt(
                target.tokenizer, [Message("user", prompt.turns[0])], enable_thinking=False, system_prompt=None
            ),
        )
        for prompt in load_task(config.tasks[0])
    ]
    return target, made, requests


def made_up(prompts: int) -> tuple[Target, DraftModel, list[Request]]:
    """A tiny random target and draft."""
    target = make_target(TINY, is_runnable=True)
    draft = make_up_draft(target).to(target.dtype).eval()
    return target, draft, [Request(f"p{index}", [5 + index % 200] * (4 + index % 9)) for index in range(prompts)]


def decode(
    target: Target, draft: DraftModel | None, requests: Sequence[Request], tokens: int, batch: int
) -> tuple[float, list[Finished]]:
    """Seconds and answers; both sides run what all prompts begin with once."""
    begin = time.perf_counter()
    settings = {"max_new_tokens": tokens, "batch_size": batch, "timers": False}
    found = list(generate(target, draft, requests, Sampling(temperature=0.0), **settings))
    return time.perf_counter() - begin, found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", nargs="?", default=None, help="folder of a draft of SmolLM2-135M")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 64], help="most tokens of an answer")
    parser.add_argument("--batches", type=int, nargs="+", default=[GOAL_BATCH])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only-draft", action="store_true", help="leave plain decoding out")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--results", type=Path, default=None, help="folder of the result file")
    chosen = parser.parse_args(arguments)
    if chosen.tiny:
        chosen.prompts, chosen.tokens, chosen.batches, chosen.repeats = 6, [8], [3], 2
    target, draft, requests = made_up(chosen.prompts) if chosen.tiny else embedded(chosen.draft, chosen.prompts)
    names: dict[str, DraftModel | None] = {} if chosen.only_draft else {"plain decoding": None}
    names[f"{draft.config.name}, K {draft.num_draft_tokens}"] = draft
    found = in_turn(target, names, requests, chosen)
    rows = [
        row
        for name in names
        for tokens in chosen.tokens
        for row in rows_of(name, tokens, found, len(requests), [1, *chosen.batches])
    ]
    longest = max(len(request.prompt_ids) for request in requests)
    taken = bytes_per_request(target, draft, longest, max(chosen.tokens)).of_batch(max(chosen.batches))
    drafted_by = "not trained" if chosen.draft is None else "/".join(Path(chosen.draft).parts[-2:])
    text = [
        f"{len(requests)} prompts of up to {longest} tokens, greedy, "
        f"{torch.get_num_threads()} threads, {str(target.dtype).removeprefix('torch.')}, target {target.name}, draft "
        f"{drafted_by}. The loop (batch 1) decodes one prompt after the other; both run what all "
        f"prompts begin with once. All take turns, {chosen.repeats} times "
        "in changing order; medians, in brackets the least and the most. The batch's last rounds, in which no prompt "
        "waits for a free place, are part of its time.",
        table(["decoding", "answers of at most", "batch", "seconds", "prompts/s", "over the loop", "tau"], rows),
        f"Estimate of `memory_gib` for batch {max(chosen.batches)} with the longest answers: {taken / 2**30:.2f}.",
    ]
    print(
        write_result(
            "evaluator", "Evaluator in batches", "\n\n".join(text), target.device, folder=results_folder(chosen)
        )
    )


class Measured(NamedTuple):
    """Seconds of every repeat, and tau."""

    seconds: list[float]
    tau: float


def in_turn(
    target: Target, models: Mapping[str, DraftModel | None], requests: Sequence[Request], chosen: argparse.Namespace
) -> dict[tuple[str, int, int], Measured]:
    """Everything once per repeat, in changing order, so that a machine that slows down slows all alike."""
    keys = [(name, tokens, batch) for name in models for tokens in chosen.tokens for batch in (1, *chosen.batches)]
    for name, _, batch in keys:
        decode(target, models[name], requests[:2], 4, batch)
    found: dict[tuple[str, int, int], Measured] = {}
    for _ in range(chosen.repeats):
        for name, tokens, batch in keys:
            seconds, answers = decode(target, models[name], requests, tokens, batch)
            rounds = [one for answer in answers for one in answer.rounds]
            tau = sum(one.emitted for one in rounds) / len(rounds)
            earlier = found.get((name, tokens, batch), Measured([], tau)).seconds
            found[name, tokens, batch] = Measured([*earlier, seconds], tau)
            print(f"{name}, {tokens} tokens, batch {batch}: {seconds:.1f} s", flush=True)
        keys = keys[::-1]
    return found


def rows_of(
    name: str, tokens: int, found: Mapping[tuple[str, int, int], Measured], prompts: int, batches: Sequence[int]
) -> list[list[object]]:
    """Lines of the table for one way of decoding and one length of answers."""
    rows: list[list[object]] = []
    for batch in batches:
        mine = found[name, tokens, batch]
        # Pairs of one repeat were taken close together.
        ratios = [loop / own for loop, own in zip(found[name, tokens, 1].seconds, mine.seconds, strict=True)]
        goal = f", goal {GOAL:g}x" if batch == GOAL_BATCH else ""
        seconds = median(mine.seconds)
        rows.append(
            [
                name,
                tokens,
                batch,
                f"{seconds:.1f} [{min(mine.seconds):.1f}, {max(mine.seconds):.1f}]",
                f"{prompts / seconds:.2f}",
                f"{median(ratios):.1f}x [{min(ratios):.1f}, {max(ratios):.1f}]{goal}",
                f"{mine.tau:.3f}",
            ]
        )
    return rows


if __name__ == "__main__":
    main()
