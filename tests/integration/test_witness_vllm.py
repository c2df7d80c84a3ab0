"""The real vLLM as witness: the same tokens and the same rounds as here, greedy; the same means where tokens are drawn.

Runs where DEEPSPEC_VLLM_PYTHON names the python of an environment with vLLM.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_targets import LAYERS, MASK_TOKEN, VOCABULARY, ascii_tokenizer, target_overrides
from helpers import STOP_TOKEN, batch_of, kind_of_draft, overfit
from transformers import Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from deepspec.algorithms.checkpoint import load_draft, save_draft
from deepspec.config import compose_eval
from deepspec.data.chat import render_prompt
from deepspec.data.prompts import Message
from deepspec.decoding.decoder import Request, generate
from deepspec.decoding.sampling import Sampling
from deepspec.evaluation.evaluator import evaluate
from deepspec.interop.vllm_process import PYTHON_VARIABLE
from deepspec.targets.base import Target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.conformance,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} names no environment with vLLM"),
]
KINDS = {
    "dspark": "dspark-vanilla",
    "dflash": "dflash-anchor_first",
    "dflash_fill_in": "dflash-fill_in",
    "eagle3": "eagle3",
}
# The paper's losses learn by heart too slowly.
LOSSES: dict[str, dict[str, Any]] = {"dspark": {"losses": {"ce": 1.0, "tv": 0.0, "soft_ce": 0.0, "confidence": 1.0}}}
PROMPTS = [
    {"id": "double", "turns": ["what is it?", "and why?"]},
    *({"id": f"p{index}", "turns": [f"question {index} " + "why " * index]} for index in range(9)),
]


def save_target(folder: Path) -> None:
    """Random, with heads of 32, the smallest that vLLM's attention has on a CPU; some answers end by themselves."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=STOP_TOKEN,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        model.lm_head.weight[STOP_TOKEN] *= 1.8
    model.save_pretrained(folder)
    ascii_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, prompts, and of each kind a draft that has learnt the target's answers by heart."""
    folder = tmp_path_factory.mktemp("witness_vllm")
    save_target(folder / "target")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    config = compose_eval(target_overrides(folder / "target")).target
    target = Target.load(config, torch.device("cpu"), LAYERS)
    assert target.mask_token_id == MASK_TOKEN
    ids = [
        render_prompt(target.tokenizer, [Message("user", row["turns"][0])], enable_thinking=False, system_prompt=None)
        for row in PROMPTS
    ]
    requests = [Request(str(index), one) for index, one in enumerate(ids)]
    answers = generate(target, None, requests, Sampling(0.0), max_new_tokens=32, batch_size=10, timers=False)
    samples = [(ids[int(one.prompt_id)], one.output_ids) for one in answers if len(one.output_ids) > 6]
    for name, kind in KINDS.items():
        draft = kind_of_draft(target, kind, **LOSSES.get(name, {}))
        # Until it is sure: the kernels of vLLM round otherwise, and near-ties would fall otherwise.
        overfit(draft, batch_of(target, samples, anchors=24), 150, 5e-3)
        (folder / name).mkdir()
        save_draft(draft, folder / name)
        load_draft(folder / name, target)
    return folder


@pytest.fixture(scope="module")
def said(place: Path) -> dict[str, Any]:
    """witness.json of an evaluation at two temperatures."""
    drafts = ",".join(str(place / name) for name in KINDS)
    evaluate(
        compose_eval(
            [
                *target_overrides(place / "target"),
                f"drafts=[{drafts}]",
                f"task.path={place / 'prompts.jsonl'}",
                f"output_dir={place / 'out'}",
                "temperatures=[0,1]",
                "max_new_tokens=32",
                "batch_size=8",
                "latency_prompts=0",
                "device=cpu",
                "engine=vllm",
                "witness.timeout_seconds=300",
            ]
        )
    )
    content: dict[str, Any] = json.loads((place / "out" / "witness.json").read_text())
    return content


def row_of(said: dict[str, Any], draft: str, temperature: float) -> dict[str, Any]:
    (row,) = [row for row in said["rows"] if (row["draft"], row["temperature"]) == (draft, temperature)]
    return dict(row)


@pytest.mark.parametrize("draft", KINDS)
def test_greedy_tokens_and_rounds_of_vllm_are_ours(said: dict[str, Any], draft: str) -> None:
    row = row_of(said, draft, 0.0)
    assert row["num_answers"] == len(PROMPTS) + 1
    assert row["same_answers"] == row["num_answers"]
    assert row["acceptance_length"] > 1.3, "a draft that is never right would agree with everything"
    # fp32 with other kernels: one near-tie of the draft may fall differently in eight prompts, not more.
    assert abs(row["witness_rounds"] - row["rounds"]) <= row["num_prompts"] / 8
    assert row["same_rounds"] >= row["num_answers"] - 1
    assert row["undrafted_tokens"] == 0
    # Its own count takes the bonus token and drafts behind a stop token in.
    assert row["witness_own_count"] >= row["witness_acceptance_length"]


@pytest.mark.parametrize("draft", ["dflash_fill_in", "eagle3"])
def test_sampled_tokens_of_vllm_are_accepted_as_often_as_ours(said: dict[str, Any], draft: str) -> None:
    row = row_of(said, draft, 1.0)
    assert row["same_answers"] is None
    assert row["rounds"] > 60
    low, high = row["difference_ci95"]
    # Two independent draws: twice the half width of a 95 % interval leaves one false alarm in ten thousand.
    assert abs(row["difference"]) < high - low


def test_drafts_are_measured_in_turn_and_what_cannot_be_is_said(said: dict[str, Any]) -> None:
    methods = {row["draft"]: row["method"] for row in said["rows"]}
    assert methods == {"dspark": "dspark", "dflash": "dspark", "dflash_fill_in": "dflash", "eagle3": "eagle3"}
    assert list(methods) == list(KINDS)
    assert [row["temperature"] for row in said["rows"]] == [0.0] * 4 + [1.0] * 2
    assert set(said["not_measured"]) == {"dspark at temperature 1", "dflash at temperature 1"}
    assert said["provenance"]["engine"]["name"] == "vllm"
