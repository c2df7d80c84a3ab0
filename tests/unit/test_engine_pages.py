"""The docs say of engines what the conformance suite found, and the suite can be installed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conformance import environments
from conformance.plan import CONTROLS, DECODING, FORWARDS, PARSING
from conformance.render import OUTCOMES, PAGE, main, merged, page, stale, tables

PLANNED = [*DECODING, *FORWARDS, *PARSING, *CONTROLS]


def test_the_page_is_the_rendering_of_the_recorded_outcomes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, json.loads(OUTCOMES.read_text(encoding="utf-8"))) == text


def test_every_run_of_the_suite_has_an_outcome_and_none_failed() -> None:
    rows = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    assert [_key(row) for row in rows] == [tuple(run) for run in PLANNED]
    assert {row["outcome"] for row in rows} <= {"passed", "skipped"}
    assert all(row["reason"] for row in rows if row["outcome"] == "skipped")
    assert stale(rows) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"outcome": "failed"}, "eagle3-vllm-vllm failed."),
        ({"lists": "earlier"}, "Outcomes of vllm are from before its lists of packages changed."),
    ],
)
def test_outcomes_that_no_longer_hold_are_not_rendered(change: dict[str, str], words: str, tmp_path: Path) -> None:
    rows = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    (index,) = [place for place, row in enumerate(rows) if _key(row) == ("eagle3", "vllm", "vllm", None)]
    file, before = tmp_path / "outcomes.json", (OUTCOMES.read_bytes(), PAGE.read_bytes())
    file.write_text(json.dumps([rows[index] | change]))
    with pytest.raises(SystemExit, match=re.escape(words)):
        main(str(file))
    assert (OUTCOMES.read_bytes(), PAGE.read_bytes()) == before
    assert stale(rows[:index] + rows[index + 1 :]) == ["eagle3-vllm-vllm was never run."]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["case"], row["client"], row["form"], row["control"]


def test_a_part_of_the_suite_replaces_only_its_own_rows() -> None:
    rows = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    now = [{**rows[3], "outcome": "skipped", "reason": "no such machine"}, {**rows[4], "case": "gone"}]
    found = merged(rows, now)
    assert found == [*rows[:3], now[0], *rows[4:]]
    assert "- vllm: no such machine" in tables(found)


def test_every_client_of_the_suite_has_requirement_lists() -> None:
    assert {run.client for run in PLANNED} == {*environments.clients(), "transformers"}


def test_a_client_that_is_not_installed_is_named_with_what_to_do(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("DEEPSPEC_DFLASH_PYTHON", raising=False)
    with pytest.raises(environments.UnavailableError, match=r"not built; run: bash scripts/conformance\.sh"):
        environments.find("dflash")
    monkeypatch.setenv("DEEPSPEC_DFLASH_PYTHON", "/nowhere/python")
    with pytest.raises(environments.UnavailableError, match="names /nowhere/python, which is no file"):
        environments.find("dflash")
