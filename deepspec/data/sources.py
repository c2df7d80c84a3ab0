"""Where prompts come from: a file, a folder of files, or a data set on the hub, as one stream of rows.

Nothing is held but the row at hand. Knows no tokens, and nothing of what is done with the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from deepspec import console
from deepspec.config import DataJobConfig, DatasetConfig
from deepspec.data.fields import checked
from deepspec.data.prompt_file import unchanged
from deepspec.data.prompts import SUFFIXES, Row, read_rows
from deepspec.errors import ConfigError, DataError


class PlacedRow(NamedTuple):
    """A row and where it stands.

    Attributes:
        source: file or hub id.
        unit: what `row.number` counts, "line" or "row".
        prefix: put before the row's own id where several files are read, whose ids need not differ.
        row: the row, with its fields renamed as the data set's description says.
    """

    source: str
    unit: str
    prefix: str
    row: Row

    @property
    def place(self) -> str:
        """File and line, for messages."""
        return f"{self.source} {self.unit} {self.row.number}"


def source_files(config: DataJobConfig) -> list[Path]:
    """The job's local files in order, none where it reads from the hub.

    Raises:
        DataError: a folder holds no file of prompts.
    """
    if config.prompts is None:
        return []
    path = Path(config.prompts)
    if not path.is_dir():
        return [path]
    files = _files_inside(path)
    if not files:
        raise DataError(f"{path} holds no {', '.join(SUFFIXES)} file. Give a file, or a folder with such files.")
    # The names that copies of hub repositories have say which split a file is of.
    split = config.dataset.hub_split
    of_split = [file for file in files if split in (file.stem, file.stem.partition("-")[0])]
    return of_split or files


def _files_inside(folder: Path) -> list[Path]:
    inside = [file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
    return sorted(file for file in inside if not any(p.startswith(".") for p in file.relative_to(folder).parts))


def stream_rows(config: DataJobConfig) -> Iterator[PlacedRow]:
    """Yield the rows of all of the job's files, or of its hub data set, one after another.

    Raises:
        DataError: a file is missing, not readable as a whole or being written, or the hub does not give the data set.
        ConfigError: neither a file nor a data set is named.
    """
    dataset, files = config.dataset, source_files(config)
    if not files:
        source = f"{dataset.hub_id} (split {dataset.hub_split})"
        numbered = (Row(number, value) for number, value in enumerate(_hub_values(dataset), start=1))
        for row in checked(numbered, dataset, source):
            yield PlacedRow(dataset.hub_id or "", "row", "", row._replace(value=_renamed(row.value, dataset)))
    root = Path(config.prompts or "")
    others = len(_files_inside(root)) - len(files) if root.is_dir() and files else 0
    if others:
        console.info(f"{root}: {others:,} files of other splits than {dataset.hub_split} are not read")
    for file in files:
        prefix = "" if len(files) == 1 else f"{file.relative_to(root).with_suffix('').as_posix()}/"
        unit = "line" if file.suffix == ".jsonl" else "row"
        with unchanged(file):
            for row in checked(read_rows(file), dataset, str(file)):
                yield PlacedRow(str(file), unit, prefix, row._replace(value=_renamed(row.value, dataset)))


def _hub_values(dataset: DatasetConfig) -> Iterator[object]:
    if dataset.hub_id is None or dataset.hub_split is None:
        raise ConfigError("no prompts are named. Give prompts=<file or folder>, or dataset=<one of config/dataset>.")
    import datasets  # costs seconds, and a local file does without

    repository, _, inside = dataset.hub_id.partition(":")
    split = dataset.hub_split
    try:
        if inside.endswith(SUFFIXES):
            kind = "parquet" if inside.endswith(".parquet") else "json"
            revision = dataset.revision or "main"
            files = {split: f"hf://datasets/{repository}@{revision}/{inside}"}
            rows = datasets.load_dataset(kind, data_files=files, split=split, streaming=True)
        else:
            rows = datasets.load_dataset(
                repository, inside or None, split=split, streaming=True, revision=dataset.revision
            )
        yield from rows
    # Offline, gated, renamed, cut off or damaged: datasets raises a dozen unrelated types.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{dataset.hub_id} (split {split}) cannot be read from the hub: {reason}. Nothing was written. Run the "
            "same command again where the hub can be reached, or give a folder with a copy: prompts=<folder>."
        ) from error


def _renamed(value: object, dataset: DatasetConfig) -> object:
    """Put a data set's own fields under the names that `conversation_from_row` knows."""
    if not isinstance(value, Mapping):
        return value
    row = dict(value)
    if dataset.field is not None and dataset.field in row:
        content = row[dataset.field]
        is_texts = isinstance(content, list) and all(isinstance(one, str) for one in content)
        row["conversations"] = row["messages"] = row["turns"] = row["prompt"] = None
        row["prompt" if isinstance(content, str) else "turns" if is_texts else "messages"] = content
    if dataset.id_field is not None and row.get("id") is None:
        row["id"] = row.get(dataset.id_field)
    if dataset.domain_field is not None and dataset.domain_field in row:
        domain = row[dataset.domain_field]
        row["domain"] = (dataset.domains or {}).get(domain, domain) if isinstance(domain, str) else domain
    elif row.get("domain") is None:
        row["domain"] = dataset.domain
    return row
