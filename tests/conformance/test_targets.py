"""Export refuses the targets that an engine cannot tap, and no other of the families that we train on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Literal

import pytest
from conformance.environments import UnavailableError, find
from conformance.running import DRIVERS, environment
from families import FAMILIES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deepspec.interop.engines import UNTAPPED, Format

_KINDS: tuple[Literal["eagle3", "block"], ...] = ("eagle3", "block")

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(300)]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_targets_that_an_engine_cannot_tap_are_those_that_export_refuses(engine: Format, tmp_path: Path) -> None:
    try:
        python = find(engine)
    except UnavailableError as error:
        pytest.skip(f"{engine}: {error}")
    jobs = tmp_path / "jobs.json"
    classes = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family] for family in FAMILIES)
    jobs.write_text(json.dumps([{"name": engine, "architectures": classes}]))
    command = [str(python), str(DRIVERS / f"{engine}_targets.py"), str(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    tapped = json.loads(done.stdout)["result"]
    assert set(classes) - tapped.keys() <= {"Qwen3_5ForCausalLM"}, "classes that cannot be imported here"
    for kind in _KINDS:
        assert {name for name in tapped if not tapped[name][kind]} == UNTAPPED[engine, kind]
