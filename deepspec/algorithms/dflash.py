"""DFlash: the parallel block alone; every slot is drawn independently of the others (arXiv 2602.06036)."""

from __future__ import annotations

from deepspec.algorithms.backbone import BlockDraft


class Draft(BlockDraft):
    """The block draft without heads, in either layout."""
