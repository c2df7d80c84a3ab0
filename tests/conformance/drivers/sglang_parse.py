"""What SGLang's own code reads out of an export: config keys, temperatures and cost table.

The server cannot start without CUDA kernels, so the modules that parse are imported with everything else of the
package replaced by stand-ins; they are never called while a config is parsed. Names of classes are read from source.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from protocol import Job, serve
from transformers import AutoConfig

_SPECULATIVE = "sglang.srt.speculative"
_PARSERS = (
    f"{_SPECULATIVE}.dflash_utils",
    f"{_SPECULATIVE}.dspark_components.dspark_config",
    f"{_SPECULATIVE}.dspark_components.dspark_sps",
    f"{_SPECULATIVE}.dspark_components.dspark_sts",
    f"{_SPECULATIVE}.eagle_utils",
)
_ROOT = Path(next(iter(importlib.util.find_spec("sglang").submodule_search_locations)))  # type: ignore[union-attr,arg-type]


class Anything(type):
    """A class that has every attribute that module bodies and annotations ask for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class StandIn(types.ModuleType):
    """A package whose submodules are still found."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "sglang" or name in _PARSERS:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(_ROOT.joinpath(*name.split(".")[1:]))]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, StandIns())

# `from package import module` would find a stand-in.
dflash_utils, dspark_config, dspark_sps, dspark_sts, eagle_utils = map(importlib.import_module, _PARSERS)


def known_architectures() -> set[str]:
    """Class names that SGLang's model files register."""
    found: set[str] = set()
    for name in ("dspark", "dflash", "llama_eagle3"):
        tree = ast.parse((_ROOT / "srt" / "models" / f"{name}.py").read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Assign) and any(getattr(one, "id", "") == "EntryClass" for one in node.targets):
                found |= {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
    return found


def parse(job: Job) -> dict[str, Any]:
    folder = Path(job["draft"])
    config = AutoConfig.from_pretrained(folder)
    found: dict[str, Any] = {"is_known": config.architectures[0] in known_architectures()}
    if job["method"] == "eagle3":
        eagle3 = types.SimpleNamespace(is_eagle3=lambda: True)
        sizes = types.SimpleNamespace(hf_config=config, hidden_size=config.hidden_size)
        runner = types.SimpleNamespace(model_config=sizes, spec_algorithm=eagle3)
        found["feature_size"] = eagle_utils.get_draft_input_from_target_hidden_dim(runner)
        found["layer_ids"] = config.eagle_config["eagle_aux_hidden_state_layer_ids"]
        return found
    if job["method"] == "dflash":
        read = dflash_utils.parse_dflash_draft_config(draft_hf_config=config)
        return found | {
            "layer_ids": read.resolve_target_layer_ids(target_num_layers=job["num_target_layers"]),
            "block_size": read.block_size,
            "mask_token_id": read.mask_token_id,
        }
    draft = dspark_config.parse_dspark_draft_config(draft_hf_config=config)
    runtime = dspark_config.resolve_runtime_config(
        draft_hf_config=config, speculative_num_draft_tokens=None, target_vocab_size=config.vocab_size
    )
    found |= {
        "layer_ids": draft.target_layer_ids,
        "mask_token_id": runtime.mask_token_id,
        "num_draft_tokens": runtime.gamma,
        "verify_tokens": runtime.verify_num_draft_tokens,
        "markov": [draft.markov_head_type, draft.markov_rank],
        "samples_from_anchor": dspark_config.get_dspark_sample_from_anchor(config),
    }
    if (folder / "sts.json").is_file():
        found["temperatures"] = dspark_sts.load_sts_calibration_from_path(str(folder / "sts.json")).temperatures
    if (folder / "sps_table.json").is_file():
        table = dspark_sps.load_sps_table_from_path(str(folder / "sps_table.json"))
        found["steps_per_second"] = [table.lookup(tokens) for tokens in job["batch_tokens"]]
    return found


serve(parse)
