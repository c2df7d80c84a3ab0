"""What this project and another engine measured, side by side: the file witness.json, a table, a part of the page.

It knows how the numbers are stored and shown, not how they came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich import box
from rich.table import Table
from rich.text import Text

from deepspec.evaluation.report import Provenance, common_ending, format_number
from deepspec.evaluation.report_html import Section
from deepspec.evaluation.statistics import Interval
from deepspec.files import write_json

SCHEMA = 1
WITNESS_FILE = "witness.json"

_HEAD = (
    "Task",
    "Draft",
    "T",
    "tau here",
    "tau in vLLM",
    "difference",
    "own count",
    "rounds",
    "same answers",
    "same rounds",
    "prompts",
)
HOW = {
    "here": "tokens emitted per round, bonus token included; a round that an accepted stop token ended counts the "
    "accepted tokens only (results.json)",
    "witness": "the same count over the rounds that vLLM reports of each request (accepted drafts of every "
    "verification step), on the same prompt ids, with the draft as `deepspec export format=vllm` writes it",
    "witness_own_count": "1 + accepted drafts / drafts, the mean acceptance length that vLLM prints: drafts that it "
    "accepted behind a stop token count too, and so does a bonus token there",
    "conditions": "vLLM in its eager mode, prompts whole and not from a cache; on a CPU one request at a time",
    "difference": "tau in vLLM minus tau here, 95 % bootstrap interval over the same prompts",
    "same_answers": "greedy answers equal token by token; same_rounds: of these, those whose rounds accepted the same "
    "numbers of tokens. In bf16 near-ties may fall differently, in fp32 both should be all",
    "sampled": "at a temperature the draws differ, so answers do too, and only the means are comparable; vLLM's drafts "
    "follow the temperature and ignore top_k and top_p, which lowers its tau where those are set",
}


class WitnessRow(BaseModel):
    """One draft on one task at one temperature, on both sides; `witness_` is the other engine's.

    Attributes:
        task: name of the task.
        draft: name of the draft.
        algorithm: of the draft.
        method: the engine's name for it.
        num_draft_tokens: K on both sides.
        temperature: sampling temperature.
        num_prompts: prompts with at least one answer.
        num_answers: turns of conversations, each one answer.
        rounds: verified here.
        witness_rounds: verified there.
        acceptance_length: tau, bonus token included.
        acceptance_length_ci95: bootstrap interval over prompts.
        witness_acceptance_length: tau of the witness's rounds, counted alike.
        witness_acceptance_length_ci95: likewise.
        witness_own_count: tau as the engine itself counts it.
        difference: witness_acceptance_length - acceptance_length.
        difference_ci95: paired bootstrap interval over prompts.
        survival: share of rounds with at least k accepted.
        witness_survival: likewise.
        same_answers: answers equal token by token; None where tokens are sampled.
        same_rounds: of these, answers whose rounds accepted the same numbers of tokens.
        undrafted_tokens: that the engine decoded in steps without a draft, in no round.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    task: str
    draft: str
    algorithm: str
    method: str
    num_draft_tokens: int
    temperature: float
    num_prompts: int
    num_answers: int
    rounds: int
    witness_rounds: int
    acceptance_length: float | None
    acceptance_length_ci95: Interval | None
    witness_acceptance_length: float | None
    witness_acceptance_length_ci95: Interval | None
    witness_own_count: float | None
    difference: float | None
    difference_ci95: Interval | None
    survival: tuple[float | None, ...]
    witness_survival: tuple[float | None, ...]
    same_answers: int | None
    same_rounds: int | None
    undrafted_tokens: int


def write_witness(
    folder: Path, rows: Sequence[WitnessRow], not_measured: Mapping[str, str], provenance: Provenance
) -> Path:
    """Write witness.json into a folder, atomically, and return its path.

    Args:
        folder: where results.json lies.
        rows: the comparison.
        not_measured: drafts that the engine cannot serve or failed with, and why.
        provenance: that of results.json with the engine added; JSON values only.
    """
    path = folder / WITNESS_FILE
    content = {
        "schema": SCHEMA,
        "provenance": dict(provenance),
        "how": HOW,
        "rows": [row.model_dump(mode="json") for row in rows],
        "not_measured": dict(not_measured),
    }
    write_json(path, content)
    return path


def remarks(rows: Sequence[WitnessRow], not_measured: Mapping[str, str]) -> list[str]:
    """What a reader must know before believing the rows, one line each."""
    found = []
    for row in rows:
        place = f"{row.task}, {row.draft}, temperature {row.temperature:g}"
        interval = row.difference_ci95
        if interval is not None and not interval[0] <= 0.0 <= interval[1]:
            found.append(f"{place}: the two taus differ by more than chance between prompts explains")
        if row.undrafted_tokens:
            found.append(
                f"{place}: vLLM decoded {row.undrafted_tokens} tokens without a draft, most likely for lack of memory "
                "for keys and values (VLLM_CPU_KVCACHE_SPACE, gpu_memory_utilization)"
            )
    return found + [f"{name} was not measured by vLLM: {why}" for name, why in not_measured.items()]


def witness_table(rows: Sequence[WitnessRow], not_measured: Mapping[str, str], engine: str) -> Table:
    """The comparison for the terminal."""
    ending = common_ending([row.draft for row in rows])
    notes = ["tau: tokens per target pass, bonus included, counted alike; own count: vLLM's; rounds: here / in vLLM."]
    notes += [f"Draft names end in {ending}."] if ending else []
    table = Table(
        title=Text(f"Witness: the same prompts and drafts in {engine}"),
        caption=Text("\n".join(notes + [f"! {line}" for line in remarks(rows, not_measured)])),
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    for index, name in enumerate(_HEAD):
        table.add_column(Text(name), justify="left" if index < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, _cells(row, ending)))
    return table


def witness_section(rows: Sequence[WitnessRow], not_measured: Mapping[str, str], engine: str) -> Section:
    """The comparison for the page."""
    note = (
        f"{engine} decoded the same prompt ids with the same drafts. tau here and in vLLM: {HOW['witness']}; "
        f"{HOW['here']}. Own count: {HOW['witness_own_count']}. Same answers: {HOW['same_answers']}. "
        f"Sampled: {HOW['sampled']}."
    )
    doubts = " ".join(f"{line}." for line in remarks(rows, not_measured))
    ending = common_ending([row.draft for row in rows])
    return Section(
        "Another engine as witness", f"{note} {doubts}".strip(), (), _HEAD, [_cells(row, ending) for row in rows]
    )


def _cells(row: WitnessRow, ending: str) -> list[str]:
    return [
        row.task,
        row.draft.removesuffix(ending),
        f"{row.temperature:g}",
        _with_interval(row.acceptance_length, row.acceptance_length_ci95),
        _with_interval(row.witness_acceptance_length, row.witness_acceptance_length_ci95),
        _with_interval(row.difference, row.difference_ci95, "+.3f"),
        format_number(row.witness_own_count, 3),
        f"{row.rounds} / {row.witness_rounds}",
        "-" if row.same_answers is None else f"{row.same_answers} of {row.num_answers}",
        "-" if row.same_rounds is None else f"{row.same_rounds} of {row.same_answers}",
        str(row.num_prompts),
    ]


def _with_interval(value: float | None, interval: Interval | None, form: str = ".3f") -> str:
    if value is None:
        return "-"
    return f"{value:{form}}" + ("" if interval is None else f" [{interval[0]:{form}}, {interval[1]:{form}}]")
