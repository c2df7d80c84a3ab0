"""Answers given as text, and jobs that tokenise them in processes of their own, some of which are killed."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from chat_targets import READING, ascii_tokenizer
from fault_jobs import Operations
from transformers import PreTrainedTokenizerFast

from deepspec.data import kept_samples, samples
from deepspec.data.answer_rows import SampleMaker
from deepspec.data.row_workers import row_outcomes
from deepspec.data.samples import read_token_samples


def text_row(number: int, draw: random.Random) -> dict[str, Any]:
    """A conversation of one to three turns."""
    messages = []
    for _ in range(draw.randint(1, 3)):
        for role in ("user", "assistant"):
            messages.append({"role": role, "content": "".join(draw.choices("abc de?", k=draw.randint(1, 60))) + "."})
    return {"id": f"row {number}", "messages": messages}


def write_texts(path: Path, count: int, seed: int = 0) -> Path:
    draw = random.Random(seed)
    path.write_text("".join(json.dumps(text_row(number, draw)) + "\n" for number in range(count)), encoding="utf-8")
    return path


def maker_of(path: Path, tokenizer: PreTrainedTokenizerFast | None = None, **changed: Any) -> SampleMaker:
    """How rows become samples where nothing else is said."""
    return SampleMaker(path, tokenizer or ascii_tokenizer(), READING, False, None, None, None)._replace(**changed)


def read_kept(path: Path, cache: Path, kill_at: int = 0, counted: Path | None = None) -> None:
    """Read answers as a training does, and die before a given change of the folder of kept samples.

    Files that were not flushed to the disk by then are cut, as a power failure may. How many changes there were, and
    how often the rows were tokenised, is left in a file.
    """
    makings = []
    work = samples.row_outcomes

    def row_outcomes(*given: Any) -> Any:
        makings.append(given)
        return work(*given)

    samples.row_outcomes = row_outcomes
    os.environ["DEEPSPEC_CACHE"] = str(cache)
    kept_samples.KEPT_FROM_BYTES = 0
    operations = Operations(cache, kill_at, loses_unsynced=True)
    read_token_samples(path, ascii_tokenizer(), READING, enable_thinking=False, system_prompt=None, is_kept=True)
    if counted is not None:
        counted.write_text(f"{operations.count} {len(makings)}")


def read_by_processes(path: Path) -> None:
    """Tokenise a file by two processes, one row after the other."""
    for _ in row_outcomes(maker_of(path), 2, rows_alone=0):
        pass
