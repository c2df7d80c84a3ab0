"""The command that serves an export, for each engine."""

from __future__ import annotations

import json

from deepspec.interop.engines import Draft, Format


def serve_command(draft: Draft, engine: Format, target: str, folder: str, tables: list[str]) -> str:
    """A shell command, or Python for packages without a server.

    Args:
        draft: its facts.
        engine: whose format the folder has.
        target: name of the target.
        folder: name of the folder or hub id.
        tables: files beside the weights that SGLang takes.
    """
    if engine == "vllm":
        return _vllm(target, vllm_settings(draft, folder))
    if engine == "speculators":
        return f"vllm serve {folder}    # the target is named in its config.json"
    if engine in ("sglang", "specforge"):
        return _sglang(draft, target, folder, tables)
    if engine == "zlab":
        return (
            "from dflash.model import DFlashDraftModel, dflash_generate\n"
            f'draft = DFlashDraftModel.from_pretrained("{folder}")\n'
            "output = dflash_generate(draft, target, input_ids, max_new_tokens, stop_token_ids, temperature=0.0)"
        )
    return f"deepspec eval target.name_or_path={target} target=auto drafts=[{folder}]"


def vllm_settings(draft: Draft, folder: str) -> dict[str, object]:
    """What vLLM is told of a draft: --speculative-config."""
    method = {"dflash_fill_in": "dflash", "eagle3": "eagle3"}.get(draft.kind, "dspark")
    return {"model": folder, "method": method, "num_speculative_tokens": draft.algorithm.num_draft_tokens}


def _vllm(target: str, settings: dict[str, object]) -> str:
    return f"vllm serve {target} \\\n  --speculative-config '{json.dumps(settings)}'"


def _sglang(draft: Draft, target: str, folder: str, tables: list[str]) -> str:
    count = draft.algorithm.num_draft_tokens
    name = {"dflash_fill_in": "DFLASH", "eagle3": "EAGLE3"}.get(draft.kind, "DSPARK")
    words = [
        f"python -m sglang.launch_server --model-path {target}",
        f"--speculative-algorithm {name} --speculative-draft-model-path {folder}",
    ]
    if name == "EAGLE3":
        words.append(f"--speculative-num-steps {count} --speculative-eagle-topk 1")
    # SGLang counts the anchor among the tokens that it verifies.
    words.append(f"--speculative-num-draft-tokens {count + 1}")
    options = {
        "sts.json": "--speculative-dspark-confidence-sts-path",
        "sps_table.json": "--speculative-dspark-sps-table-path",
    }
    if tables:
        # Confidence is read in this mode alone; by default whole blocks are verified.
        words.insert(0, "SGLANG_RAGGED_VERIFY_MODE=compact")
    words += [f"{options[table]} {folder}/{table}" for table in tables]
    return " \\\n  ".join(words)
