"""Which classes of targets vLLM can tap: a job names architectures, the result says of each whether it can."""

from __future__ import annotations

from typing import Any

from protocol import Job, serve
from vllm import ModelRegistry
from vllm.model_executor.models.interfaces import supports_eagle3


def tapped(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in job["architectures"]:
        try:
            can = supports_eagle3(ModelRegistry.models[name].load_model_cls())
        except ImportError:  # images, for which this environment has no packages
            continue
        # Block drafts are given their features through the same interface.
        found[name] = {"eagle3": can, "block": can}
    return found


serve(tapped)
