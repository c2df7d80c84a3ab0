"""The documents under docs/worked_examples run, and print what they say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from deepspec.config import config_folder

ROOT = config_folder().parent
DOCUMENTS = sorted((ROOT / "docs" / "worked_examples").glob("*.md"))
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.stem != "README"], ids=lambda path: path.stem)
def test_document_prints_what_it_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = BLOCK.findall(path.read_text(encoding="utf-8"))
    assert [kind for kind, _ in blocks] == ["python", "text"] * (len(blocks) // 2)
    names: dict[str, Any] = {}
    for (_, code), (_, expected) in zip(blocks[::2], blocks[1::2], strict=True):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(path), "exec"), names)
        assert printed.getvalue() == expected


def test_the_list_of_documents_is_complete() -> None:
    listed = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "worked_examples" / "README.md").read_text()))
    assert listed == {path.name for path in DOCUMENTS} - {"README.md"}
