"""Planned memory against what torch's profiler sees of a real step on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from chat_targets import ascii_tokenizer
from helpers import most_bytes_during
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from deepspec.algorithms.base import DraftModel, build_draft
from deepspec.attention import GROUPED_SDPA
from deepspec.config import TrainConfig, compose_train
from deepspec.data.cache_manifest import manifest_of
from deepspec.data.cache_writer import open_writer
from deepspec.data.cached import CachedFeatures, feature_source
from deepspec.data.chat import TokenSample
from deepspec.data.features import FeatureMemory, TargetPass
from deepspec.data.loader import BatchLimits, BatchLoader
from deepspec.planning.dryrun import DryRun, StepShape
from deepspec.targets.base import Target
from deepspec.targets.head_only import load_head_only
from deepspec.training.trainer import Trainer
from deepspec.types import FeatureBatch

SHAPE = StepShape(batch=2, length=192, answer=150, num_anchors=20)


def small_target() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
    )


def settings(algorithm: str, *overrides: str) -> TrainConfig:
    own = {"dspark": ["algorithm.num_layers=2", "algorithm.markov_rank=16"], "dflash": ["algorithm.num_layers=2"]}
    return compose_train(
        [
            f"algorithm={algorithm}",
            "target=qwen3_4b",
            "target.mask_token_id=95",
            "target.layers=[0,1,3]",
            "engine.device=cpu",
            f"optimizer.global_batch_size={2 * SHAPE.batch}",
            f"optimizer.micro_batch_size={SHAPE.batch}",
            "optimizer.epochs=null",
            "optimizer.steps=2",
            *own.get(algorithm, []),
            *overrides,
        ]
    )


def held_bytes(tensors: Iterable[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def made_target(config: TrainConfig) -> Target:
    """The target of a run, all of it."""
    torch.manual_seed(0)
    sizes = small_target()
    sizes._attn_implementation = GROUPED_SDPA
    model = AutoModelForCausalLM.from_config(sizes, dtype=torch.bfloat16)
    layers, name = config.target.layers, config.target.name_or_path
    return Target(model, ascii_tokenizer(), name=name, layer_ids=layers, mask_token_id=config.target.mask_token_id)


def head_of_saved(config: TrainConfig, target: Target, samples: Sequence[TokenSample]) -> Target:
    """Write a target and what it says about samples; what a run over this cache loads of it."""
    target.model.save_pretrained(config.target.name_or_path)
    target.tokenizer.save_pretrained(config.target.name_or_path)
    manifest = manifest_of(target, config.target, "bf16", None)
    with open_writer(Path(config.features.cache), target, manifest, 1) as writer:
        for sample in samples:
            features, last_hidden = target.features(torch.tensor([sample.input_ids]))
            writer.keep(sample, TargetPass(features[0], last_hidden[0], None))
    return load_head_only(config.target, torch.device("cpu"))


def profiled_peak(config: TrainConfig, folder: Path) -> tuple[int, int]:
    """Bytes held before the second step of a real training, and the most during it."""
    target = made_target(config)
    is_answer = [position >= SHAPE.length - SHAPE.answer for position in range(SHAPE.length)]
    samples = [
        TokenSample(str(index), torch.randint(4, 90, (SHAPE.length,)).tolist(), is_answer)
        for index in range(2 * SHAPE.batch)
    ]
    if config.features.source == "cached":
        target = head_of_saved(config, target, samples)
    draft = build_draft(config.algorithm, target, [sample.input_ids for sample in samples], seed=0)
    draft.checkpoints_gradients = config.engine.gradient_checkpointing
    draft.attention_form = config.engine.attention
    memory = FeatureMemory(config.features.memory_gib)
    features = feature_source(config.features, target, samples, memory, draft.needs_log_normaliser)
    trainer = Trainer(
        draft=draft,
        features=features,
        loader=BatchLoader(
            samples,
            limits=BatchLimits(
                global_batch_size=2 * SHAPE.batch, micro_batch_size=SHAPE.batch, anchor_sets=config.anchor_sets
            ),
            num_anchors=SHAPE.num_anchors * config.anchor_sets,
            seed=0,
            pad_token_id=0,
        ),
        write_draft=lambda folder: None,
        sample_ids=[sample.id for sample in samples],
        accelerator=Accelerator(cpu=True),
        config=config,
        folder=folder,
        data="",
        target="",
    )
    steps = trainer.loader.steps()
    trainer._update(next(steps))
    batches, following = next(steps), next(steps)
    moments = [value for state in trainer.engine.optimizer.state.values() for value in state.values()]
    model = target.model
    held = held_bytes([*model.parameters(), *model.buffers(), *draft.parameters(), draft.draft_head_weight, *moments])

    # The profiler sees only what this thread makes.
    by_threads = [0]
    if isinstance(features, CachedFeatures):

        def count(draft: DraftModel, given: tuple[FeatureBatch, dict[str, Tensor]]) -> None:
            """What threads have read, once all that they have begun is there."""
            waiting = [one.reading.result() for one in features._announced if one.reading is not None]
            by_threads.append(sum(one.nbytes for one in waiting) + TargetPass(*given[0][1:4]).nbytes)

        draft.register_forward_pre_hook(count)

    def step() -> None:
        # As the trainer, whose sources hear of a step while the one before it is taken.
        features.upcoming(batches.micro_batches)
        features.upcoming(following.micro_batches)
        trainer._update(batches)

    peak = most_bytes_during(step)
    return held, held + peak + max(by_threads)


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        ("dspark", ()),
        ("dflash", ()),
        ("eagle3", ()),
        ("dspark", ("algorithm.draft_vocab_size=1024",)),
        ("dflash", ("algorithm.draft_vocab_size=1024", "engine.precision=fp32")),
        ("eagle3", ("algorithm.draft_vocab_size=1024",)),
        ("dspark", ("engine.gradient_checkpointing=true",)),
        ("dspark", ("features.overlap=true",)),
        ("dspark", ("features.overlap=true", "features.anchors_per_target_pass=1024")),
        ("dflash", ("features.anchors_per_target_pass=1536",)),
        ("dspark", ("features=cached",)),
        ("eagle3", ("features=cached", "algorithm.draft_vocab_size=1024")),
    ],
)
def test_planned_peak_is_within_ten_percent_of_the_profiled_one(
    algorithm: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    config = settings(
        algorithm, f"target.name_or_path={tmp_path / 'target'}", f"features.cache={tmp_path / 'cache'}", *overrides
    )
    run = DryRun(config, small_target())
    planned = run.measure(SHAPE)
    held, peak = profiled_peak(config, tmp_path)
    assert planned.peak == pytest.approx(peak, rel=0.1)
    # What never moves could hide an error of the rest.
    passing = peak - held - 4 * run.parameters.trainable
    assert planned.peak - planned.static == pytest.approx(passing, rel=0.1)


def test_without_layers_to_run_the_planned_target_is_what_a_run_over_a_cache_loads(tmp_path: Path) -> None:
    words = [f"target.name_or_path={tmp_path / 'target'}", f"features.cache={tmp_path / 'cache'}", "features=cached"]
    config = settings("dspark", *words)
    loaded = head_of_saved(config, made_target(config), [])
    held = held_bytes([*loaded.model.parameters(), *loaded.model.buffers()])
    assert DryRun(config, small_target()).measure(SHAPE).parts["target"] == pytest.approx(held, rel=0.001)
    # A draft that is decoded meanwhile needs all of the target, and is there once more in the target's precision.
    every = settings("dspark", *words, "evaluation.every_steps=5")
    run = DryRun(every, small_target())
    whole = made_target(config).model
    parts = run.measure(SHAPE).parts
    assert parts["target"] == pytest.approx(held_bytes([*whole.parameters(), *whole.buffers()]), rel=0.001)
    assert parts["probe"] == pytest.approx(2 * run.parameters.trainable, rel=0.001)
