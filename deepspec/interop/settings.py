"""What `deepspec export` is asked. Values are in config/export.yaml; this module imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from pydantic import field_validator, model_validator
from typing_extensions import Self

from deepspec.config import TargetConfig, compose_job
from deepspec.config_base import Count, FilePath, Settings
from deepspec.errors import ConfigError
from deepspec.overrides import is_value, quoted

_FLAGS = {"--format": "format", "--target": "target", "--output_dir": "output_dir", "--push_to": "push_to"}
_SWITCHES = {"--verify": "verify=true", "--own": "vocabulary=own"}


class ExportConfig(Settings):
    """One export.

    Attributes:
        draft: folder or hub id.
        format: whose format is written.
        target: the draft's target; loaded for `verify` only.
        output_dir: folder to make; None names it by draft and format.
        vocabulary: whether copies of the target's embedding and head are written even where an engine has its own.
        dtype: of the weights, None keeps theirs.
        allow_untrained: write a draft whose norms are exactly 1.
        verify: load the export again and compare rounds of decoding.
        verify_tokens: length of the answers compared.
        results: results.json for the model card.
        calibration: SGLang's temperatures, None takes what lies beside the draft.
        cost: cost curve of the serving machine.
        cost_context: which of its lines.
        push_to: hub id to upload to.
        private: whether the repository made for that is private.
        device: of the check.
    """

    draft: str
    format: Literal["deepspec", "zlab", "specforge", "vllm", "sglang", "speculators"]
    target: TargetConfig
    output_dir: FilePath | None = None
    vocabulary: Literal["shared", "own"]
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    allow_untrained: bool
    verify: bool
    verify_tokens: Count
    results: FilePath | None = None
    calibration: FilePath | None = None
    cost: FilePath | None = None
    cost_context: Count | None = None
    push_to: str | None = None
    private: bool
    device: Literal["auto", "cpu", "cuda"]

    @field_validator("draft")
    @classmethod
    def _expand_home(cls, draft: str) -> str:
        return os.path.expanduser(draft)

    @model_validator(mode="after")
    def _tables_have_a_reader(self) -> Self:
        for name in ("calibration", "cost"):
            if getattr(self, name) is not None and self.format != "sglang":
                raise ValueError(
                    f"{name} is given, but format '{self.format}' has no reader for it; SGLang has. Use format=sglang."
                )
        return self


def compose_export(words: Sequence[str]) -> ExportConfig:
    """Compose and check an export from words such as `FOLDER format=vllm` or `FOLDER --format vllm --verify`.

    Raises:
        ConfigError: a key, choice, value or combination is not possible.
    """
    return compose_job("export", ExportConfig, _as_overrides(words))


def _as_overrides(words: Sequence[str]) -> list[str]:
    """Options in the habit of other tools, as overrides; a word without a key is the draft."""
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option, is_joined, value = word.partition("=")
        if word in _SWITCHES:
            overrides.append(_SWITCHES[word])
        elif option in _FLAGS:
            if not is_joined and not rest:
                raise ConfigError(f"{word} needs a value, as in {word} <value> or {_FLAGS[option]}=<value>.")
            overrides.append(f"{_FLAGS[option]}={value if is_joined else rest.pop(0)}")
        elif word.startswith("--"):
            known = ", ".join([*_FLAGS, *_SWITCHES])
            raise ConfigError(
                f"{word}: there is no such option. Options: {known}; or key=value, as in config/export.yaml."
            )
        elif is_value(word):
            overrides.append(f"draft={quoted(word)}")
        else:
            overrides.append(word)
    return overrides
