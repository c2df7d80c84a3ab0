"""A process that helps the one that started it to decode an evaluation; it writes no results."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from deepspec import console
from deepspec.config import EvalConfig
from deepspec.errors import DeepSpecError
from deepspec.evaluation.crew import join_crew
from deepspec.evaluation.evaluator import measure_all


def _follow(parent: int) -> None:
    """End soon after the parent, even if it was killed with -9: an orphan would keep the folder's journals."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _main(words: list[str]) -> int:
    path, port, rank, parent = Path(words[0]), int(words[1]), int(words[2]), int(words[3])
    _follow(parent)
    console.set_quiet(True)
    config = EvalConfig.model_validate_json(path.read_text(encoding="utf-8"))
    try:
        measure_all(config, join_crew(port, rank, config.num_processes))
    except DeepSpecError as error:
        console.error(f"process {rank}: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
