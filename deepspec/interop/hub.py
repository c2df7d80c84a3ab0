"""Drafts on the hub: save, load and push as people know it from transformers; safetensors and JSON, no code."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import HfApi
from typing_extensions import Self

from deepspec.errors import CheckpointError

if TYPE_CHECKING:
    from deepspec.targets.base import Target


class Shareable:
    """The three verbs of a draft. Files are written and read by deepspec.algorithms.checkpoint."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors into a folder, made where it does not exist."""
        from deepspec.algorithms.base import DraftModel
        from deepspec.algorithms.checkpoint import save_draft

        assert isinstance(self, DraftModel)
        path = Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        save_draft(self, path)

    @classmethod
    def from_pretrained(
        cls, name: str | Path, target: Target, *, revision: str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Load a draft of any readable format.

        Args:
            name: folder or hub id.
            target: the target that it was trained for; its taps are set to the draft's.
            revision: branch, tag or commit on the hub.
            dtype: of the weights, None takes the target's.

        Raises:
            CheckpointError: it is not there, damaged, of another target, or another kind of draft than this class.
        """
        from deepspec.algorithms.checkpoint import load_draft

        draft = load_draft(name, target, dtype, revision)
        if not isinstance(draft, cls):
            raise CheckpointError(f"{name} is a {draft.config.name} draft, which {cls.__module__} does not hold.")
        return draft

    def push_to_hub(self, repo_id: str, *, private: bool = True, revision: str | None = None) -> None:
        """Upload a draft; `deepspec export push_to=...` uploads other formats, with a model card.

        Args:
            repo_id: ORG/NAME; made where it does not exist.
            private: whether a repository made now is private.
            revision: branch to write to.

        Raises:
            CheckpointError: the hub cannot be reached or refuses.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            upload(Path(folder), repo_id, private=private, revision=revision)


def upload(folder: Path, repo_id: str, *, private: bool, revision: str | None = None) -> None:
    """Upload a folder as a model repository.

    Raises:
        CheckpointError: the hub cannot be reached or refuses.
    """
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            allow_patterns=["*.json", "*.safetensors", "README.md"],
            commit_message="Upload draft",
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{folder} cannot be uploaded to {repo_id}: {reason} Log in with `hf auth login`; the folder itself is "
            "whole."
        ) from error
