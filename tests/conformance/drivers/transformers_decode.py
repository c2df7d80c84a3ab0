"""Greedy decoding with the DFlash that transformers has itself: tokens and rounds of every prompt.

Its draft class is Muse Glimmer's assistant, whose layers are z-lab's; only two weights are called otherwise.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from protocol import Job, serve
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "hidden_act",
    "block_size",
)


@functools.cache
def load_target(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_draft(folder: Path) -> Any:
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = MuseGlimmerAssistantConfig(
        **{name: fields[name] for name in _SIZES},
        **fields["dflash_config"],
        layer_types=["full_attention"] * fields["num_hidden_layers"],
    )
    draft = MuseGlimmerAssistantModel(config).float().eval()
    weights = load_file(folder / "model.safetensors")
    draft.load_state_dict({_NAMES.get(name, name): value for name, value in weights.items()})
    return draft


def decode(job: Job) -> dict[str, Any]:
    target, draft = load_target(job["target"]), load_draft(Path(job["draft"]))
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    # Of the target: with one token to go no draft is asked for, yet a round is spent. The first call reads the prompt.
    hook = target.register_forward_hook(count)
    tokens, rounds = [], []
    for prompt in job["prompts"]:
        calls = 0
        ids = torch.tensor([prompt])
        output = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=draft,
            speculation_type="dflash",
            do_sample=False,
            max_new_tokens=job["max_new_tokens"],
        )
        tokens.append(output[0, len(prompt) :].tolist())
        rounds.append(calls - 1)
    hook.remove()
    return {"tokens": tokens, "rounds_by_prompt": rounds, "rounds": sum(rounds)}


serve(decode)
