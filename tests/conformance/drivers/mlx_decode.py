"""Greedy decoding with mlx-dspark on a CPU: DSpark drafts and z-lab's DFlash, tokens and rounds of every prompt."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
from mlx_dspark.generate import dflash_generate, speculative_generate
from mlx_dspark.load import load_dflash, load_drafter, load_target
from protocol import Job, serve

mx.set_default_device(mx.cpu)


@functools.cache
def target_of(folder: str) -> tuple[Any, Any]:
    target, tokenizer = load_target(folder, require_tap=True)
    target.model.set_dtype(mx.float32)
    return target, tokenizer


def decode(job: Job) -> dict[str, Any]:
    target, tokenizer = target_of(job["target"])
    load, generate = (
        (load_dflash, dflash_generate) if job["method"] == "dflash" else (load_drafter, speculative_generate)
    )
    draft, _ = load(job["draft"], quantize=False)
    draft.set_dtype(mx.float32)
    tokens, rounds = [], []
    for prompt in job["prompts"]:
        found = generate(
            target,
            tokenizer,
            draft,
            prompt_ids=prompt,
            max_new_tokens=job["max_new_tokens"],
            max_draft_tokens=None,
            lookup_drafts=False,
        )
        tokens.append(list(found.token_ids)[: job["max_new_tokens"]])  # its last round is not cut at the limit
        rounds.append(len(found.accept_lengths))
    return {"tokens": tokens, "rounds_by_prompt": rounds, "rounds": sum(rounds)}


serve(decode)
