"""What every driver shares: jobs come as a JSON file, and each leaves one JSON line on stdout.

Drivers run in the environment of a client and import nothing of this project.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]


def serve(run: Callable[[Job], dict[str, Any]]) -> None:
    """Run every job of the file that the command line names; one that fails leaves its error and the next one runs."""
    # Clients print what they like: only answers go to the real stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        line: dict[str, Any] = {"job": job["name"]}
        try:
            line["result"] = run(job)
        except Exception as error:  # whatever a client raises is the outcome
            traceback.print_exc()
            line["error"] = f"{type(error).__name__}: {error}"
        answers.write(json.dumps(line) + "\n")
        answers.flush()
