"""Made-up round records whose acceptance follows known probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deepspec.decoding.rounds import Round, to_json
from deepspec.scheduling.records import Recorded


def make_records(
    num_prompts: int,
    rounds_each: int,
    block: int,
    *,
    chance: float | None = None,
    sharpness: Sequence[float] | None = None,
    seed: int = 0,
    has_head: bool = True,
    draft: str = "made_up",
    domains: Sequence[str] = ("chat", "code"),
    stop_every: int | None = None,
) -> Recorded:
    """Rounds in which slot k is accepted with a probability of its own, given that those before were.

    Args:
        num_prompts: conversations.
        rounds_each: rounds of each.
        block: K.
        chance: the probability of every slot; None draws one for every slot.
        sharpness: the head's logit of slot k is this many times the true one; None tells the truth.
        seed: of all draws.
        has_head: whether the records carry confidence logits.
        draft: name.
        domains: of the conversations, in turn.
        stop_every: every so many rounds, one that accepts anything ends on an accepted stop token; None for no stops.
    """
    generator = np.random.default_rng(seed)
    scale = np.ones(block) if sharpness is None else np.asarray(sharpness)
    rounds: dict[str, list[Round]] = {}
    for prompt in range(num_prompts):
        mine = []
        for index in range(rounds_each):
            truth = np.full(block, chance) if chance is not None else generator.uniform(0.05, 0.95, block)
            accepted = int(np.cumprod(generator.random(block) < truth).sum())
            is_stop = stop_every is not None and index % stop_every == stop_every - 1 and accepted > 0
            proposed = accepted if is_stop else block
            edge = np.clip(truth, 1e-9, 1 - 1e-9)
            logits = scale * np.log(edge / (1 - edge))
            mine.append(
                Round(
                    prompt_id=f"p{prompt}#0",
                    round=index,
                    position=20 + index,
                    proposed=proposed,
                    accepted=accepted,
                    ended_by="stop" if is_stop else "full" if accepted == block else "reject",
                    confidence_logits=tuple(logits.tolist()) if has_head else None,
                    max_draft_prob=tuple((1 / (1 + np.exp(-logits))).tolist()),
                    seconds_draft=0.0,
                    seconds_verify=0.0,
                    emitted=accepted if is_stop else accepted + 1,
                    overlap=tuple(truth[:proposed].tolist()),
                )
            )
        rounds[f"p{prompt}"] = mine
    domain = {name: domains[index % len(domains)] for index, name in enumerate(rounds)}
    return Recorded("task", draft, "", "w0", domain, rounds, {"tasks": [], "schedule": {"name": "full"}})


def save_records(folder: Path, *records: Recorded) -> Path:
    """Write records as an evaluation leaves them; each has its own draft or task."""
    tasks = sorted({one.task for one in records})
    conditions = {"tasks": [{"name": task, "domain": ""} for task in tasks], "schedule": {"name": "full"}}
    (folder / "rounds").mkdir(parents=True)
    (folder / "conditions.json").write_text(json.dumps(conditions))
    for one in records:
        lines = [
            json.dumps(
                {
                    "request_id": f"task/{one.domain[prompt]}/{prompt}#0",
                    "rounds": [to_json(record) for record in rounds],
                    "draft": one.draft_path,
                    "draft_id": one.weights,
                }
            )
            for prompt, rounds in one.rounds.items()
        ]
        (folder / "rounds" / f"{one.task}--{one.draft}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def closed_form_tau(chance: float, block: int) -> float:
    """Tokens per round of independent acceptance: (1 - a^(K+1)) / (1 - a)."""
    return block + 1 if math.isclose(chance, 1) else (1 - chance ** (block + 1)) / (1 - chance)
