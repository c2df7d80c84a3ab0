"""Prompts per second of the evaluator's batched decoding against a loop that decodes one prompt after the other.

    python -m benchmarks.evaluator [DRAFT] [--prompts 48] [--tokens 64] [--batches 4 16 32] [--tiny]

On the embedded target with held-out prompts, greedy, all cores; DRAFT is the folder of a draft of SmolLM2-135M, such as
the quickstart's. Without one a fresh draft is used, whose tokens are nearly all refused: the costs are the same. Both
sides must accept the same tokens up to rounding. About five minutes on two cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

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
    """Seconds and answers; a batch of one is the loop, which shares nothing between prompts."""
    begin = time.perf_counter()
    found: list[Finished] = []
    for part in [requests] if batch > 1 else [[request] for request in requests]:
        settings = {"max_new_tokens": tokens, "batch_size": batch, "timers": False}
        found += generate(target, draft, part, Sampling(temperature=0.0), **settings)
    return time.perf_counter() - begin, found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", nargs="?", default=None, help="folder of a draft of SmolLM2-135M")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--results", type=Path, default=None, help="folder of the result file")
    chosen = parser.parse_args(arguments)
    if chosen.tiny:
        chosen.prompts, chosen.tokens, chosen.batches = 6, 8, [3]
    target, draft, requests = made_up(chosen.prompts) if chosen.tiny else embedded(chosen.draft, chosen.prompts)
    rows = []
    for name, model in (("plain decoding", None), (f"{draft.config.name}, K {draft.num_draft_tokens}", draft)):
        decode(target, model, requests[:2], 4, 1)
        decode(target, model, requests[:2], 4, 2)
        # The loop before and after, so that a machine that slows down shows.
        loops = [decode(target, model, requests, chosen.tokens, 1)]
        batched = {batch: decode(target, model, requests, chosen.tokens, batch) for batch in chosen.batches}
        loops.append(decode(target, model, requests, chosen.tokens, 1))
        loop = sum(seconds for seconds, _ in loops) / 2
        for batch, (seconds, answers) in [(1, (loop, loops[0][1])), *batched.items()]:
            rounds = [one for answer in answers for one in answer.rounds]
            tau = sum(one.emitted for one in rounds) / len(rounds)
            ratio = loop / seconds
            goal = "" if batch != GOAL_BATCH else f" (goal {GOAL:g}x)"
            line = [
                name,
                batch,
                f"{seconds:.1f}",
                f"{len(requests) / seconds:.2f}",
                f"{ratio:.1f}x{goal}",
                f"{tau:.3f}",
            ]
            rows.append(line)
            print(line, flush=True)
    longest = max(len(request.prompt_ids) for request in requests)
    one = bytes_per_request(target, draft, longest, chosen.tokens)
    text = [
        f"{len(requests)} prompts of up to {longest} tokens, answers of at most {chosen.tokens}, greedy, "
        f"{torch.get_num_threads()} threads, {str(target.dtype).removeprefix('torch.')}, target {target.name}, draft "
        f"{chosen.draft or 'not trained'}. The loop decodes one prompt after the other, twice; its mean counts.",
        table(["decoding", "batch", "seconds", "prompts/s", "over the loop", "tau"], rows),
        f"Estimate of `memory_gib`: {one / 2**20:.1f} MiB a request in flight.",
    ]
    print(
        write_result(
            "evaluator", "Evaluator in batches", "\n\n".join(text), target.device, folder=results_folder(chosen)
        )
    )


if __name__ == "__main__":
    main()
