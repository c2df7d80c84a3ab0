"""A feature cache gives back what was written, however often its writers were killed, or says what is wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from chat_targets import chat_target
from interrupted import finish, kill_after, start

from deepspec.config import TargetConfig
from deepspec.data import cache_writer
from deepspec.data.cache import Cache, find, open_shards, predicting
from deepspec.data.cache_format import Encoding, Shard, decode, encode
from deepspec.data.cache_manifest import MANIFEST, identity_of, manifest_of, read_manifest
from deepspec.data.cache_writer import check_disk, open_writer, planned_bytes
from deepspec.data.chat import TokenSample
from deepspec.data.features import TargetPass
from deepspec.errors import DataError
from deepspec.targets.base import Target

CONFIG = TargetConfig(
    name_or_path="tiny-chat", dtype="bfloat16", attention="sdpa", enable_thinking=False, short_name="tiny"
)


@lru_cache
def target_in_memory() -> Target:
    return chat_target(torch.bfloat16)


def some_samples(count: int, seed: int = 0) -> list[TokenSample]:
    draw = random.Random(seed)
    samples = []
    for number in range(count):
        size = draw.randint(2, 40)
        first = draw.randint(1, size - 1)
        mask = [index >= first and draw.random() < 0.8 for index in range(size)]
        mask[-1] = True
        samples.append(TokenSample(f"s{number}", [draw.randint(5, 90) for _ in range(size)], mask))
    return samples


def passed(target: Target, sample: TokenSample) -> TargetPass:
    return TargetPass(*(part[0] for part in target.features(torch.tensor([sample.input_ids]))), None)


def write(
    folder: Path, samples: list[TokenSample], encoding: Encoding = "bf16", rank: int = 0, shard_bytes: int = 20_000
) -> None:
    """Write what the folder lacks, as `deepspec data cache` does, in small shards."""
    target = target_in_memory()
    with open_writer(folder, target, manifest_of(target, CONFIG, encoding, None), 1, rank) as writer:
        writer._shard_bytes = shard_bytes
        for sample, place in zip(samples, find(writer.shards, samples), strict=True):
            if place is None:
                writer.keep(sample, passed(target, sample))


def assert_holds(folder: Path, samples: list[TokenSample]) -> None:
    target = target_in_memory()
    cache = Cache.for_target(folder, target)
    for sample, place in zip(samples, cache.places(samples), strict=True):
        record, found = cache.read(place, target.dtype)
        expected, rows = passed(target, sample), predicting(sample.answer_mask)
        assert record.input_ids.tolist() == sample.input_ids
        assert torch.equal(found.features, expected.features[:-1])
        assert torch.equal(found.last_hidden[rows], expected.last_hidden[:-1][rows])
        logits = target.logits(expected.last_hidden[:-1][rows])
        assert found.log_normaliser is not None
        torch.testing.assert_close(found.log_normaliser[rows], logits.logsumexp(dim=-1))
        assert torch.equal(record.best_token.long(), logits.argmax(dim=-1))


def test_a_bf16_cache_of_a_bf16_target_gives_back_every_bit_that_a_loss_reads(tmp_path: Path) -> None:
    samples = some_samples(30)
    write(tmp_path, samples)
    assert len(open_shards(tmp_path)) > 2
    assert_holds(tmp_path, random.Random(1).sample(samples, 30))


@pytest.mark.parametrize(("encoding", "error"), [("int8", 0.5 / 127), ("fp8", 2.0**-4)])
def test_encoded_taps_are_off_by_no_more_than_their_rounding(encoding: Encoding, error: float) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(50, 3 * 16, generator=generator) * torch.logspace(-4, 4, 50)[:, None]
    features[:, 16:32] *= 1e5  # a tap with large states must not cost the others their digits
    features[7] = 0.0
    found = decode(*encode(features, 3, encoding), torch.float32)
    for tap in range(3):
        part = slice(16 * tap, 16 * (tap + 1))
        largest = features[:, part].abs().amax(dim=1, keepdim=True)
        # int8 rounds to steps of the largest entry, fp8 to three bits of each entry or, near zero, of the largest.
        allowed = error * (largest if encoding == "int8" else features[:, part].abs()) + largest * 2.0**-16
        assert ((found[:, part] - features[:, part]).abs() <= allowed).all()


@pytest.mark.parametrize("end", [KeyboardInterrupt, DataError])
def test_what_a_writer_holds_is_written_when_its_run_is_interrupted(tmp_path: Path, end: type[BaseException]) -> None:
    samples, target = some_samples(5), target_in_memory()

    def interrupted() -> None:
        with open_writer(tmp_path, target, manifest_of(target, CONFIG, "bf16", None), 1) as writer:
            for sample in samples:
                writer.keep(sample, passed(target, sample))
            raise end

    with pytest.raises(end):
        interrupted()
    assert_holds(tmp_path, samples)


def test_what_is_there_is_never_written_again_and_new_samples_are_added(tmp_path: Path) -> None:
    samples = some_samples(20)
    write(tmp_path, samples[:12])
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard*")}
    write(tmp_path, samples)
    write(tmp_path, samples)
    assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in before.items())
    assert sum(map(len, open_shards(tmp_path))) == len(samples)
    assert_holds(tmp_path, samples)


def test_a_sample_that_supervises_more_than_was_stored_is_missing_and_one_that_supervises_less_is_not(
    tmp_path: Path,
) -> None:
    narrow = TokenSample("a", [7, 8, 9, 10], [False, False, True, True])
    write(tmp_path, [narrow])
    fewer = narrow._replace(answer_mask=[False, False, False, True])
    more = narrow._replace(answer_mask=[False, True, True, True])
    shards = open_shards(tmp_path)
    assert find(shards, [fewer])[0] is not None
    assert find(shards, [more]) == [None]
    write(tmp_path, [more])
    assert_holds(tmp_path, [more])


def write_slowly(folder: str) -> None:
    """A job for a process of its own."""
    write(Path(folder), some_samples(40), shard_bytes=4_000)


def test_a_killed_writer_loses_nothing_that_was_written_and_doubles_nothing(tmp_path: Path) -> None:
    samples = some_samples(40)
    for number in range(3):
        process = start(write_slowly, str(tmp_path))
        kill_after(process, lambda least=2 * number + 1: len(list(tmp_path.glob("shard*.json"))) >= least, 0.002)
    finish(start(write_slowly, str(tmp_path)))
    assert sum(map(len, open_shards(tmp_path))) == len(samples)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
    assert_holds(tmp_path, samples)


def write_share(folder: str, rank: int) -> None:
    """A job for a process of its own."""
    write(Path(folder), some_samples(30)[rank::3], rank=rank, shard_bytes=6_000)


def test_several_processes_write_one_cache(tmp_path: Path) -> None:
    processes = [start(write_share, str(tmp_path), rank) for rank in range(3)]
    for process in processes:
        finish(process)
    assert_holds(tmp_path, some_samples(30))


def test_two_processes_of_one_rank_are_refused(tmp_path: Path) -> None:
    target = target_in_memory()
    manifest = manifest_of(target, CONFIG, "bf16", None)
    with (
        open_writer(tmp_path, target, manifest, 1),
        pytest.raises(DataError, match=r"being written by another process of the same rank 0.*torchrun"),
        open_writer(tmp_path, target, manifest, 1),
    ):
        pass


def read_all(path: Path) -> None:
    shard = Shard(path)
    for index in range(len(shard)):
        shard.read(index)


@pytest.mark.parametrize("encoding", ["bf16", "int8"])
def test_any_flipped_bit_of_a_shard_is_named(tmp_path: Path, encoding: Encoding) -> None:
    samples = some_samples(6)
    write(tmp_path, samples, encoding, shard_bytes=10**9)
    (path,) = tmp_path.glob("*.safetensors")
    whole = path.read_bytes()
    draw = random.Random(3)
    places = [*draw.sample(range(len(whole)), 60), *range(0, 1200, 13)]  # the header is a small part, so on purpose
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"shard-00000-000000.safetensors is damaged: .*Delete it and"):
            read_all(path)


def truncate(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])


def lose_shard(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def break_summary(folder: Path) -> None:
    next(folder.glob("shard*.json")).write_text('{"bytes": ')


def lose_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def halve_manifest(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text[: len(text) // 2])


def other_version(folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps({**read_manifest(folder), "version": 9}))


def other_layers(folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps({**read_manifest(folder), "layer_ids": [0, 2, 3]}))


def other_head(folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps({**read_manifest(folder), "head_hash": "0", "target": "another"}))


def lose_shard_and_summary(folder: Path) -> None:
    lose_shard(folder)
    path = next(path for path in folder.glob("shard*.json") if not path.with_suffix(".safetensors").exists())
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"is damaged: it has [\d,]+ bytes instead of [\d,]+"),
        (lose_shard, "is missing, though its summary is there"),
        (break_summary, "cannot be read"),
        (lose_manifest, r"is no feature cache: .*deepspec data cache"),
        (halve_manifest, "damaged or of another kind"),
        (other_version, r"version 9 .*; this program reads"),
        (other_layers, r"layers \[0, 2, 3\] of 'tiny-chat', but this run asks for \[0, 1, 3\]. Set target.layers"),
        (other_head, r"with weights \(by hash\) 0 of 'another'"),
        (lose_shard_and_summary, r"lacks \d+ of this run's 12 samples, the first with the id .*deepspec data cache"),
    ],
)
def test_a_cache_that_is_not_whole_or_not_of_this_run_is_refused_with_a_way_out(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    samples = some_samples(12)
    write(tmp_path, samples)
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        Cache.for_target(tmp_path, target_in_memory()).places(samples)


def test_a_cache_of_another_encoding_is_not_added_to(tmp_path: Path) -> None:
    write(tmp_path, some_samples(2), "int8")
    with pytest.raises(
        DataError, match=r"encoding int8 of 'tiny-chat', but this run asks for bf16. Set features.encoding"
    ):
        write(tmp_path, some_samples(3), "bf16")


def test_states_that_are_not_finite_are_refused_by_the_name_of_their_sample(tmp_path: Path) -> None:
    target, (sample,) = target_in_memory(), some_samples(1)
    one = passed(target, sample)
    one.features[0, 3] = float("nan")
    with (
        pytest.raises(DataError, match="sample 's0' hold NaN or infinity"),
        open_writer(tmp_path, target, manifest_of(target, CONFIG, "int8", None), 1) as writer,
    ):
        writer.keep(sample, one)
    assert not list(tmp_path.glob("shard*"))


def test_what_a_cache_will_take_is_known_before_and_refused_where_it_does_not_fit(tmp_path: Path) -> None:
    samples, target = some_samples(60), target_in_memory()
    for encoding in ("bf16", "fp8", "int8"):
        folder = tmp_path / encoding
        write(folder, samples, encoding, shard_bytes=10**9)
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert planned_bytes(samples, target, encoding) == pytest.approx(size, rel=0.05)
    free = shutil.disk_usage(tmp_path).free
    check_disk(tmp_path / "not" / "yet", free // 2)
    with pytest.raises(DataError, match=r"needs .* more, but .* free\. Write int8"):
        check_disk(tmp_path / "not" / "yet", 2 * free)


def test_a_full_disk_is_named_and_what_was_written_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = some_samples(20)
    write(tmp_path, samples[:10])
    real = os.replace

    def full(source: str, destination: str) -> None:
        if str(destination).endswith(".safetensors"):
            raise OSError(28, "No space left on device")
        real(source, destination)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(DataError, match=r"cannot be written \(No space left on device\). Free some space"):
            write(tmp_path, samples)
    assert_holds(tmp_path, samples[:10])
    write(tmp_path, samples)
    assert_holds(tmp_path, samples)


def test_the_identity_of_a_target_is_in_its_weights_and_not_in_its_name() -> None:
    one, renamed, other = (
        chat_target(torch.bfloat16),
        chat_target(torch.bfloat16, name="x"),
        chat_target(torch.bfloat16, seed=12),
    )
    assert identity_of(one) == identity_of(renamed)
    assert identity_of(one)["head_hash"] != identity_of(other)["head_hash"]


def test_a_relative_that_was_fine_tuned_with_a_frozen_head_is_another_target() -> None:
    one, tuned = chat_target(torch.bfloat16), chat_target(torch.bfloat16)
    assert identity_of(one) == identity_of(tuned)
    tuned.layer(0).self_attn.q_proj.weight[0, 0] += 0.5
    assert torch.equal(one.head.weight, tuned.head.weight)
    assert identity_of(one)["head_hash"] != identity_of(tuned)["head_hash"]


def test_a_cache_that_knows_its_target_by_the_head_alone_is_refused(tmp_path: Path) -> None:
    write(tmp_path, some_samples(2))
    (tmp_path / MANIFEST).write_text(json.dumps({**read_manifest(tmp_path), "version": 1}))
    with pytest.raises(DataError, match=r"version 1 .*this program reads .* version 2\. Write the\s+cache anew"):
        read_manifest(tmp_path)


def test_logits_are_made_in_chunks_that_do_not_change_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = some_samples(5)
    monkeypatch.setattr(cache_writer, "_CHUNK", 3)
    write(tmp_path, samples)
    assert_holds(tmp_path, samples)
