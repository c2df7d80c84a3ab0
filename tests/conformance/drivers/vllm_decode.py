"""Greedy speculative decoding in vLLM on a CPU: tokens, and how many drafts were verified, prompt by prompt.

A job names target, draft, method, num_draft_tokens, prompts and max_new_tokens; method null lets a speculators folder
say all of that itself. Jobs with the method dspark need a process of their own kind: DSpark runs in vLLM's second
runner, whose kernels run in Triton's interpreter here.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

from protocol import Job, serve

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    DO_NOT_TRACK="1",
)
if any(job["runner"] == "second" for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))):
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    import triton.backends

    class CpuDriver:
        @staticmethod
        def is_active() -> bool:
            return True

    # Triton looks for a device before it interprets; a CPU build of torch has none.
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=CpuDriver, compiler=None)

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory


def decode(job: Job) -> dict[str, Any]:
    speculative: dict[str, Any] = {}
    if job["method"] is not None:
        speculative["speculative_config"] = {
            "model": job["draft"],
            "method": job["method"],
            "num_speculative_tokens": job["num_draft_tokens"],
        }
    engine = LLM(
        model=job["target"] if speculative else job["draft"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=1,  # with several requests in flight vLLM 0.32 on a CPU loses some drafts (docs/witness.md)
        max_num_batched_tokens=512,
        enforce_eager=True,
        per_request_spec_decode_metrics="detailed",
        seed=0,
        **speculative,
    )
    try:
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in job["prompts"]],
            SamplingParams(temperature=0, max_tokens=job["max_new_tokens"], ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()
    answers = [output.outputs[0] for output in outputs]
    accepted = [list(answer.spec_decode_metrics.per_step_accepted) for answer in answers]
    rounds = [len(one) for one in accepted]
    return {
        "tokens": [list(answer.token_ids) for answer in answers],
        "rounds_by_prompt": rounds,
        "rounds": sum(rounds),
        "accepted": accepted,
    }


serve(decode)
