"""What an evaluation shows: the end of its output, and its page in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chat_targets import target_overrides
from eval_places import Place

from deepspec.config import config_folder
from deepspec.evaluation.evaluator import evaluate
from deepspec.scheduling.cost import CostCurve, write_curve

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("page"))


def check_last_lines(output: str, folder: Path) -> None:
    """A line to quote for every draft, then where results and page lie; nothing behind them."""
    *_, first, second, last = output.rstrip().splitlines()
    for line, draft in ((first, "sure"), (second, "plain")):
        # Seven prompts of two domains, one of them with a single prompt: no interval.
        quoted = rf"{draft}: tau \d\.\d\d \(accepted \d\.\d\d \+ 1\) tokens per target pass[,;].* 7 prompts, \d+ rounds"
        assert re.match(quoted, line), line
    assert last == f"results: {folder}/results.json   page: {folder}/report.html"


def test_an_evaluation_ends_with_the_lines_to_quote_and_where_the_page_lies(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A path of any length stays on one line.
    folder = tmp_path / ("long" * 30)
    evaluate(place.words("latency_prompts=0", "max_new_tokens=4", output=folder))
    check_last_lines(capsys.readouterr().out, folder)


@pytest.mark.slow
def test_eval_sh_ends_with_the_lines_to_quote_and_where_the_page_lies(place: Place, tmp_path: Path) -> None:
    flags = ["--target_name_or_path", str(place.target), "--draft_name_or_path", ",".join(place.drafts)]
    words = [
        *target_overrides(place.target)[2:],
        f"task.path={place.folder}/prompts.jsonl",
        f"output_dir={tmp_path}/out",
    ]
    command = ["bash", str(config_folder().parent / "scripts" / "eval" / "eval.sh"), *flags, *words]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    finished = subprocess.run(
        [*command, "max_new_tokens=20", "latency_prompts=2", "device=cpu"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PATH": path},
    )
    assert finished.returncode == 0, finished.stderr
    check_last_lines(finished.stdout, tmp_path / "out")
    assert (tmp_path / "out" / "report.html").is_file()


def check_page(page: Path, words: list[str], folder: Path) -> None:
    """Draw a page: no error, no tag lost, all words there."""
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr",
        "--virtual-time-budget=1000",
        "--window-size=1200,6000",
    ]
    dumped = subprocess.run([*command, "--dump-dom", f"file://{page}"], capture_output=True, text=True, timeout=120)
    assert dumped.returncode == 0, dumped.stderr
    assert "CONSOLE" not in dumped.stderr, "the page's own policy or style gave an error"
    # What the parser made of the page is what was written: nothing was moved, closed or dropped.
    for tag in ("svg", "table", "tr", "td", "polyline", "rect", "details", "span"):
        opening = re.compile(rf"<{tag}[ >]")
        assert len(opening.findall(dumped.stdout)) == len(opening.findall(page.read_text())), tag
    for word in words:
        assert word in dumped.stdout, word
    picture = folder / "page.png"
    shot = subprocess.run(
        [*command, f"--screenshot={picture}", f"file://{page}"], capture_output=True, text=True, timeout=120
    )
    assert shot.returncode == 0, shot.stderr
    assert picture.stat().st_size > 100_000, "an empty page of this size has a few thousand bytes"


@pytest.mark.slow
@needs_browser
def test_a_browser_draws_every_part_of_the_page_and_reports_no_error(tmp_path: Path) -> None:
    place = Place(tmp_path)
    log = [{"step": step, "loss": 3.0 / step, "eval/acceptance_length": 1.0 + step / 10} for step in range(1, 9)]
    (tmp_path / "sure" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    evaluate(place.words("temperatures=[0,1]", "latency_lengths=[1,2]", "max_new_tokens=60", output=tmp_path / "out"))
    parts = [
        "By domain",
        "Drafts compared",
        "Acceptance per position",
        "Length of the block",
        "Where the time goes",
        "acceptance length during training",
        "refused draft token",
        "How this was made",
    ]
    check_page(tmp_path / "out" / "report.html", parts, tmp_path)


@pytest.mark.slow
@needs_browser
def test_a_browser_draws_schedules_under_load(place: Place, tmp_path: Path) -> None:
    points = tuple(range(1, 40))
    curve = CostCurve(points, (0,), (tuple(1000 / (9 + n) for n in points),), (1, 8), (0.002, 0.004))
    write_curve(tmp_path / "curve.json", curve, {})
    load = [f"load.curve={tmp_path}/curve.json", "load.batches=[1,4]", "load.simulated=[16]", "load.max_new_tokens=8"]
    evaluate(place.words("latency_prompts=0", *load, output=tmp_path / "out", drafts=place.drafts[:1]))
    parts = ["Schedules under load", "Gain of the throughput schedule", "Gain, measured", "Gain, simulated"]
    check_page(tmp_path / "out" / "report.html", parts, tmp_path)
