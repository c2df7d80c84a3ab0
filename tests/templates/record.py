"""Record what public chat templates write for the conversations of the tests.

Usage: PYTHONPATH=tests python tests/templates/record.py FOLDER

FOLDER holds one <family>.jinja for each family, unpacked as the README says. Everything that the mask code asks a
template for is recorded, so this is run again when that changes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from recorded_templates import CONVERSATIONS, FAMILIES, FOLDER, family_tokenizer

from deepspec.data.chat import render_prompt, samples_from_answers
from deepspec.data.chat_template import ChatTemplate
from deepspec.data.prompts import Message
from deepspec.errors import DataError


def record(name: str, source: Path) -> None:
    tokenizer = family_tokenizer(FAMILIES[name])
    tokenizer.chat_template = source.read_text(encoding="utf-8")
    tokenizer.is_recording, tokenizer.renderings = True, {}
    for thinking in (False, True):
        ChatTemplate(tokenizer, thinking, None).reasoning_marks()
        for conversation in CONVERSATIONS.values():
            messages = [Message(turn["role"], turn["content"], turn.get("reasoning_content")) for turn in conversation]
            for end, message in enumerate(messages):
                if message.role == "assistant":
                    render_prompt(tokenizer, messages[:end], enable_thinking=thinking, system_prompt=None)
                    row = {"id": "x", "messages": conversation[: end + 1]}
                    try:
                        samples_from_answers(row, tokenizer, enable_thinking=thinking, system_prompt=None)
                    except DataError as error:
                        print(f"{name}, thinking {thinking}: {error}")
    template_hash = hashlib.sha256(source.read_bytes()).hexdigest()
    recorded = {"source": f"sha256 {template_hash}", "renderings": tokenizer.renderings}
    (FOLDER / f"{name}.json").write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    for family in FAMILIES:
        record(family, Path(sys.argv[1]) / f"{family}.jinja")
