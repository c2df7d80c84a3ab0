"""Whose features a cache holds, and whether they are those that a run asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from deepspec import __version__
from deepspec.config import TargetConfig
from deepspec.data.cache_format import ENCODINGS, Encoding, raw_bytes
from deepspec.errors import DataError
from deepspec.files import hash_file
from deepspec.targets.base import Target
from deepspec.targets.loading import text_body

MANIFEST = "manifest.json"
# Version 1 knew a target by its head alone, which its fine-tuned relatives share.
_FORMAT, _VERSION = "deepspec-features", 2
# What a cache and its user must agree on; the rest of the manifest says where it comes from.
# The hash comes last: it differs wherever another of them does, and says less.
IDENTITY = ("layer_ids", "hidden_size", "vocab_size", "target_dtype", "head_hash")
_ELSEWHERE = "or write another cache (features.cache=<folder>; cache=<folder> for `deepspec data regenerate`)."
_FIXES = {
    "layer_ids": f"Set target.layers to the first, {_ELSEWHERE}",
    "target_dtype": f"Set target.dtype to the first, {_ELSEWHERE}",
    "encoding": f"Set features.encoding (cache_encoding for `deepspec data regenerate`) to the first, {_ELSEWHERE}",
}


def manifest_of(target: Target, config: TargetConfig, encoding: Encoding, answers: Path | None) -> dict[str, Any]:
    """Say whose features a cache holds, and how they are stored.

    Args:
        target: the target, tapped as it will be.
        config: chat options of the target.
        encoding: of the features.
        answers: the file whose samples are cached, None where they are being generated.
    """
    vocabulary = json.dumps(sorted(target.tokenizer.get_vocab().items()))
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "encoding": encoding,
        "target": target.name,
        "revision": config.revision or getattr(target.model.config, "_commit_hash", None),
        **identity_of(target),
        "tokenizer_hash": _short_hash(vocabulary),
        "template_hash": _short_hash(str(target.tokenizer.chat_template or "")),
        "enable_thinking": config.enable_thinking,
        "system_prompt": config.system_prompt,
        "answers": None if answers is None else str(answers),
        "answers_hash": None if answers is None else hash_file(answers),
        "deepspec": __version__,
    }


def identity_of(target: Target) -> dict[str, Any]:
    """What features and a target must agree on. Its own numbers tell targets apart better than names do."""
    return {
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "layer_ids": list(target.layer_ids),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "head_hash": head_hash(target),
    }


def head_hash(target: Target) -> str:
    """Hash of the weights of a target's head and of its first layer: what a target without its layers holds as well.

    The head alone would not tell a fine-tuned target whose head was frozen from the one it was made of.
    """
    first = text_body(target.model, target.name).layers[0]
    digest = xxhash.xxh3_128()
    for weight in (target.head.weight, *first.parameters()):
        for part in torch.split(weight.detach().flatten(), 2**26):
            digest.update(raw_bytes(part.cpu()))
    return digest.hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a cache of ours.

    Raises:
        DataError: there is none, or it is damaged or of another kind.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(
            f"{folder} is no feature cache: it has no {MANIFEST}. Write one with `deepspec data cache` and the words "
            "of the training, or name it with features.cache=<folder>."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        kind = manifest["format"], manifest["version"]
        missing = [key for key in (*IDENTITY, "encoding", "target") if key not in manifest]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged or of another kind ({error!r}). Write the cache anew, into another folder."
        ) from error
    if kind != (_FORMAT, _VERSION) or missing or manifest["encoding"] not in ENCODINGS:
        raise DataError(
            f"{path} describes {kind[0]!r} version {kind[1]!r} (encoding {manifest.get('encoding')!r}, "
            f"{', '.join(missing) or 'nothing'} missing); this program reads {_FORMAT!r} version {_VERSION}. Write the "
            "cache anew."
        )
    return dict(manifest)


def check_identity(folder: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Refuse a cache that does not fit a run.

    Raises:
        DataError: with both values and a way out.
    """
    for key in keys:
        if stored.get(key) != wanted[key]:
            fix = _FIXES.get(key, "Use the target that the cache was written with, or write another cache.")
            name = {"head_hash": "weights (by hash)", "layer_ids": "layers"}.get(key, key)
            raise DataError(
                f"cache {folder} was written with {name} {stored.get(key)} of {stored.get('target')!r}, but this run "
                f"asks for {wanted[key]}. {fix}"
            )


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
