"""The page of a real evaluation in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from eval_places import Place

from deepspec.evaluation.evaluator import evaluate

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_a_browser_draws_every_part_of_the_page_and_reports_no_error(tmp_path: Path) -> None:
    place = Place(tmp_path)
    log = [{"step": step, "loss": 3.0 / step, "eval/acceptance_length": 1.0 + step / 10} for step in range(1, 9)]
    (tmp_path / "sure" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    evaluate(place.words("temperatures=[0,1]", "latency_lengths=[1,2]", "max_new_tokens=60", output=tmp_path / "out"))
    page = tmp_path / "out" / "report.html"
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
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
    for words in (
        "By domain",
        "Drafts compared",
        "Acceptance per position",
        "Length of the block",
        "Where the time goes",
        "acceptance length during training",
        "refused draft token",
        "How this was made",
    ):
        assert words in dumped.stdout, words
    picture = tmp_path / "page.png"
    shot = subprocess.run(
        [*command, f"--screenshot={picture}", f"file://{page}"], capture_output=True, text=True, timeout=120
    )
    assert shot.returncode == 0, shot.stderr
    assert picture.stat().st_size > 100_000, "an empty page of this size has a few thousand bytes"
