"""Which fields the rows of a data set have, what they look like, and how to name them: for sets that nobody described.

Names of published fields change, and copies are converted: a wrong one is met before a million rows are counted as
broken, with the setting that reads them. Knows no tokens, and no conversation beyond its shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice

from deepspec.config import DatasetConfig
from deepspec.data.prompts import CONVERSATION_KEYS, Row
from deepspec.errors import DataError

# Rows that are looked at: one broken row says nothing about the others.
_FIRST_ROWS = 100
_MOST_FIELDS = 24
# What published sets call the text that is asked; any other text may be an answer, a name or a hash.
_PROMPT_NAMES = ("instruction", "problem", "question", "query", "input", "user", "text")


def checked(rows: Iterable[Row], dataset: DatasetConfig, source: str) -> Iterator[Row]:
    """Yield the rows of a source, once it is known that one of its first ones has what is to be read.

    Raises:
        DataError: none of them has, with the fields that are there and the setting to read them by.
    """
    rows = iter(rows)
    wanted = CONVERSATION_KEYS if dataset.field is None else (dataset.field,)
    first: list[Row] = []
    objects: list[Mapping[object, object]] = []
    for row in islice(rows, _FIRST_ROWS):
        first.append(row)
        if isinstance(row.value, Mapping) and row.value:
            objects.append(row.value)
            if any(row.value.get(name) is not None for name in wanted):
                return chain(first, rows)
    if objects:
        raise DataError(_wrong_fields(objects, dataset, source))
    return chain(first, rows)


def _wrong_fields(objects: list[Mapping[object, object]], dataset: DatasetConfig, source: str) -> str:
    shown: dict[str, object] = {}
    for value in objects:
        for name, content in value.items():
            if shown.get(str(name)) is None:
                shown[str(name)] = content
    count = f"the first {len(objects):,} rows have" if len(objects) > 1 else "the first row has"
    named = (
        f"none of {', '.join(map(repr, CONVERSATION_KEYS))}"
        if dataset.field is None
        else f"no field {dataset.field!r} (dataset.field)"
    )
    listed = [f"{name!r} ({_shape(content)})" for name, content in list(shown.items())[:_MOST_FIELDS]]
    if len(shown) > _MOST_FIELDS:
        listed.append(f"and {len(shown) - _MOST_FIELDS:,} more")
    ways = _ways_to_read(shown)
    way_out = " ".join(ways) or (
        "None of them looks like a conversation or a prompt: name the one that holds it with dataset.field=<name>."
    )
    return f"{source}: {count} {named}. There are {', '.join(listed)}. {way_out}"


def _ways_to_read(shown: Mapping[str, object]) -> list[str]:
    """What to set for every field that looks like something that can be read, the most telling first."""
    readable: list[tuple[int, str]] = []
    for name, content in shown.items():
        shape = _shape(content)
        if shape.startswith("messages"):
            readable.append((0, f"{name!r} looks like a conversation: set dataset.field={name}."))
        elif shape == "text" and (name in CONVERSATION_KEYS or name.lower() in _PROMPT_NAMES):
            readable.append((1, f"{name!r} looks like one prompt: set dataset.field={name}."))
        elif shape == "a list of texts":
            readable.append((2, f"{name!r} may be the user's turns: set dataset.field={name} if it is."))
    return [text for _, text in sorted(readable, key=lambda entry: entry[0])]


def _shape(content: object) -> str:
    """What a value is, in the words of docs/data.md."""
    if content is None:
        return "null"
    if isinstance(content, str):
        return "text"
    if isinstance(content, (bool, int, float)):
        return "a number"
    if isinstance(content, Mapping):
        return "an object"
    if not isinstance(content, list):
        return type(content).__name__
    if not content:
        return "an empty list"
    if not all(isinstance(one, Mapping) for one in content):
        return "a list of texts" if all(isinstance(one, str) for one in content) else "a list"
    keys = {str(key) for one in content for key, value in one.items() if value is not None}
    for role, text in (("role", "content"), ("from", "value")):
        if {role, text} <= keys:
            return f"messages of {role} and {text}"
    return f"a list of objects with {', '.join(sorted(keys)[:6]) or 'nothing'}"
