"""Words of a command line on their way to Hydra: folders of sweeps have '=' in their names, which its grammar refuses.

It knows no key and no configuration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from deepspec.errors import ConfigError

# An item of a value that has '=' and '/' and nothing that Hydra would read as structure: Hydra refuses it unquoted.
_PATH_WITH_EQUALS = re.compile(r"(?<=[=\[,])(?=[^,\[\]]*/)[^\s=,\[\](){}$:|\\]+=[^\s,\[\](){}$:|\\]*(?=[,\]]|\Z)")


def expand_home(words: Sequence[str]) -> list[str]:
    """Return overrides with `~/` at the start of values expanded: shells leave it alone there, Hydra cannot read it.

    Raises:
        ConfigError: nobody knows the home folder.
    """
    home = os.path.expanduser("~/")
    if home == "~/":
        raise ConfigError(
            "the home folder is not known: HOME is not set, and this machine lists no such user. Set HOME."
        )
    return [_quote_paths(re.sub(r"(?<=[=\[,])~/", lambda _: home, word)) for word in words]


def quoted(value: Path | str) -> str:
    """Return a path as an override value: folders may have spaces, commas and brackets in their names."""
    # Hydra reads a backslash as itself, but not before a quote.
    inside = re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), str(value))
    return f"'{inside}'"


def is_value(word: str) -> bool:
    """Whether a word is a value without its key: it has no '=', or only as a part of a path."""
    key, is_joined, _ = word.partition("=")
    return not is_joined or "/" in key or Path(word).expanduser().exists()


def first_as(key: str, words: Sequence[str]) -> list[str]:
    """Return the words with `key` in front of the first one where that is a value."""
    if not words or not is_value(words[0]):
        return list(words)
    return [f"{key}={words[0]}" if words[0].isidentifier() else f"{key}={quoted(words[0])}", *words[1:]]


def _quote_paths(word: str) -> str:
    """Quote the paths in a word that Hydra could not read; a word with quotes is left as it was written."""
    if "'" in word or '"' in word:
        return word
    return _PATH_WITH_EQUALS.sub(lambda found: quoted(found[0]), word)
