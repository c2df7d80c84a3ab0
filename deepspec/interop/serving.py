"""The command that serves an export, for each engine."""

from __future__ import annotations

import json

from deepspec.interop.engines import Draft, Format, unserved


def serve_command(draft: Draft, engine: Format, target: str, folder: str, tables: list[str]) -> str:
    """A shell command, or Python for packages without a server.

    Args:
        draft: its facts.
        engine: whose format the folder has.
        target: name of the target.
        folder: name of the folder or hub id.
        tables: files beside the weights that SGLang takes.
    """
    why = unserved(draft, engine)
    if why is not None:
        return f"# No engine serves it: {why}"
    if engine == "vllm":
        return _vllm(draft, target, vllm_settings(draft, folder))
    if engine == "speculators":
        runner = "VLLM_USE_V2_MODEL_RUNNER=1 " if needs_second_runner(draft) else ""
        return f"{runner}vllm serve {folder}    # the target is named in its config.json"
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


def needs_second_runner(draft: Draft) -> bool:
    """Whether vLLM serves a draft in its second model runner alone.

    DSpark is in no other. In the first one block drafts beside windows end with "All drafting layers should belong to
    the same kv cache group".
    """
    method = vllm_settings(draft, "")["method"]
    return method == "dspark" or (method == "dflash" and draft.beside_windows)


def _vllm(draft: Draft, target: str, settings: dict[str, object]) -> str:
    runner = "VLLM_USE_V2_MODEL_RUNNER=1 " if needs_second_runner(draft) else ""
    return f"{runner}vllm serve {target} \\\n  --speculative-config '{json.dumps(settings)}'"


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
