"""The shape of the code base: what may know what, read from the source text."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from deepspec.config import config_folder

ROOT = config_folder().parent
SOURCES = sorted((ROOT / "deepspec").rglob("*.py"))
MAINS = [ROOT / "train.py", ROOT / "eval.py"]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> set[str]:
    """Full names of everything that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_no_module_is_longer_than_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_nothing_prints_but_the_console(path: Path) -> None:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    assert not any(isinstance(function, ast.Name) and function.id == "print" for function in calls)


@pytest.mark.parametrize("stage", ["training", "decoding", "evaluation"])
def test_training_decoding_and_evaluation_know_no_single_algorithm_or_family(stage: str) -> None:
    algorithms = {path.stem for path in (ROOT / "config" / "algorithm").glob("*.yaml")}
    families = {"qwen3", "llama", "gemma4", "embedded"}
    forbidden = {f"deepspec.algorithms.{name}" for name in algorithms} | {
        f"deepspec.targets.{name}" for name in families
    }
    for path in (ROOT / "deepspec" / stage).glob("*.py"):
        assert not forbidden & imported(path), named(path)


def test_only_the_configuration_and_the_entry_points_know_hydra() -> None:
    knowing = {named(path) for path in [*SOURCES, *MAINS] if any(n.split(".")[0] == "hydra" for n in imported(path))}
    assert knowing == {"deepspec/config.py", "deepspec/command.py", "train.py", "eval.py"}


def test_the_wheel_holds_every_file_that_is_not_python() -> None:
    others = {path.suffix for path in (ROOT / "deepspec").rglob("*") if path.is_file() and path.suffix != ".py"}
    assert others - {".pyc"} == {".j2"}
    assert 'deepspec = ["**/*.j2"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
