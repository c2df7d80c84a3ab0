"""The samples of a data set as flat arrays: five bytes a token, where lists of numbers take nine times as many."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from typing_extensions import Self

from deepspec.data.chat import TokenSample


class PackedSamples(Sequence[TokenSample]):
    """Samples that are unpacked one by one as they are asked for."""

    def __init__(self, samples: Iterable[TokenSample] = ()) -> None:
        """Pack samples; more can be appended."""
        self._tokens = array("i")
        self._mask = bytearray()
        self._ends = array("q", [0])
        self._names: list[str] = []
        for sample in samples:
            self.append(sample)

    def append(self, sample: TokenSample) -> None:
        """Pack one more."""
        self._tokens.extend(sample.input_ids)
        self._mask.extend(sample.answer_mask)
        self._ends.append(len(self._tokens))
        self._names.append(sample.id)

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> TokenSample: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> TokenSample | Self:
        """One sample, or those of a slice."""
        if isinstance(index, slice):
            chosen = range(len(self))[index]
            return self if chosen == range(len(self)) else type(self)(self[number] for number in chosen)
        number = range(len(self))[index]
        part = slice(self._ends[number], self._ends[number + 1])
        return TokenSample(self._names[number], self._tokens[part].tolist(), list(map(bool, self._mask[part])))

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same samples in the same order."""
        if not isinstance(other, PackedSamples):
            return NotImplemented
        return vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def nbytes(self) -> int:
        """Bytes of tokens and masks."""
        return len(self._tokens) * self._tokens.itemsize + len(self._mask)
