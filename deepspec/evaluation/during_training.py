"""Real decoding while a draft is being trained: a few fixed prompts with the weights of the moment.

The draft is copied into the target's precision, as it would be served, so training itself is not touched: neither its
weights nor any random state. It knows no training step. Letters: P prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from deepspec.algorithms.base import DraftModel, make_draft
from deepspec.config import TaskConfig, TrainConfig
from deepspec.data.chat import render_prompt
from deepspec.data.prompts import Message
from deepspec.decoding.decoder import Request, generate
from deepspec.decoding.sampling import Sampling
from deepspec.decoding.waiting import check_requests
from deepspec.evaluation.statistics import ratio_ci95
from deepspec.evaluation.tasks import Prompt, load_task
from deepspec.targets.base import Target

ACCEPTANCE_LENGTH = "eval/acceptance_length"


class TrainingProbe:
    """Decodes a fixed set of prompts with given weights, within a share of the training's time.

    Args:
        draft: the draft in training; only its shape is used.
        target: the target, whole.
        config: the run; `evaluation` says what is decoded, and how often.

    Raises:
        DeepSpecError: the prompts cannot be had, or are too long for the target.
    """

    def __init__(self, draft: DraftModel, target: Target, config: TrainConfig) -> None:
        """Read the prompts and make the copy that decodes."""
        self._settings, self._seed = config.evaluation, config.seed
        self._target = target
        self._copy = make_draft(draft.config, draft.spec, target, draft.vocab)
        self._copy = self._copy.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        prompts = probe_prompts(config)
        self._requests = [
            Request(
                prompt.id,
                render_prompt(
                    target.tokenizer,
                    [Message("user", prompt.turns[0])],
                    enable_thinking=config.target.enable_thinking,
                    system_prompt=config.target.system_prompt,
                ),
            )
            for prompt in prompts
        ]
        check_requests(target, self._requests, self._settings.max_new_tokens + draft.num_draft_tokens + 1)
        self._started = time.monotonic()
        self._spent_seconds = self._last_seconds = 0.0

    def is_planned(self, step: int, *, is_last: bool) -> bool:
        """Whether a step is one of those that were asked for, a function of the step alone; the last one always is."""
        every = self._settings.every_steps
        return is_last or (every is not None and step % every == 0)

    def has_time(self, *, is_last: bool) -> bool:
        """Whether decoding now keeps to its share of the time, by this process's clock.

        The last step is always decoded. The first time nobody knows yet how long it takes.
        """
        if is_last:
            return True
        elapsed = time.monotonic() - self._started
        return self._spent_seconds + self._last_seconds <= self._settings.max_share * elapsed

    def measure(
        self,
        weights: Mapping[str, Tensor] | None,
        rank: int,
        world_size: int,
        all_reduce: Callable[[Tensor], Tensor],
    ) -> dict[str, float]:
        """Decode, each process with weights its part of the prompts, and return the numbers of a log line.

        Args:
            weights: of the draft by parameter name; None in a process that only takes part in the sums.
            rank: of this process among those with weights.
            world_size: how many have weights.
            all_reduce: sum over all processes.
        """
        begin = time.monotonic()
        table = torch.zeros(len(self._requests), 2, dtype=torch.float64)
        if weights is not None:
            self._copy.load_state_dict(dict(weights))
            places = {request.prompt_id: index for index, request in enumerate(self._requests)}
            for finished in generate(
                self._target,
                self._copy,
                self._requests[rank::world_size],
                Sampling(temperature=self._settings.temperature),
                max_new_tokens=self._settings.max_new_tokens,
                batch_size=self._settings.batch_size,
                seed=self._seed,
                timers=False,
            ):
                row = table[places[finished.prompt_id]]
                row[0], row[1] = sum(one.emitted for one in finished.rounds), len(finished.rounds)
        sums = all_reduce(table.to(self._target.device)).cpu()
        emitted, rounds = sums[:, 0].numpy(), sums[:, 1].numpy()
        self._last_seconds = time.monotonic() - begin
        self._spent_seconds += self._last_seconds
        line = {"eval/seconds": self._last_seconds}
        if rounds.sum() > 0:
            line[ACCEPTANCE_LENGTH] = float(emitted.sum() / rounds.sum())
            interval = ratio_ci95(emitted, rounds, self._seed)
            if interval is not None:
                line[f"{ACCEPTANCE_LENGTH}_low"], line[f"{ACCEPTANCE_LENGTH}_high"] = interval
        return line


def probe_prompts(config: TrainConfig) -> list[Prompt]:
    """Our own held-out prompts, or those of a file of the user's.

    Raises:
        DeepSpecError: they cannot be had.
    """
    path = config.evaluation.prompts
    task = TaskConfig(
        name="held_out" if path is None else "prompts",
        source="synthetic" if path is None else "file",
        path=path,
        template="{prompt}",
        domain="",
        limit=config.evaluation.num_prompts,
        seed=0,
        version=1,
        citation="",
        first_turn_only=True,
    )
    return load_task(task)
