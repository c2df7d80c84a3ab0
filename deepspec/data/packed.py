"""The samples of a data set as flat arrays: five bytes a token, where lists of numbers take nine times as many."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, overload

from typing_extensions import Self

from deepspec.data.chat import TokenSample


class SampleParts(NamedTuple):
    """What packed samples consist of; arrays in memory or in a mapped file.

    Attributes:
        ends: [samples + 1] int64, where each sample begins, and the end.
        tokens: int32 ids of all samples, one after the other.
        mask: a byte for each of them, 1 on answer tokens.
        names: [samples] ids of the samples.
    """

    ends: array[int] | memoryview
    tokens: array[int] | memoryview
    mask: bytearray | memoryview
    names: list[str]


class PackedSamples(Sequence[TokenSample]):
    """Samples that are unpacked one by one as they are asked for."""

    def __init__(self, samples: Iterable[TokenSample] = ()) -> None:
        """Pack samples; more can be appended."""
        self.parts = SampleParts(array("q", [0]), array("i"), bytearray(), [])
        for sample in samples:
            self.append(sample)

    @classmethod
    def from_parts(cls, parts: SampleParts) -> Self:
        """Take parts as they are; nothing can be added to those of a mapped file."""
        packed = cls()
        packed.parts = parts
        return packed

    def append(self, sample: TokenSample) -> None:
        """Pack one more."""
        ends, tokens, mask, names = self.parts
        assert isinstance(ends, array)
        assert isinstance(tokens, array)
        assert isinstance(mask, bytearray)
        tokens.extend(sample.input_ids)
        mask.extend(sample.answer_mask)
        ends.append(len(tokens))
        names.append(sample.id)

    def extend(self, others: PackedSamples) -> None:
        """Take in others, without unpacking them."""
        ends, tokens, mask, names = self.parts
        assert isinstance(ends, array)
        assert isinstance(tokens, array)
        assert isinstance(mask, bytearray)
        before = len(tokens)
        tokens.frombytes(memoryview(others.parts.tokens).cast("B"))
        mask.extend(others.parts.mask)
        ends.extend(before + end for end in others.parts.ends[1:])
        names.extend(others.parts.names)

    def __len__(self) -> int:
        return len(self.parts.names)

    @overload
    def __getitem__(self, index: int) -> TokenSample: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> TokenSample | Self:
        """One sample, or those of a slice."""
        if isinstance(index, slice):
            chosen = range(len(self))[index]
            return self if chosen == range(len(self)) else type(self)(self[number] for number in chosen)
        ends, tokens, mask, names = self.parts
        number = range(len(self))[index]
        part = slice(ends[number], ends[number + 1])
        return TokenSample(names[number], tokens[part].tolist(), list(map(bool, mask[part])))

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same samples in the same order."""
        if not isinstance(other, PackedSamples):
            return NotImplemented
        return self.parts == other.parts

    __hash__ = None  # type: ignore[assignment]

    @property
    def nbytes(self) -> int:
        """Bytes of tokens and masks."""
        return len(self.parts.tokens) * self.parts.tokens.itemsize + len(self.parts.mask)
