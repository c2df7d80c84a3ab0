"""Results file, tables and page, on invented numbers of a realistic size."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from deepspec.decoding.rounds import Round
from deepspec.errors import DataError
from deepspec.evaluation import statistics
from deepspec.evaluation.charts import nice_ticks
from deepspec.evaluation.details import Details, LengthRow, Measured, make_details
from deepspec.evaluation.report import (
    AUTOREGRESSIVE,
    ResultRow,
    check_speedup_bound,
    common_ending,
    describe_conditions,
    markdown_table,
    read_results,
    render_table,
    row_flags,
    sort_rows,
    write_results,
)
from deepspec.evaluation.report_html import Example, ReportInput, RoundsKey, write_report
from deepspec.evaluation.round_table import Rounds, as_table

K = 7
DRAFTS = {
    "dspark_block7_smollm2_135m": ("dspark", 0.52, 0.99, 0.0055),
    "dflash_block7_smollm2_135m": ("dflash", 0.50, 0.80, 0.0045),
    "eagle3_block7_smollm2_135m": ("eagle3", 0.54, 1.0, 0.0116),
}
TASKS = {"held_out_chat": ("chat", -0.12), "held_out_maths": ("maths", 0.08), "humaneval": ("code", -0.03)}
PROVENANCE: dict[str, Any] = {
    "target": {
        "name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "dtype": "bfloat16",
        "layers": [1, 8, 14, 20, 27],
    },
    "batch_size": 16,
    "sampling": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "seed": 0,
    "git": {"commit": "0123abc", "is_dirty": False},
    "prompts_sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
}


def plain_row(task: str, temperature: float) -> ResultRow:
    return ResultRow(
        task=task,
        draft=AUTOREGRESSIVE,
        algorithm=AUTOREGRESSIVE,
        domain=TASKS[task][0],
        temperature=temperature,
        num_prompts=24,
        rounds=2304,
        acceptance_length=1.0,
        acceptance_length_ci95=None,
        survival=(),
        conditional_acceptance=(),
        acceptance_rate=None,
        tokens_per_second=36.9,
        seconds_draft_per_round=0.0,
        seconds_verify_per_round=0.0268,
        seconds_per_token=0.0271,
        speedup_over_autoregressive=1.0,
    )


def realistic(temperatures: tuple[float, ...] = (0.0,)) -> ReportInput:
    """A whole report, its rows computed from simulated rounds."""
    generator = random.Random(0)
    rows: list[ResultRow] = []
    rounds_by: dict[RoundsKey, Rounds] = {}
    measured: dict[float, list[Measured]] = {}
    for task, (domain, shift) in TASKS.items():
        for temperature in temperatures:
            for draft, (algorithm, rate, decay, seconds) in DRAFTS.items():
                rounds = []
                for number in range(24 * 40):
                    accepted = 0
                    while accepted < K and generator.random() < (rate + shift - 0.1 * temperature) * decay**accepted:
                        accepted += 1
                    ended_by = "full" if accepted == K else "reject"
                    rounds.append(
                        Round(
                            f"p{number % 24}", number // 24, 9, K, accepted, ended_by, None, (), 0.0, 0.0, accepted + 1
                        )
                    )
                rounds_by[task, draft, temperature] = rounds
                summary = statistics.summarise(rounds, K)
                tau = summary.acceptance_length or 1.0
                latency = (seconds + 0.032) / tau * 1.015
                domains = {f"p{number}": domain for number in range(24)}
                one = Measured(task, draft, K, as_table(rounds), domains, 0.0271 / latency)
                measured.setdefault(temperature, []).append(one)
                values = summary._asdict()
                del values["accepted_drafts"]
                rows.append(
                    ResultRow(
                        task=task,
                        draft=draft,
                        algorithm=algorithm,
                        domain=domain,
                        temperature=temperature,
                        tokens_per_second=1 / latency,
                        seconds_draft_per_round=seconds,
                        seconds_verify_per_round=0.032,
                        seconds_per_token=latency,
                        overhead_seconds_per_round=0.0006,
                        peak_memory_bytes=2**30,
                        speedup_over_autoregressive=0.0271 / latency,
                        **values,
                    )
                )
            rows.append(plain_row(task, temperature))
    details = Details()
    for temperature, part in measured.items():
        timed = {
            (one.task, one.draft, length): LengthRow(
                task=one.task,
                draft=one.draft,
                temperature=temperature,
                length=length,
                acceptance_length=None,
                measured_acceptance_length=1.5 + 0.1 * length,
                seconds_draft_per_round=0.005,
                seconds_verify_per_round=0.03,
                seconds_per_token=0.02,
                speedup_over_autoregressive=1.3,
            )
            for one in part
            for length in (1, 3)
        }
        details = details.joined(make_details(part, temperature, 0, timed))
    curves = {
        draft: [
            {"step": step, "loss": 2.2 * 0.996**step + 0.9 + generator.gauss(0, 0.08), "eval/acceptance_length": None}
            for step in range(1, 601)
        ]
        for draft in DRAFTS
    }
    words = re.findall(
        r" ?\w+| ?\W", "To find the area, multiply the width by the height: 12 x 7 = 84.\nSo the answer is 84."
    )
    kinds = ("accepted", "accepted", "rejected", "bonus")
    segments = [(word, kinds[index % 4]) for index, word in enumerate(words)]
    examples = [Example(next(iter(DRAFTS)), "What is the area of a 12 by 7 rectangle?", segments, "held_out_maths")]
    commands = [("bash scripts/quickstart.sh preset=long", "Train for hours instead of minutes.")]
    return ReportInput(rows, PROVENANCE, rounds_by, details, curves, examples, next_commands=commands)


class Page(HTMLParser):
    """Counts tags, keeps attributes that could load something, and fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.addresses: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag not in ("meta", "link", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(content: ReportInput, folder: Path) -> tuple[str, Page]:
    text = write_report(folder, content).read_text(encoding="utf-8")
    return text, Page(text)


def shown(rows: list[ResultRow], width: int) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(render_table(rows, PROVENANCE))
    output = console.file
    assert isinstance(output, StringIO)
    return output.getvalue()


def test_written_results_are_read_back_unchanged(tmp_path: Path) -> None:
    rows = list(realistic().rows)
    path = write_results(tmp_path / "new", rows, PROVENANCE)
    results = read_results(path.parent)
    assert results.rows == sort_rows(rows)
    assert results.provenance == json.loads(json.dumps(PROVENANCE))
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    rows = [plain_row("humaneval", 0.0)]
    before = write_results(tmp_path, rows, {}).read_text()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_results(tmp_path, rows, {"loss": float("nan")})
    assert [file.read_text() for file in tmp_path.iterdir()] == [before]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has schema None"),
        ('{"schema": 99}', "has schema 99, this version reads 1"),
        ('{"schema": 1, "rows": [{"task": 3}]}', "row 0: 'task'"),
    ],
)
def test_unreadable_results_are_refused_with_file_and_reason(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        read_results(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_missing_results_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"results\.json does not exist"):
        read_results(tmp_path)


def test_plain_decoding_comes_first_in_each_task() -> None:
    rows = sort_rows(realistic((0.0, 1.0)).rows)
    assert [row.algorithm for row in rows[:4]] == [AUTOREGRESSIVE, "dspark", "dflash", "eagle3"]
    assert [(row.task, row.temperature) for row in rows[::4]] == [(task, t) for task in TASKS for t in (0.0, 1.0)]


def test_speedup_up_to_the_bound_is_silent_and_above_it_is_named() -> None:
    assert check_speedup_bound(8.0, 7) is None
    assert check_speedup_bound(None, 7) is None
    assert "8.01x is above the bound K + 1 = 8" in (check_speedup_bound(8.01, 7) or "")


def test_row_above_the_bound_is_marked_in_every_output(tmp_path: Path) -> None:
    content = realistic()
    rows = [row.model_copy(update={"speedup_over_autoregressive": 9.5}) for row in content.rows[:1]]
    text, _ = page_of(content._replace(rows=rows), tmp_path)
    for output in (shown(rows, 140), markdown_table(rows), text):
        assert "9.50x (!)" in output
        assert "above the bound K + 1 = 8" in output


def test_latency_that_its_parts_do_not_explain_is_flagged() -> None:
    row = realistic().rows[0]
    assert row_flags(row) == []
    slow = row.model_copy(update={"seconds_per_token": 1.2 * (row.seconds_per_token or 0.0)})
    assert "off the measured latency" in row_flags(slow)[0]


def test_title_says_how_the_numbers_were_made() -> None:
    conditions = describe_conditions(realistic().rows, PROVENANCE)
    assert conditions == (
        "target HuggingFaceTB/SmolLM2-135M-Instruct, temperature 0, batch size 16, dtype bfloat16, 24 prompts per task"
    )


@pytest.mark.parametrize("width", [80, 140])
def test_table_shows_every_number_whole_at_any_width(width: int) -> None:
    rows = list(realistic().rows)
    text = shown(rows, width)
    for row in rows:
        assert f"{row.acceptance_length:.2f}" in text
        if row.acceptance_length_ci95 is not None:
            assert "[{:.2f},{:.2f}]".format(*row.acceptance_length_ci95) in text
        assert f"{row.speedup_over_autoregressive:.2f}x" in text
    assert "\u2026" not in text
    assert max(len(line) for line in text.splitlines()) <= width


def test_ending_that_all_drafts_share_is_said_once() -> None:
    assert common_ending(list(DRAFTS)) == "_block7_smollm2_135m"
    assert common_ending(["a_4b", "a_4b"]) == ""
    assert common_ending(["_4b", "a_4b"]) == ""
    assert common_ending(["dspark", "dark"]) == ""


def test_untimed_table_has_no_timing_columns() -> None:
    silent = dict.fromkeys(("tokens_per_second", "seconds_per_token", "speedup_over_autoregressive"))
    rows = [row.model_copy(update=silent) for row in realistic().rows]
    assert "tok/s" not in markdown_table(rows)


def test_markdown_table_has_equal_columns_and_escapes_pipes() -> None:
    rows = [row.model_copy(update={"draft": "a|b"}) for row in realistic().rows]
    lines = markdown_table(rows).strip().splitlines()
    assert len(lines) == len(rows) + 2
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {11}


def test_page_is_self_contained_and_shows_every_part(tmp_path: Path) -> None:
    text, page = page_of(realistic((0.0, 1.0)), tmp_path)
    assert page.addresses == ["data:,"]
    assert "script" not in page.tags
    assert "@import" not in text
    assert "url(" not in text
    words = " ".join(page.words)
    for heading in (
        "Results",
        "Acceptance length",
        "By domain",
        "Drafts compared on the same prompts",
        "Acceptance per position",
        "Length of the block",
        "Where the time goes",
        "Training",
        "Examples",
    ):
        assert heading in words
    assert "prompts_sha256" in words
    assert "quickstart.sh preset=long" in words
    assert len(text) < 600_000


def test_every_chart_is_well_formed_with_its_marks_inside_the_picture(tmp_path: Path) -> None:
    text, _ = page_of(realistic((0.0, 1.0)), tmp_path)
    charts = re.findall(r"<svg.*?</svg>", text)
    # tau, domains and their mean, acceptance and survival, tau over K, loss, latency
    assert len(charts) == 6 + 8 + 12 + 2 + 1 + 6
    for chart in charts:
        root = ElementTree.fromstring(chart)
        width, height = (float(part) for part in root.attrib["viewBox"].split()[2:])
        for mark in root.iter():
            xs = [float(mark.attrib[name]) for name in ("x", "x1", "x2", "cx") if name in mark.attrib]
            ys = [float(mark.attrib[name]) for name in ("y", "y1", "y2", "cy") if name in mark.attrib]
            for point in mark.attrib.get("points", "").split():
                x, y = point.split(",")
                xs.append(float(x))
                ys.append(float(y))
            assert all(0 <= x <= width for x in xs)
            assert all(0 <= y <= height for y in ys)


def test_suffix_decay_in_the_rounds_falls_in_the_chart(tmp_path: Path) -> None:
    text, _ = page_of(realistic(), tmp_path)
    chart = next(part for part in re.findall(r"<svg.*?</svg>", text) if "held_out_maths: conditional" in part)
    line = re.search(r'<polyline class="line s1"[^>]*points="([^"]+)"', chart)
    heights = [float(point.split(",")[1]) for point in (line.group(1) if line else "").split()]
    assert heights[3] > heights[2] > heights[1] > heights[0]  # SVG counts downwards


def test_text_of_models_and_users_is_escaped_everywhere(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>&\""
    content = realistic()
    rows = [row.model_copy(update={"draft": evil, "task": evil}) for row in content.rows[:1]]
    segments = [(evil, "accepted"), (evil, evil)]
    rounds = as_table(content.rounds_by["humaneval", next(iter(DRAFTS)), 0.0])
    parts = [Measured(evil, evil, K, rounds, dict.fromkeys(rounds.prompts, evil), None)]
    content = ReportInput(
        rows,
        {evil: evil, "target": evil},
        {(evil, evil, 0.0): rounds},
        make_details(parts, 0.0, 0, {}),
        {evil: [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]},
        [Example(evil, evil, segments, evil)],
        next_commands=[(evil, evil)],
        title=evil,
    )
    text, page = page_of(content, tmp_path)
    assert "<script" not in text
    assert "script" not in page.tags
    assert text.count("&lt;script&gt;") > 15


def test_page_of_a_single_untimed_row_leaves_the_other_parts_out(tmp_path: Path) -> None:
    row = ResultRow(
        task="mine",
        draft="d",
        algorithm="dspark",
        temperature=1.0,
        num_prompts=1,
        rounds=3,
        acceptance_length=1.5,
        acceptance_length_ci95=None,
        survival=(0.5, None),
        conditional_acceptance=(0.5, None),
        acceptance_rate=None,
    )
    words = " ".join(page_of(ReportInput([row], {}), tmp_path)[1].words)
    assert "No provenance was recorded" in words
    for heading in ("Where the time goes", "Training", "Examples", "What to try next"):
        assert heading not in words


def test_page_without_rows_is_still_a_page(tmp_path: Path) -> None:
    assert page_of(ReportInput([], {"seed": 1}), tmp_path)[1].tags["main"] == 1


def test_loss_that_is_not_finite_or_missing_is_left_out_of_the_curve(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"step": step, "loss": 1.0 + step} for step in range(5)]
    lines += [{"step": 5, "loss": float("nan")}, {"step": 6}, {"step": 7, "loss": None}]
    text, _ = page_of(ReportInput([], {}, curves={"d": lines}), tmp_path)
    assert "training loss" in text
    assert re.search(r"\bnan\b", text) is None


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.0, 2.37), (1.0, 600.0), (3.0, 3.0), (-0.02, 0.015), (0.0, 0.0)]
)
def test_ticks_are_few_ascending_and_cover_the_data(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks == sorted(set(ticks))
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 8
