"""DeepSpec's version-2 caches: a real one is read number by number, ours are the same bytes, damage is named."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from deepspec.data.cache_v2 import DeepSpecCache, is_version_2, write_version_2
from deepspec.data.chat import TokenSample
from deepspec.data.features import TargetPass
from deepspec.errors import DataError

GOLDEN = Path(__file__).parents[2] / "golden" / "cache_v2_3l"


def naive(folder: Path, number: int) -> tuple[list[int], list[int], torch.Tensor, torch.Tensor]:
    """One record by the description of the format: ids, mask, features, last hidden."""
    manifest = json.loads((folder / "manifest.json").read_text())
    index = (folder / "samples.idx").read_bytes()[56 * number : 56 * (number + 1)]
    _, shard, length, ids, _, loss, hidden, last = struct.unpack("<QIIQQQQQ", index)
    raw = (folder / f"shard-{shard:05d}.bin").read_bytes()
    size = manifest["hidden_size"]
    width = size * len(manifest["target_layer_ids"])

    def numbers(begin: int, columns: int) -> torch.Tensor:
        halves = np.frombuffer(raw[begin : begin + 2 * length * columns], "<u2").astype(np.uint32)
        return torch.from_numpy((halves << 16).view(np.float32).copy()).view(length, columns)

    tokens = list(struct.unpack(f"<{length}i", raw[ids : ids + 4 * length]))
    return tokens, list(raw[loss : loss + length]), numbers(hidden, width), numbers(last, size)


def test_a_real_cache_is_read_up_to_the_last_supervised_token_of_each_sample() -> None:
    cache = DeepSpecCache(GOLDEN)
    assert is_version_2(GOLDEN)
    assert len(cache) == 4
    for number in range(4):
        ids, mask, hidden, last = naive(GOLDEN, number)
        end = max(index + 1 for index, value in enumerate(mask) if value)
        sample, found = cache.read(number, torch.float32)
        assert sample == TokenSample(str(number), ids[:end], [bool(value) for value in mask[:end]])
        assert torch.equal(found.features, hidden[: end - 1])
        assert torch.equal(found.last_hidden, last[: end - 1])
    samples = [cache.sample(number) for number in (2, 0, 3, 1)]
    assert cache.places(samples) in ([2, 0, 3, 1], [0, 0, 3, 1], [2, 2, 3, 1])  # samples 0 and 2 may say the same


def whole_passes() -> list[tuple[TokenSample, TargetPass]]:
    passes = []
    for number in range(4):
        ids, mask, hidden, last = naive(GOLDEN, number)
        passes.append((TokenSample(str(number), ids, [bool(one) for one in mask]), TargetPass(hidden, last, None)))
    return passes


def test_what_is_written_is_what_deepspec_writes_byte_by_byte(tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / "manifest.json").read_text())
    made_by_us = {"num_samples", "num_shards", "shards", "version", "hidden_dtype", "token_dtype", "mask_dtype"}
    said = {key: value for key, value in golden.items() if key not in made_by_us | {"index_record_size"}}
    folder = tmp_path / "cache"
    # One shard less than there are: DeepSpec's writers dealt these samples over three shards by another rule.
    assert write_version_2(folder, whole_passes(), said, shard_bytes=1) == 4
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {key: value for key, value in manifest.items() if key not in ("num_shards", "shards")} == {
        key: value for key, value in golden.items() if key not in ("num_shards", "shards")
    }
    for number in range(4):
        _, shard, length, *offsets = struct.unpack(
            "<QIIQQQQQ", (folder / "samples.idx").read_bytes()[56 * number :][:56]
        )
        assert (shard, offsets[0]) == (number, 0)
        ours = (folder / manifest["shards"][shard]["file_name"]).read_bytes()
        _, shard, _, first, *_ = struct.unpack("<QIIQQQQQ", (GOLDEN / "samples.idx").read_bytes()[56 * number :][:56])
        theirs = (GOLDEN / f"shard-{shard:05d}.bin").read_bytes()[first:]
        assert ours == theirs[: len(ours)]
        assert len(ours) == length * (6 + 2 * 64 * 4)
    cache = DeepSpecCache(folder)
    for number in range(4):
        assert cache.sample(number) == DeepSpecCache(GOLDEN).sample(number)


def test_a_folder_that_exists_is_not_written_over_and_a_failed_write_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError, match=r"exists\. Choose another folder"):
        write_version_2(tmp_path / "there", whole_passes(), {}, 1)

    def broken():
        yield whole_passes()[0]
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="No space left on device"):
        write_version_2(tmp_path / "new", broken(), {}, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new.lock", "there"]


def test_a_second_writer_of_a_cache_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    def interrupted():
        yield whole_passes()[0]
        with pytest.raises(DataError, match=r"new is being written by another process"):
            write_version_2(tmp_path / "new", whole_passes(), {}, 1)
        yield from whole_passes()[1:]

    expected = write_version_2(tmp_path / "alone", whole_passes(), {}, 1)
    assert write_version_2(tmp_path / "new", interrupted(), {}, 1) == expected
    for path in (tmp_path / "alone").iterdir():
        assert (tmp_path / "new" / path.name).read_bytes() == path.read_bytes()


def copied(folder: Path) -> Path:
    shutil.copytree(GOLDEN, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    return folder


def change_manifest(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, **values}))

    return change


def cut(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_manifest(version=3), "version is 3, not 2"),
        (change_manifest(index_record_size=48), "index_record_size is 48, not 56"),
        (change_manifest(num_samples=5), r"samples\.idx has 224 bytes for 5 samples"),
        (change_manifest(shards=[]), "is in shard 0, which the manifest lacks"),
        (change_manifest(hidden_size=4096), r"ends at byte .*, sample \d+ at"),
        (change_manifest(target_layer_ids=None), "manifest or index cannot be read"),
        (cut("manifest.json"), "manifest or index cannot be read"),
        (cut("samples.idx"), r"samples\.idx has 223 bytes"),
        (cut("shard-00002.bin"), r"shard-00002\.bin ends at byte 17,093"),
        (lambda folder: (folder / "shard-00001.bin").unlink(), r"shard-00001\.bin is missing"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = copied(tmp_path / "cache")
    damage(folder)
    with pytest.raises(DataError, match=message):
        DeepSpecCache(folder)


def test_flipped_bits_are_named_or_change_nothing_but_a_number(tmp_path: Path) -> None:
    """The format has no checksums, so a flip inside a number cannot be seen; all others must not be traces."""
    folder = copied(tmp_path / "cache")
    draw, said = random.Random(5), []
    for name in ("manifest.json", "samples.idx", "shard-00000.bin", "shard-00002.bin"):
        whole = (folder / name).read_bytes()
        for place in draw.sample(range(min(len(whole), 600)), 60):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << draw.randrange(8)
            (folder / name).write_bytes(damaged)
            try:
                cache = DeepSpecCache(folder)
                for number in range(len(cache)):
                    cache.read(number, torch.bfloat16)
            except DataError as error:
                said.append(str(error))
        (folder / name).write_bytes(whole)
    assert len(said) > 60
    assert all("is damaged" in message for message in said)


def test_numbers_that_are_not_finite_are_named(tmp_path: Path) -> None:
    folder = copied(tmp_path / "cache")
    raw = bytearray((folder / "shard-00000.bin").read_bytes())
    raw[200:202] = b"\x80\x7f"  # infinity in bf16
    (folder / "shard-00000.bin").write_bytes(raw)
    with pytest.raises(DataError, match="holds NaN or infinity"):
        DeepSpecCache(folder).read(0, torch.float32)
