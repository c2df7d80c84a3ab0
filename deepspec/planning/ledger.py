"""A book of tensor bytes: which storages live, what for, and the most there ever were at once.

Tensors that sizes follow from (token ids, positions, masks) are real; all that is computed from weights is PyTorch's
fake tensors, which have a shape, a dtype and a lifetime but no memory. The ledger knows neither drafts nor targets.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

TARGET, MASTERS, GRADIENTS, MOMENTS = "target", "masters", "gradients", "moments"
TARGET_PASS, FEATURES, COPIES, ATTENTION = "target pass", "features", "copies", "attention"
HEAD, ACTIVATIONS, BACKWARD = "head", "activations", "backward"
# The draft once more, to decode prompts with while it is being trained.
PROBE = "probe"
# What only several processes hold; see sharding.py.
GATHERED, BUFFERS = "gathered", "buffers"

# Loss weights and their like: so few numbers that they can be real.
_SMALL = 64
_aten = torch.ops.aten


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Decides which tensors are real, and counts the bytes of every storage from birth to death by what it is for.

    Attributes:
        total: bytes held now.
        peak: the most since the last `restart`.
        length: context keys; what has at least as many columns is attention weights.
        vocab_rows: Vd; what has as many columns belongs to the head.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.length = 0
        self.vocab_rows = 0
        self._without_data = FakeTensorMode(allow_non_fake_inputs=True)
        self._phase = TARGET
        self._held: Counter[str] = Counter()
        self.peak = 0
        self._parts: dict[str, int] = {}
        self._weights = WeakIdKeyDictionary()
        self._living = WeakIdKeyDictionary()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book what is born meanwhile under a name."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def know_weights(self, weights: list[Tensor]) -> None:
        """Casts of these are booked as copies."""
        for weight in weights:
            self._weights[weight.untyped_storage()] = True

    def rename(self, old: str, new: str) -> None:
        """Book what is still held under `old` under another name from now on."""
        for record in self._living.values():  # type: ignore[no-untyped-call]
            if record[0] == old:
                record[0] = new
        self._held[new] += self._held.pop(old, 0)

    def restart(self) -> tuple[int, dict[str, int]]:
        """The peak since the last call and what it consisted of; the next one starts from what is held now."""
        found = self.peak, self._parts
        self.peak, self._parts = self.total, self._shares()
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator with or without data and book what it makes; see TorchDispatchMode."""
        kwargs = kwargs or {}
        output = self._run(func, args, kwargs)
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._living:
                self._book(tensor, func, args)
        return output

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        if given and not any(isinstance(tensor, FakeTensor) for tensor in given):
            return func(*args, **kwargs)
        if func is _aten.index.Tensor and args[1][0] is not None and args[1][0].dtype == torch.bool:
            mask = args[1][0]
            return args[0].new_empty((int(mask.sum()), *args[0].shape[mask.dim() :]))
        with self._without_data:
            made = func(*args, **kwargs)
        # Indices decide on sizes, so they are made for real, and so are the few numbers that loss weights come from.
        is_small = self._phase == ACTIVATIONS and isinstance(made, Tensor) and made.numel() <= _SMALL
        if not given and isinstance(made, Tensor) and (is_small or not made.is_floating_point()):
            return func(*args, **kwargs)
        return made

    def _book(self, tensor: Tensor, func: Any, args: Any) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        record: list[Any] = [self._purpose(tensor, func, args)]
        self._living[storage] = record
        self._held[record[0]] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self._parts = self.total, self._shares()
        weakref.finalize(storage, self._forget, record, size).atexit = False

    def _shares(self) -> dict[str, int]:
        return {name: held for name, held in self._held.items() if held}

    def _forget(self, record: list[Any], size: int) -> None:
        self._held[record[0]] -= size
        self.total -= size

    def _purpose(self, tensor: Tensor, func: Any, args: Any) -> str:
        if self._phase != ACTIVATIONS:
            return self._phase
        if func is _aten._to_copy.default and args[0].untyped_storage() in self._weights:
            return COPIES
        if tensor.dim() == 2 and tensor.shape[1] == self.vocab_rows:
            return HEAD
        if tensor.dim() >= 4 and tensor.shape[-1] >= self.length:
            return ATTENTION
        return ACTIVATIONS
