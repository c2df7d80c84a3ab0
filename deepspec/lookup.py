"""From a name to the file of that name: what exists in a folder, which name was probably meant, how to import it.

An algorithm `dspark` is deepspec/algorithms/dspark.py, a model family `qwen3` is deepspec/targets/qwen3.py. There is no
registry: adding a file adds the name. This module knows nothing of what the files contain.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType

from deepspec.errors import ConfigError

# Modules that the named ones build upon: they live in the same folders, but nobody chooses them.
SHARED_MODULES = frozenset(
    {
        "base",
        "backbone",
        "checkpoint",
        "heads",
        "initial",
        "embedded",
        "facts",
        "family",
        "head",
        "head_only",
        "loading",
    }
)


def available(folder_package: str) -> tuple[str, ...]:
    """Return the names that can be chosen in one folder of the package, sorted.

    Args:
        folder_package: folder below deepspec/, such as `algorithms`.
    """
    package = importlib.import_module(f"deepspec.{folder_package}")
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(sorted(name for name in names if name not in SHARED_MODULES and not name.startswith("_")))


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the choice that resembles the word most, or an empty text if none does."""
    by_lower = {choice.lower(): choice for choice in sorted(choices)}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean '{by_lower[matches[0]]}'?" if matches else ""


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> ConfigError:
    """Return the error for a name that does not exist: what was asked for, what there is, what was probably meant."""
    names = sorted(choices)
    listed = ", ".join(names) if names else "none"
    return ConfigError(f"{kind} '{name}' does not exist. Available: {listed}.{nearest(name, names)}")


def load_module(package: str, name: str, kind: str) -> ModuleType:
    """Import deepspec.<package>.<name>.

    The name may come from a downloaded checkpoint, so it is compared with the folder's contents before any import.

    Args:
        package: folder below deepspec/, such as `algorithms`.
        name: the module's name.
        kind: what the folder holds, in the singular, for the error message.

    Raises:
        ConfigError: there is no such module.
    """
    names = available(package)
    if name not in names:
        raise unknown_name(kind, name, names)
    return importlib.import_module(f"deepspec.{package}.{name}")
