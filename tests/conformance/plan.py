"""Which drafts run in which clients: the suite, as data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from conformance.drafts import FAMILIES
from conformance.running import Run


def _runs(client: str, form: str, *cases: str) -> list[Run]:
    return [Run(case, client, form) for case in cases]


DECODING = [
    *_runs("vllm", "vllm", "dspark", "dspark_reduced", "dflash", "fill_in", "fill_in_reduced"),
    *_runs("vllm", "vllm", "eagle3", "eagle3_own", "eagle3_normed"),
    *_runs("vllm", "vllm", "llama_dspark", "llama_fill_in", "llama_eagle3", "llama_eagle3_llama"),
    *_runs("vllm", "vllm", "llama_eagle3_reduced"),
    *_runs("vllm", "vllm", *(f"{family}_eagle3" for family in FAMILIES)),
    # OLMo3's take two rounds fewer there than here (docs/engines/vllm.md).
    *_runs("vllm", "vllm", *(f"{family}_fill_in" for family in FAMILIES if family != "olmo3"), "gpt_oss_dspark"),
    *_runs("vllm", "speculators", "dspark", "fill_in", "eagle3", "llama_eagle3_llama"),
    *_runs("dflash", "zlab", "fill_in", "llama_fill_in"),
    *_runs("transformers", "zlab", "fill_in", "llama_fill_in", *(f"{family}_fill_in" for family in FAMILIES)),
    *_runs("transformers", "zlab", "glm4_fill_in"),
    *_runs("mlx_dspark", "deepspec", "dspark", "llama_dspark"),
    *_runs("mlx_dspark", "vllm", "dspark", "dflash"),
    *_runs("mlx_dspark", "zlab", "fill_in"),
]
"""Clients that decode: tokens and rounds are compared."""

FORWARDS = [
    *_runs("specforge", "specforge", "dspark", "dspark_gated", "dspark_rnn", "dflash", "fill_in"),
    *_runs("specforge", "specforge", "llama_eagle3_llama", "llama_eagle3_reduced"),
    *_runs("speculators", "speculators", "dspark", "dspark_gated", "dspark_rnn", "dspark_reduced", "dflash"),
    *_runs("speculators", "speculators", "fill_in", "fill_in_reduced", "eagle3", "eagle3_own", "eagle3_normed"),
    *_runs("speculators", "speculators", "llama_eagle3_llama", "llama_eagle3_reduced"),
]
"""Model classes: hidden states and logits are compared."""

PARSING = [
    *_runs("sglang", "sglang", "dspark", "dspark_gated", "dspark_rnn", "dflash", "fill_in"),
    *_runs("sglang", "sglang", "llama_eagle3_llama", "llama_eagle3_reduced"),
]
"""Engines that cannot run here: what they read out of a config is compared."""

CONTROLS = [
    *(Run("dspark", "vllm", "vllm", control) for control in ("taps", "layout", "rope")),
    *(Run("fill_in", "vllm", "vllm", control) for control in ("taps", "layout", "rope")),
    *(Run("eagle3", "vllm", "vllm", control) for control in ("taps", "rope")),
    *(Run("fill_in", client, "zlab", control) for client in ("dflash", "transformers") for control in ("taps", "rope")),
    *(Run("dflash", client, "zlab", "layout") for client in ("dflash", "transformers")),
    *(Run("dspark", "mlx_dspark", "deepspec", control) for control in ("taps", "rope")),
]
"""Exports broken on purpose: they must cost acceptance."""

CORE = frozenset(
    {
        *_runs("vllm", "vllm", "dspark", "fill_in", "eagle3"),
        *_runs("transformers", "zlab", "fill_in"),
        *(Run(case, "vllm", "vllm", "taps") for case in ("fill_in", "eagle3")),
        Run("fill_in", "transformers", "zlab", "taps"),
    }
)
"""What CI runs of it, marked `core`: every algorithm in vLLM, whose environment is the only one that this needs."""


def marked(runs: Iterable[Run]) -> list[Any]:
    """Runs as parameters of a test."""
    return [pytest.param(run, id=run.name, marks=[pytest.mark.core] if run in CORE else []) for run in runs]


def marked_cases(cases: Iterable[str]) -> list[Any]:
    """Cases as parameters of a test."""
    core = {run.case for run in CORE}
    return [pytest.param(case, id=case, marks=[pytest.mark.core] if case in core else []) for case in cases]
