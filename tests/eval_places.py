"""A folder with all that an evaluation needs: a saved target, two drafts, prompts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from chat_targets import save_chat_target, target_overrides
from helpers import kind_of_draft

from deepspec.algorithms.checkpoint import save_draft
from deepspec.config import EvalConfig, compose_eval
from deepspec.targets.base import Target

PROMPTS = [
    {"id": "single", "turns": ["hello there"]},
    {"id": "double", "turns": ["what is it?", "and why?"], "domain": "maths"},
    *({"turns": [f"question {index} " + "why " * index]} for index in range(5)),
]


class Place:
    """A folder with a saved target, two drafts and prompts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = save_chat_target(folder / "target")
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
        loaded = Target.load(self.words().target, torch.device("cpu"))
        self.drafts = []
        for run, kind in (("sure", "dspark-vanilla"), ("plain", "dflash-anchor_first")):
            checkpoint = folder / run / "step_3"
            checkpoint.mkdir(parents=True)
            save_draft(kind_of_draft(loaded, kind), checkpoint)
            self.drafts.append(str(checkpoint))

    def words(self, *more: str, output: Path | None = None, drafts: list[str] | None = None) -> EvalConfig:
        chosen = getattr(self, "drafts", []) if drafts is None else drafts
        return compose_eval(
            [
                *target_overrides(self.target),
                f"drafts=[{','.join(chosen)}]",
                f"task.path={self.folder / 'prompts.jsonl'}",
                f"output_dir={output or self.folder / 'out'}",
                "max_new_tokens=20",
                "batch_size=3",
                "latency_prompts=2",
                "device=cpu",
                *more,
            ]
        )
