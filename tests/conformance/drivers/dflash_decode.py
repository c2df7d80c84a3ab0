"""Greedy decoding with z-lab's own package: tokens and rounds of every prompt."""

from __future__ import annotations

import functools
import time
from typing import Any

import dflash.model
import torch
from protocol import Job, serve
from transformers import AutoModelForCausalLM

# Its clock waits for a GPU.
dflash.model._cuda_time = time.perf_counter


@functools.cache
def load_target(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def decode(job: Job) -> dict[str, Any]:
    target = load_target(job["target"])
    draft = dflash.model.DFlashDraftModel.from_pretrained(job["draft"], dtype=torch.float32).eval()
    tokens, rounds = [], []
    for prompt in job["prompts"]:
        ids = torch.tensor([prompt])
        output = dflash.model.dflash_generate(draft, target, ids, job["max_new_tokens"], None, 0.0, return_stats=True)
        tokens.append(output.output_ids[0, len(prompt) :].tolist())
        rounds.append(len(output.acceptance_lengths))
    return {"tokens": tokens, "rounds_by_prompt": rounds, "rounds": sum(rounds)}


serve(decode)
