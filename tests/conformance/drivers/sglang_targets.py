"""Which classes of targets SGLang can tap, read from its sources: they cannot be imported without CUDA kernels.

A job names architectures; the result says of each whether it hands layers to Eagle3, and whether to block drafts.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

from protocol import Job, serve

_METHODS = {"eagle3": "set_eagle3_layers_to_capture", "block": "set_dflash_layers_to_capture"}
_MODELS = Path(next(iter(importlib.util.find_spec("sglang").submodule_search_locations))) / "srt" / "models"  # type: ignore[union-attr,arg-type]


def tapped(job: Job) -> dict[str, Any]:
    classes: dict[str, ast.ClassDef] = {}
    for file in _MODELS.glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        classes |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def has(name: str, method: str) -> bool:
        node = classes.get(name)
        if node is None:
            return False
        if any(isinstance(one, ast.FunctionDef) and one.name == method for one in node.body):
            return True
        return any(has(base.id, method) for base in node.bases if isinstance(base, ast.Name))

    return {name: {kind: has(name, method) for kind, method in _METHODS.items()} for name in job["architectures"]}


serve(tapped)
