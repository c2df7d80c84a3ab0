"""Every command line of README and docs, word for word as it stands there: it composes, and its launcher takes it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from deepspec.command import check_command_line
from deepspec.config import compose_data_job, compose_eval, compose_job, compose_train, config_folder, expand_home
from deepspec.interop.settings import compose_export
from deepspec.overrides import first_as
from deepspec.planning.settings import compose_plan
from deepspec.scheduling.settings import CalibrateConfig, ProfileConfig, SimulateConfig

ROOT = config_folder().parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What others wrote, and what reads folders instead of composing.
FOREIGN = (
    "pip",
    "python3",
    "python -m",
    "python tests/",
    "export",
    "vllm",
    "sglang",
    "[",
    "bash scripts/quickstart.sh",
    "bash scripts/test.sh",
)
ONLY_FOLDERS = ("deepspec inspect", "deepspec compare")


def commands_of(document: Path) -> list[str]:
    """Commands between ```bash fences, comments left out, continued lines joined, shell variables put in."""
    variables: dict[str, str] = {}
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if re.fullmatch(r"[A-Z]+=\S+", line):
                name, _, value = line.partition("=")
                variables[name] = value
                continue
            line = re.sub(r"\$([A-Z]+)\b", lambda match: variables.get(match[1], match[0]), line)
            if line.strip() and not line.lstrip().startswith("#"):
                found.append(line.strip())
    return found


ALL = [
    pytest.param(command, id=f"{document.stem}: {' '.join(command.split())[:90]}")
    for document in DOCUMENTS
    for command in commands_of(document)
    if not " ".join(command.split()).startswith(FOREIGN) and "sglang" not in command
]
DEEPSPEC: dict[str, Callable[[Sequence[str]], object]] = {
    "plan": compose_plan,
    "doctor": lambda words: compose_plan(words) if words else None,
    "train": compose_train,
    "eval": compose_eval,
    "data cache": compose_train,
    "data verify-cache": compose_train,
    "data": compose_data_job,
    "calibrate": lambda words: compose_job("calibrate", CalibrateConfig, first_as("draft", words)),
    "profile": lambda words: compose_job("profile", ProfileConfig, first_as("target", words)),
    "simulate": lambda words: compose_job("simulate", SimulateConfig, words),
    "export": compose_export,
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def compose_main(script: str, words: Sequence[str]) -> None:
    kind = {"train.py": "train", "eval.py": "eval"}[script]
    check_command_line(kind, expand_home(words))  # type: ignore[arg-type]


def compose_deepspec(words: list[str]) -> None:
    two = " ".join(words[:2])
    name, rest = (two, words[2:]) if two in DEEPSPEC else (words[0], words[2:] if words[0] == "data" else words[1:])
    DEEPSPEC[name](rest)


def compose_script(words: list[str], folder: Path) -> None:
    """The script itself, told to show the run instead of starting it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(ROOT / words[0]), *map(os.path.expanduser, words[1:]), "--cfg", "job"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == 0, done.stderr


def compose_array(words: list[str], variables: dict[str, str], folder: Path) -> None:
    """Each task of a SLURM array, as array.sh puts it together."""
    (array,) = (word.removeprefix("--array=") for word in words if word.startswith("--array="))
    last = int(re.fullmatch(r"0-(\d+)(%\d+)?", array)[1])  # type: ignore[index]
    script = next(index for index, word in enumerate(words) if word.endswith(".sh"))
    (folder / "scripts" / "train").mkdir(parents=True)
    (folder / "train.py").touch()
    (folder / "scripts" / "train" / "train.sh").write_text('printf "%s\\n" "$@" >"$DEEPSPEC_CHECKOUT/words"\n')
    for task, expected in ((0, 0), (last, 0), (last + 1, 2)):
        environment = {**os.environ, **variables, "DEEPSPEC_CHECKOUT": str(folder), "SLURM_ARRAY_TASK_ID": str(task)}
        command = ["bash", str(ROOT / words[script]), *words[script + 1 :]]
        done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=30)
        assert done.returncode == expected  # one task more would be one too many
        if expected == 0:
            compose_main("train.py", (folder / "words").read_text().splitlines())


@pytest.mark.parametrize("command", ALL)
def test_a_documented_command_composes(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command, comments=True)
    variables = {}
    while re.match(r"[A-Z]+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    # A document that only shows some keys of a run writes dots for the rest.
    words = ["experiment=dspark_qwen3_4b" if word == "..." else word for word in words]
    if " ".join(words[:2]) in ONLY_FOLDERS:
        assert all(re.fullmatch(r"[^=]+|(output|allow_different)=\S+", word) for word in words[2:])
    elif words[0] == "srun":
        start = words.index("python")
        compose_main(words[start + 1], words[start + 2 :])
    elif words[0] == "torchrun":
        given = get_args_parser().parse_args(words[1:])
        monkeypatch.setenv("WORLD_SIZE", str(int(given.nnodes.split(":")[-1]) * int(given.nproc_per_node)))
        compose_main(given.training_script, given.training_script_args)
    elif words[:2] == ["accelerate", "launch"]:
        given = launch_command_parser().parse_args(words[2:])
        monkeypatch.setenv("WORLD_SIZE", str(given.num_processes))
        compose_main(given.training_script, given.training_script_args)
    elif words[0] == "sbatch":
        compose_array(words, variables, tmp_path)
    elif words[0] == "bash":
        compose_script(words[1:], tmp_path)
    elif words[0] == "deepspec":
        compose_deepspec(words[1:])
    else:
        assert words[0] == "python"
        compose_main(words[1], words[2:])


def test_the_documents_of_clusters_and_sweeps_hold_commands_of_every_launcher() -> None:
    shown = {command.split()[0] for document in DOCUMENTS for command in commands_of(document)}
    assert {"python", "torchrun", "accelerate", "srun", "sbatch", "bash", "deepspec"} <= shown
