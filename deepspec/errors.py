"""Errors a user can act on: each says what is wrong, shows both values and names a way out."""

from __future__ import annotations

from typing import ClassVar


class DeepSpecError(Exception):
    """Base of every error that an entry point prints as one line before it exits with `exit_status`."""

    exit_status: ClassVar[int] = 2


class ConfigError(DeepSpecError):
    """A setting is unknown, malformed or contradicts another."""


class DataError(DeepSpecError):
    """A prompt, answer or mask cannot be used as it is."""


class CheckpointError(DeepSpecError):
    """A draft checkpoint or a training state is missing, damaged or of another kind."""


class EngineError(DeepSpecError):
    """A serving engine of another environment failed, or said nothing for too long."""


class TargetError(DeepSpecError):
    """A target model cannot be loaded, or cannot serve as a target for this run."""
