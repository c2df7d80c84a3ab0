"""The model card of an export: what it is, how to serve it, and what our evaluator measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import deepspec
from deepspec.errors import DataError
from deepspec.evaluation.report import ABSENT, ResultRow, read_results
from deepspec.interop.engines import Draft, nearest_formats
from deepspec.interop.serving import serve_command
from deepspec.interop.settings import ExportConfig
from deepspec.targets.loading import is_local_target, source_of

CARD = "README.md"


def write_card(config: ExportConfig, name: str, path: Path, facts: Draft, tables: Sequence[str], folder: Path) -> None:
    """Write README.md into an export.

    Args:
        config: of the export.
        name: of the draft.
        path: where it came from; rows of the results are recognised by it.
        facts: what it is.
        tables: further files of the export.
        folder: the export.

    Raises:
        DataError: results were named but are missing or tell of other drafts.
    """
    target = config.target.name_or_path
    is_local = is_local_target(config.target)
    named = Path(target).name if is_local and config.push_to is not None else target
    # Other programs know nothing of the embedded target's name, and other people nothing of this machine's folders.
    served = named if config.format == "deepspec" or config.push_to is not None else str(source_of(config.target))
    beside = Path(config.output_dir).name if config.output_dir else f"{name}_{config.format}"
    # A server takes weights from the hub, but tables from a folder only.
    fetched = config.push_to is not None and bool(tables)
    where = beside if config.push_to is None or fetched else config.push_to
    command = serve_command(facts, config.format, served, where, list(tables))
    if fetched:
        command = f"hf download {config.push_to} --local-dir {beside}\n{command}"
    algorithm = facts.algorithm
    vocabulary = ", a reduced draft vocabulary" if facts.is_reduced else ""
    article = "An" if algorithm.name[0] in "aeiou" else "A"
    others = [one for one in nearest_formats(facts) if one != config.format]
    language = "python" if config.format == "zlab" else "bash"
    parts = [
        "---",
        *([] if is_local else [f"base_model: {target}"]),
        "library_name: deepspec",
        f"tags: [speculative-decoding, draft-model, {facts.algorithm.name}]",
        "---",
        f"# {name}",
        "",
        f"{article} {algorithm.name} draft model for speculative decoding with {named}: "
        f"{algorithm.num_draft_tokens} draft tokens a round, {algorithm.num_layers} layers of {facts.model_type}, "
        f"{facts.num_taps} tapped layers{vocabulary}. Output stays distributed exactly as the "
        f"target's own. Format: {config.format}; written by deepspec {deepspec.__version__}.",
        "",
        f"```{language}",
        command,
        "```",
    ]
    if others:
        parts += ["", f"Other formats it can be exported to: {', '.join(others)}."]
    if config.results is not None:
        parts += ["", "## Measured", "", *_table(config, config.results, name, path)]
    (folder / CARD).write_text("\n".join(parts) + "\n", encoding="utf-8")


def _table(config: ExportConfig, results: str, name: str, path: Path) -> list[str]:
    """Rows of this draft, with how they were measured."""
    found = read_results(Path(results).expanduser())
    drafts = found.provenance.get("drafts") or {}
    same = {
        known
        for known, place in drafts.items()
        if place == config.draft or Path(str(place)).expanduser().resolve() == path.resolve()
    }
    # A name alone would take the rows of another step of the same run.
    rows = [row for row in found.rows if row.draft in (same if drafts else {name})]
    if not rows:
        known = ", ".join(
            sorted({f"{row.draft} ({drafts.get(row.draft, 'of an unknown folder')})" for row in found.rows})
        )
        raise DataError(f"results {results} tell nothing of {path}; they have {known}. Give those of this draft.")
    head = ["| task | temperature | tau [95 %] | accepted drafts | prompts | speed-up |", "|---|---|---|---|---|---|"]
    lines = [_line(row) for row in rows]
    dtype, device = found.provenance.get("dtype", "?"), found.provenance.get("device", "?")
    return [
        *head,
        *lines,
        "",
        "tau counts the tokens emitted a round, bonus token included; accepted drafts is tau - 1, as engines count. "
        f"Target in {dtype} on {device}; speed-up at batch size 1 over plain decoding in the same run.",
    ]


def _line(row: ResultRow) -> str:
    tau = row.acceptance_length
    spread = row.acceptance_length_ci95
    shown = ABSENT if tau is None else f"{tau:.2f}"
    interval = "" if spread is None else f" [{spread[0]:.2f}, {spread[1]:.2f}]"
    accepted = ABSENT if tau is None else f"{tau - 1:.2f}"
    speed = row.speedup_over_autoregressive
    faster = ABSENT if speed is None else f"{speed:.2f}x"
    return f"| {row.task} | {row.temperature:g} | {shown}{interval} | {accepted} | {row.num_prompts} | {faster} |"
