"""What the suite found, as tables of the docs.

    python tests/conformance/render.py OUTCOMES.json      takes outcomes over into docs/engines and renders the page

Outcomes of a part of the suite replace only their own rows. Failures are refused, and outcomes from before the lists of
a client's packages changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from conformance.environments import lists_id
from conformance.plan import CONTROLS, DECODING, FORWARDS, PARSING

from deepspec.interop.engines import UNTAPPED

PAGES = Path(__file__).parents[2] / "docs" / "engines"
OUTCOMES, PAGE = PAGES / "outcomes.json", PAGES / "README.md"
_BEGIN, _END = "<!-- rendered from outcomes.json -->\n", "<!-- end of rendering -->\n"
_KEY = ("case", "client", "form", "control")
_COLUMNS = {
    ("vllm", "vllm"): "vLLM",
    ("vllm", "speculators"): "vLLM, speculators format",
    ("dflash", "zlab"): "dflash",
    ("transformers", "zlab"): "transformers",
    ("mlx_dspark", "deepspec"): "mlx-dspark",
    ("mlx_dspark", "vllm"): "mlx-dspark, vllm format",
    ("mlx_dspark", "zlab"): "mlx-dspark, zlab format",
    ("specforge", "specforge"): "SpecForge classes",
    ("speculators", "speculators"): "speculators classes",
    ("sglang", "sglang"): "SGLang config",
}
_KINDS = {"eagle3": "Eagle3", "block": "DSpark, DFlash"}
_CONTROLS = {"taps": "layer ids shifted by one", "layout": "block layout flipped", "rope": "rotary base fallen back"}

Row = dict[str, Any]


def tables(outcomes: Sequence[Row]) -> str:
    """The rendered part of the page."""
    whole = [row for row in outcomes if row["control"] is None]
    broken = [row for row in outcomes if row["control"] is not None]
    columns = [key for key in _COLUMNS if any((row["client"], row["form"]) == key for row in whole)]
    drafts = list(dict.fromkeys((row["family"], row["label"]) for row in sorted(whole, key=_by_case)))
    lines = [_line(["target", "draft", *(_COLUMNS[key] for key in columns)]), _line(["---"] * (len(columns) + 2))]
    for draft in drafts:
        of_draft = [row for row in whole if (row["family"], row["label"]) == draft]
        cells = [[_cell(row) for row in of_draft if (row["client"], row["form"]) == key] for key in columns]
        lines.append(_line([*draft, *(found[0] if found else "-" for found in cells)]))
    lines += ["", _line(["broken on purpose", "draft", "client", "rounds, whole", "rounds, broken", "tau lost"])]
    lines.append(_line(["---"] * 6))
    for row in sorted(broken, key=_by_control):
        lines.append(_line([_CONTROLS[row["control"]], row["label"], row["client"], *_loss(row)]))
    lines += ["", _line(["engine", "kind of draft", "targets it cannot tap: export refuses"]), _line(["---"] * 3)]
    for (engine, kind), classes in UNTAPPED.items():
        lines.append(_line([engine, _KINDS[kind], ", ".join(sorted(classes))]))
    skipped = {f"- {row['client']}: {row['reason']}" for row in outcomes if row["outcome"] == "skipped"}
    if skipped:
        lines += ["", "Not run:", "", *sorted(skipped)]
    return "\n".join(lines) + "\n"


def page(text: str, outcomes: Sequence[Row]) -> str:
    """A page with its rendered part made anew."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{tables(outcomes)}\n{_END}{after}"


def merged(earlier: Iterable[Row], now: Iterable[Row]) -> list[Row]:
    """Rows of now in place of the same ones earlier; runs that the suite no longer has are dropped."""
    rows = {tuple(row[key] for key in _KEY): row for row in [*earlier, *now]}
    planned = [tuple(run) for run in (*DECODING, *FORWARDS, *PARSING, *CONTROLS)]
    return [rows[key] for key in planned if key in rows]


def stale(rows: Iterable[Row]) -> list[str]:
    """What of these outcomes the docs may not say, a sentence each; empty where all of it holds."""
    rows = list(rows)
    known = {tuple(row[key] for key in _KEY) for row in rows}
    missing = [run.name for run in (*DECODING, *FORWARDS, *PARSING, *CONTROLS) if tuple(run) not in known]
    failed = [_name(row) for row in rows if row["outcome"] not in ("passed", "skipped")]
    old = sorted({row["client"] for row in rows if row["lists"] != lists_id(row["client"])})
    return [
        *(f"{name} was never run." for name in missing),
        *(f"{name} failed." for name in failed),
        *(f"Outcomes of {name} are from before its lists of packages changed." for name in old),
    ]


def _name(row: Row) -> str:
    return "-".join(str(row[key]) for key in _KEY if row[key] is not None)


def _cell(row: Row) -> str:
    if row["outcome"] == "skipped":
        return "not run"
    if row["outcome"] != "passed":
        return "**fails**"
    if "rounds" in row:
        return f"{row['their_rounds']} / {row['rounds']} rounds"
    return f"equal to {row['difference']:.0e}" if "difference" in row else "read"


def _loss(row: Row) -> list[str]:
    if row["outcome"] != "passed":
        return ["", "", "not run" if row["outcome"] == "skipped" else "**fails**"]
    share = 1 - row["rounds"] / row["their_rounds"]
    return [str(row["rounds"]), str(row["their_rounds"]), f"{share:.0%}"]


def _by_case(row: Row) -> int:
    return [run.case for run in (*DECODING, *FORWARDS, *PARSING)].index(row["case"])


def _by_control(row: Row) -> tuple[int, str, str]:
    return list(_CONTROLS).index(row["control"]), row["label"], row["client"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(path: str) -> None:
    """Take outcomes over and render."""
    earlier = json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.is_file() else []
    rows = merged(earlier, json.loads(Path(path).read_text(encoding="utf-8")))
    wrong = stale(rows)
    if wrong:
        sys.exit(f"{' '.join(wrong)} Run the suite again (bash scripts/conformance.sh); the docs stay as they are.")
    OUTCOMES.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    print(f"{len(rows)} outcomes: {OUTCOMES}, {PAGE}")


if __name__ == "__main__":
    main(sys.argv[1])
