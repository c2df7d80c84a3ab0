"""One training, whichever source its features come from: a live target, a cache, or what was captured in answering."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from chat_targets import CONFIG, LAYERS, VOCABULARY, ascii_tokenizer, chat_target, save_chat_target, target_overrides
from helpers import batch_of, coefficients_for, kind_of_draft, tiny_config, tiny_draft, tiny_target
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from deepspec.cli import main
from deepspec.config import compose_train
from deepspec.data.cache import Cache
from deepspec.data.cache_jobs import verify_cache, write_cache
from deepspec.data.cache_manifest import MANIFEST, identity_of, manifest_of
from deepspec.data.cache_v2 import DeepSpecCache
from deepspec.data.cache_writer import open_writer
from deepspec.data.cached import CachedFeatures, open_cache
from deepspec.data.chat import TokenSample, samples_from_answers
from deepspec.data.features import FeatureMemory, FeatureSource, OnlineFeatures, TargetPass
from deepspec.data.journal import read_journal
from deepspec.data.loader import BatchLimits, BatchLoader
from deepspec.data.prompts import Conversation, Message
from deepspec.data.regenerate import AnswerSettings, answer_prompts
from deepspec.data.samples import read_token_samples
from deepspec.decoding.sampling import Sampling
from deepspec.errors import DataError
from deepspec.targets.base import Target
from deepspec.targets.head_only import load_head_only
from deepspec.training.run import train
from deepspec.types import TokenBatch

GOLDEN = Path(__file__).parents[1] / "golden" / "cache_v2_3l"
KINDS = ["dspark-gated", "dflash-fill_in", "eagle3"]


@lru_cache
def target_in_memory() -> Target:
    return chat_target()


def conversations(count: int = 9) -> list[Conversation]:
    made = []
    for index in range(count):
        texts = ["hello " * (1 + index % 4), "and then?", "so?"] if index % 4 == 3 else ["why " * (1 + index % 5)]
        made.append(Conversation(f"c{index}", tuple(Message("user", text) for text in texts), ""))
    return made


def captured(folder: Path) -> list[TokenSample]:
    """Samples of answers whose states go into a cache while they are generated."""
    target = target_in_memory()
    target.tap(LAYERS)
    settings = AnswerSettings(Sampling(), max_new_tokens=14, seed=2, batch_size=4)
    path = folder / "answers.jsonl"
    with open_writer(folder / "captured", target, manifest_of(target, CONFIG, "bf16", None), 1) as writer:
        answer_prompts(target, CONFIG, conversations(), settings, path, writer)
    rows = sorted(read_journal(path), key=lambda row: str(row["id"]))
    return [
        sample
        for row in rows
        for sample in samples_from_answers(row, target.tokenizer, enable_thinking=False, system_prompt=None)
    ]


def cached(folder: Path, samples: list[TokenSample], encoding: str = "bf16") -> Path:
    target = target_in_memory()
    with open_writer(folder, target, manifest_of(target, CONFIG, encoding, None), 1) as writer:
        for sample in samples:
            features, last_hidden = target.features(torch.tensor([sample.input_ids]))
            writer.keep(sample, TargetPass(features[0], last_hidden[0], None))
    return folder


def batches(samples: list[TokenSample], micro_batch_size: int = 4, anchor_sets: int = 1) -> list[TokenBatch]:
    limits = BatchLimits(len(samples), micro_batch_size, anchor_sets=anchor_sets)
    return next(BatchLoader(samples, limits=limits, num_anchors=6, seed=1, pad_token_id=0).steps()).micro_batches


def from_cache(folder: Path, samples: list[TokenSample], needs_log_normaliser: bool = True) -> CachedFeatures:
    target = target_in_memory()
    return CachedFeatures(
        open_cache(folder, target),
        target,
        samples,
        prefetch_batches=2,
        needs_log_normaliser=needs_log_normaliser,
    )


def losses(source: FeatureSource, samples: list[TokenSample], kind: str, **overrides: object) -> dict[str, float]:
    """Every loss of an epoch, over its own count."""
    draft = kind_of_draft(target_in_memory(), kind, **overrides)
    sums: dict[str, Tensor] = {}
    source.upcoming(batches(samples))
    for tokens in batches(samples):
        batch = source.complete(tokens)
        for name, ratio in draft(batch, coefficients_for(draft, batch)).losses.items():
            sums[name] = sums.get(name, torch.zeros(2, dtype=torch.float64)) + torch.stack(ratio).double()
    return {name: float(total / count) for name, (total, count) in sums.items()}


@pytest.mark.parametrize(
    ("kind", "overrides"), [*((kind, {}) for kind in KINDS), ("dspark-gated", {"draft_vocab_size": 40})]
)
def test_losses_are_the_same_from_every_source_up_to_the_rounding_of_bf16(
    tmp_path: Path, kind: str, overrides: dict[str, int]
) -> None:
    samples = captured(tmp_path)
    online = OnlineFeatures(target_in_memory(), samples, FeatureMemory(0.0), needs_log_normaliser=True)
    expected = losses(online, samples, kind, **overrides)
    written = losses(from_cache(cached(tmp_path / "cache", samples), samples), samples, kind, **overrides)
    while_answering = losses(from_cache(tmp_path / "captured", samples), samples, kind, **overrides)
    for name, value in expected.items():
        # bf16 keeps 8 bits: entries are off by 2^-9 of their size, at random, and means over them by less.
        assert written[name] == pytest.approx(value, rel=2.0**-8)
        # Two sources of one text differ only where rounding to bf16 fell the other way.
        assert while_answering[name] == pytest.approx(written[name], rel=1e-4)


def test_batches_from_a_cache_are_the_online_ones_rounded_to_bf16_where_a_loss_reads_them(tmp_path: Path) -> None:
    samples = captured(tmp_path)
    source = from_cache(tmp_path / "captured", samples)
    online = OnlineFeatures(target_in_memory(), samples, FeatureMemory(0.0), needs_log_normaliser=True)
    every = batches(samples)
    source.upcoming(every)
    # Asked for in another order, twice, or without having been announced, a batch is the same.
    for tokens in [every[-1], *every, every[0], *batches(samples, 2)]:
        found, expected = source.complete(tokens), online.complete(tokens)
        states = torch.arange(tokens.input_ids.shape[1]) < tokens.lengths[:, None] - 1
        predicts = torch.zeros_like(tokens.answer_mask)
        predicts[:, :-1] = tokens.answer_mask[:, 1:]
        rounding = {"rtol": 2.0**-8, "atol": 1e-9}
        torch.testing.assert_close(found.features[states], expected.features[states], **rounding)
        torch.testing.assert_close(found.last_hidden[predicts], expected.last_hidden[predicts], **rounding)
        assert found.log_normaliser is not None
        logits = target_in_memory().logits(found.last_hidden[predicts])
        torch.testing.assert_close(
            found.log_normaliser[predicts].double(), logits.logsumexp(dim=-1), rtol=1e-6, atol=1e-6
        )
        assert found.features.dtype == expected.features.dtype


def test_further_sets_of_anchors_take_the_features_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = captured(tmp_path)
    source = from_cache(tmp_path / "captured", samples, needs_log_normaliser=False)
    reads = []
    read = Cache.read
    monkeypatch.setattr(Cache, "read", lambda *given: reads.append(given[1]) or read(*given))
    every = batches(samples, anchor_sets=3)
    source.upcoming(every)
    before = None
    for tokens in every:
        before = source.complete(tokens, before)
        assert before.tokens is tokens
        assert before.log_normaliser is None
    assert len(reads) == len(samples) < sum(len(tokens.lengths) for tokens in every)


def test_int8_and_fp8_features_move_a_loss_by_little(tmp_path: Path) -> None:
    samples = captured(tmp_path)
    exact = losses(from_cache(tmp_path / "captured", samples), samples, "dspark-gated")
    for encoding, allowed in (("int8", 0.01), ("fp8", 0.02)):
        found = losses(from_cache(cached(tmp_path / encoding, samples, encoding), samples), samples, "dspark-gated")
        assert found != exact
        assert {name: pytest.approx(value, rel=allowed) for name, value in exact.items()} == found


@pytest.mark.parametrize(("encoding", "allowed"), [("int8", 0.01), ("fp8", 0.02)])
def test_a_training_on_int8_or_fp8_features_follows_the_one_on_bf16(
    job: list[str], tmp_path: Path, encoding: str, allowed: float
) -> None:
    """Rounding errors do not add up over steps: every loss on the way stays as near as a single one must."""
    found = {}
    for kind in ("bf16", encoding):
        words = [*job, f"output_dir={tmp_path}", f"features.encoding={kind}", f"features.cache={tmp_path / kind}"]
        write_cache(compose_train(words))
        config = compose_train(
            [*words, "features=cached", f"exp_name=on_{kind}", "optimizer.steps=12", "logger.every_steps=1"]
        )
        train(config)
        found[kind] = logged(config.run_dir)
    assert len(found["bf16"]) == 12
    assert found[encoding] != found["bf16"]
    assert found[encoding] == pytest.approx(found["bf16"], rel=allowed)


def test_damage_that_is_met_while_reading_ahead_is_the_error_of_the_batch_that_needs_it(tmp_path: Path) -> None:
    samples = captured(tmp_path)
    source = from_cache(tmp_path / "captured", samples)
    for path in (tmp_path / "captured").glob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 4
        path.write_bytes(raw)
    source.upcoming(batches(samples))
    with pytest.raises(DataError, match=r"is damaged: sample 'c\d.*checksum"):
        list(map(source.complete, batches(samples)))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words of a small training: a saved target and its answers, whose states were captured."""
    folder = tmp_path_factory.mktemp("job")
    target = target_overrides(save_chat_target(folder / "target"))
    words = [*target, f"answers={folder / 'answers.jsonl'}", f"cache={folder / 'captured'}", "limit=12"]
    main(["data", "regenerate", *words, "max_new_tokens=16", "batch_size=4", "device=cpu"])
    return [
        *target,
        f"output_dir={folder}",
        f"data.answers={folder / 'answers.jsonl'}",
        "data.num_anchors=4",
        "data.min_answer_tokens=1",
        "algorithm.num_layers=1",
        "algorithm.num_draft_tokens=3",
        "algorithm.markov_rank=4",
        "optimizer.epochs=null",
        "optimizer.steps=3",
        "optimizer.global_batch_size=4",
        "optimizer.micro_batch_size=2",
        "engine.device=cpu",
        f"features.cache={folder / 'captured'}",
    ]


def logged(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_training_on_captured_features_never_runs_the_target_and_learns_the_same(
    job: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*job, "logger.every_steps=1"]
    online = train(compose_train([*words, "exp_name=online"]))
    main(["data", "cache", *words])
    assert "12 samples, 0 of them to be written" in capsys.readouterr().out
    main(["data", "verify-cache", *words])
    assert "is whole: 12 samples" in capsys.readouterr().out

    def refuse(*_: object) -> None:
        raise AssertionError("the target was loaded")

    with monkeypatch.context() as patched:
        patched.setattr(Target, "load", refuse)
        read = train(compose_train([*words, "features=cached", "exp_name=cached"]))
    assert logged(read.parent) == pytest.approx(logged(online.parent), rel=2.0**-7)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (online, read))
    assert ours.keys() == theirs.keys()
    assert not all(torch.equal(ours[name], theirs[name]) for name in ours)  # it did read bf16


def test_the_cache_job_adds_what_is_missing_and_processes_share_it(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*job, f"features.cache={tmp_path / 'cache'}", "features.batch_size=3"]
    write_cache(compose_train([*words, "features.limit=5"]))
    assert "5 samples, 5 of them to be written" in capsys.readouterr().out
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        write_cache(compose_train(words))
    monkeypatch.undo()
    config = compose_train(words)
    verify_cache(config)
    assert "is whole: 12 samples" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "cache" / MANIFEST).read_text())
    assert manifest["target"] == config.target.name_or_path
    assert manifest["layer_ids"] == list(LAYERS)
    assert len(manifest["tokenizer_hash"]) == len(manifest["template_hash"]) == 16
    assert len(manifest["answers_hash"]) == 64
    with pytest.raises(DataError, match=r"layers \[0, 1, 3\] of .*, but this run asks for \[0, 2\]. Set target.layers"):
        train(compose_train([*words, "features=cached", "exp_name=other", "target.layers=[0,2]"]))
    part = [*words, "features=cached", f"features.cache={tmp_path / 'part'}", "exp_name=part"]
    write_cache(compose_train([*part, "features.limit=5"]))
    with pytest.raises(DataError, match=r"lacks 7 of this run's 12 samples.*a larger data.max_length"):
        train(compose_train(part))


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma4"])
def test_a_target_without_its_layers_shares_head_and_embedding_with_the_whole_one(tmp_path: Path, family: str) -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(family, 6, len(VOCABULARY)))
    model.save_pretrained(tmp_path)
    ascii_tokenizer().save_pretrained(tmp_path)
    config = CONFIG.model_copy(update={"name_or_path": str(tmp_path), "layers": (0, 2, 4), "mask_token_id": 4})
    whole, head = Target.load(config, torch.device("cpu")), load_head_only(config, torch.device("cpu"))
    assert identity_of(head) == identity_of(whole)
    assert torch.equal(head.head.embedding, whole.head.embedding)
    assert head.head.embedding_scale == whole.head.embedding_scale
    assert head.head.softcap == whole.head.softcap
    assert (head.num_layers, head.layer_ids, head.stop_token_ids) == (6, (0, 2, 4), whole.stop_token_ids)
    assert head.config.to_dict() == whole.config.to_dict()
    sizes = [sum(part.numel() for part in target.model.parameters()) for target in (head, whole)]
    assert sizes[0] < sizes[1]
    batch = batch_of(whole, [([5, 6, 7], [8, 9, 10, 11, 12])])
    drafts = [tiny_draft(target, "dspark") for target in (head, whole)]
    found, expected = (draft(batch, coefficients_for(draft, batch)).objective for draft in drafts)
    assert torch.equal(found, expected)
    # Layers are read one by one; numbers of one digit and of two must not be taken for each other.
    for index in range(6):
        mine, theirs = (target.layer(index).state_dict() for target in (head, whole))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine), index


def test_last_hidden_states_from_before_the_final_norm_are_found_out(job: list[str], tmp_path: Path) -> None:
    config = compose_train([*job, f"features.cache={tmp_path / 'cache'}"])
    target = Target.load(config.target, torch.device("cpu"))
    samples, _ = read_token_samples(
        config.data.answers, target.tokenizer, config.data, enable_thinking=False, system_prompt=None
    )
    manifest = manifest_of(target, config.target, "bf16", None)
    with open_writer(tmp_path / "cache", target, manifest, 1) as writer:
        for sample in samples:
            features, last_hidden = (part[0] for part in target.features(torch.tensor([sample.input_ids])))
            writer.keep(sample, TargetPass(features, last_hidden, None))
        for number, record in enumerate(writer._records):
            writer._records[number] = record._replace(last_hidden=record.last_hidden.roll(1, dims=-1))
    with pytest.raises(DataError, match="before the final norm, or by another target"):
        verify_cache(config)
    for summary in (tmp_path / "cache").glob("shard-*.json"):
        summary.unlink()
    with pytest.raises(DataError, match="holds no sample"):
        verify_cache(config)


def test_a_version_2_cache_is_written_read_and_trained_on(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*job, f"features.cache={tmp_path / 'v2'}", "features.format=deepspec_v2", "features.shard_mib=1"]
    write_cache(compose_train(words))
    verify_cache(compose_train(words))
    assert "is whole: 12 samples" in capsys.readouterr().out
    answers = tmp_path / "again.jsonl"
    main(["data", "cache-answers", f"cache={tmp_path / 'v2'}", f"answers={answers}"])
    config = compose_train(
        [*words, f"data.answers={answers}", "features=cached", "exp_name=v2", "logger.every_steps=1"]
    )
    train(config)
    online = compose_train([*job, f"data.answers={answers}", "exp_name=v2_online", "logger.every_steps=1"])
    train(online)
    assert logged(config.run_dir) == pytest.approx(logged(online.run_dir), rel=2.0**-7)


def test_answers_of_a_cache_are_its_samples(tmp_path: Path) -> None:
    samples = captured(tmp_path)
    tokenizer = target_in_memory().tokenizer
    for folder, expected in (
        (tmp_path / "captured", samples),
        (GOLDEN, [DeepSpecCache(GOLDEN).sample(number) for number in range(4)]),
    ):
        path = tmp_path / f"{folder.name}.jsonl"
        main(["data", "cache-answers", f"cache={folder}", f"answers={path}"])
        found = [
            sample
            for row in read_journal(path)
            for sample in samples_from_answers(row, tokenizer, enable_thinking=False, system_prompt=None)
        ]
        assert sorted(found) == sorted(expected)


def test_answers_that_are_there_are_never_written_over_by_those_of_a_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("hours of work\n")
    with pytest.raises(SystemExit):
        main(["data", "cache-answers", f"cache={GOLDEN}", f"answers={path}"])
    assert "answers.jsonl exists" in capsys.readouterr().err
    assert path.read_text() == "hours of work\n"


def test_a_draft_learns_from_deepspecs_own_cache() -> None:
    cache = DeepSpecCache(GOLDEN)
    samples = [cache.sample(number) for number in range(len(cache))]
    with pytest.raises(DataError, match="written with hidden_size 64 of 'tiny', but this run has 32"):
        DeepSpecCache.for_target(GOLDEN, tiny_target(num_layers=6, layer_ids=(0, 1, 2)))
    other = samples[0]._replace(input_ids=[1, *samples[0].input_ids[1:]])
    with pytest.raises(DataError, match=r"lacks 1 of this run's 1 samples.*cache-answers"):
        cache.places([other])
    config = tiny_config("qwen3", 6, vocab_size=128)
    config.hidden_size = json.loads((GOLDEN / MANIFEST).read_text())["hidden_size"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    target = Target(model, None, name="tiny", layer_ids=(0, 1, 2), mask_token_id=127)
    draft = tiny_draft(target, "dspark", draft_vocab_size=64)
    source = CachedFeatures(open_cache(GOLDEN, target), target, samples, prefetch_batches=1, needs_log_normaliser=True)
    for tokens in batches(samples):
        batch = source.complete(tokens)
        predicts = tokens.answer_mask[:, 1:]
        assert batch.log_normaliser is not None
        logits = target.logits(batch.last_hidden[:, :-1][predicts])
        torch.testing.assert_close(batch.log_normaliser[:, :-1][predicts], logits.logsumexp(dim=-1))
        objective = draft(batch, coefficients_for(draft, batch)).objective
        objective.backward()
        assert bool(objective.isfinite())
    assert all(
        part.grad is not None and bool(part.grad.isfinite().all()) for part in draft.parameters() if part.requires_grad
    )
