"""Decodes prompts with vLLM's speculative decoding; runs in vLLM's own environment, as a program.

It needs the standard library and vLLM, and imports nothing of this package. A job is one line of JSON on stdin; what
happens is told in lines of JSON on stdout: `ready`, `alive` while it works, `answer` for each prompt as it finishes,
`done` or `error`. Everything that vLLM itself prints goes to stderr. It ends when its stdin is closed, which happens
when whoever asked is gone, however that ended.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import types
from typing import Any

# An unfinished prompt may take longer than whoever waits believes in.
ALIVE_SECONDS = 5.0


class Channel:
    """Where messages go: stdout as it was, while everything else that is printed goes to stderr."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._last = 0.0

    def send(self, kind: str, **values: Any) -> None:
        """Write one message."""
        self._last = time.monotonic()
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()

    def send_alive(self) -> None:
        """Say that work goes on, unless something was said just now."""
        if time.monotonic() - self._last > ALIVE_SECONDS:
            self.send("alive")


def main() -> None:
    """Do the job on stdin and tell how it went."""
    channel = Channel()
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        _prepare_environment(job)
        vllm: Any = importlib.import_module("vllm")
        channel.send("ready", version=vllm.__version__, device=_device())
        if job["requests"]:
            _decode(vllm, job, channel)
    except Exception as error:
        # In this order: who reads the message ends this process.
        traceback.print_exc()
        channel.send("error", text=f"{type(error).__name__}: {error}")
        sys.exit(1)
    channel.send("done")


def _end_with_stdin() -> None:
    sys.stdin.read()
    # Not sys.exit: the main thread is inside the engine, which may have processes of its own.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _device() -> str:
    platform = importlib.import_module("vllm.platforms").current_platform
    return str(platform.device_type)


def _prepare_environment(job: dict[str, Any]) -> None:
    """What vLLM reads from the environment, before it is imported; what the user has set stays."""
    wanted = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if job["requests"] and job["second_runner"]:
        wanted["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if job["device"] == "cpu":
        # Without a size, in GiB, vLLM would take most of the memory.
        wanted["VLLM_CPU_KVCACHE_SPACE"] = "2"
        if job["second_runner"] or job["sampling"]["temperature"] > 0:
            # The second runner's Triton kernels are run by Triton's interpreter on a CPU. Of the first runner vLLM
            # 0.32's C++ kernel for CPUs that spreads temperatures over draft tokens writes into a copy, so that
            # sampling would divide by whatever lies in memory; the interpreter runs the Triton one instead.
            wanted |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": str(int(job["second_runner"]))}
    for key, value in wanted.items():
        os.environ.setdefault(key, value)
    if "TRITON_INTERPRET" in wanted:
        _pretend_a_triton_backend()


def _pretend_a_triton_backend() -> None:
    """Without a backend for CPUs vLLM takes Triton for missing; its interpreter needs none.

    Triton reads TRITON_INTERPRET when it is imported, which this does.
    """

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends: dict[str, Any] = importlib.import_module("triton.backends").backends
    backends.setdefault("cpu", types.SimpleNamespace(driver=Driver, compiler=None))


def _decode(vllm: Any, job: dict[str, Any], channel: Channel) -> None:
    settings = {
        "model": job["target"],
        "revision": job["revision"],
        "dtype": job["dtype"],
        "max_model_len": job["max_model_len"],
        # With several in flight vLLM 0.32 loses a draft here and there on a CPU (docs/witness.md).
        "max_num_seqs": 1 if job["device"] == "cpu" else job["batch_size"],
        "max_num_batched_tokens": max(512, job["max_model_len"]),
        # Prompts whole and computed anew, as here; states of a cached prefix would not reach the draft.
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "seed": 0,
        # Prompts are ids, and stop tokens are those of the one who asks.
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "speculative_config": job["speculative"],
        "per_request_spec_decode_metrics": "detailed",
    }
    engine = vllm.LLM(**{**settings, **job["arguments"]}).llm_engine
    kinds = importlib.import_module("vllm.sampling_params").RequestOutputKind
    for request in job["requests"]:
        parameters = vllm.SamplingParams(
            **job["sampling"],
            seed=request["seed"],
            max_tokens=job["max_new_tokens"],
            stop_token_ids=job["stop_token_ids"],
            ignore_eos=True,
            detokenize=False,
            output_kind=kinds.FINAL_ONLY,
        )
        engine.add_request(request["id"], {"prompt_token_ids": request["prompt_ids"]}, parameters)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                channel.send("answer", **_answer(output))
        channel.send_alive()


def _answer(output: Any) -> dict[str, Any]:
    answer = output.outputs[0]
    # None for an answer of one token, which no round was needed for.
    metrics = answer.spec_decode_metrics
    return {
        "id": output.request_id,
        "output_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "proposed": [] if metrics is None else list(metrics.per_step_drafted),
        "accepted": [] if metrics is None else list(metrics.per_step_accepted),
    }


if __name__ == "__main__":
    main()
