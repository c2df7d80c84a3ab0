"""One run from its configuration to its last checkpoint: where it starts, what it is made of, one process of several.

It puts target, data, draft and trainer together and knows no training step itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from deepspec import console, flex
from deepspec.algorithms.base import build_draft
from deepspec.algorithms.checkpoint import save_draft
from deepspec.config import TrainConfig
from deepspec.data.cache_manifest import head_hash
from deepspec.data.cached import feature_source
from deepspec.data.features import FeatureMemory
from deepspec.data.loader import BatchLimits, BatchLoader
from deepspec.data.samples import AnswerRuns, read_run_samples
from deepspec.errors import CheckpointError
from deepspec.evaluation.during_training import TrainingProbe
from deepspec.files import write_json
from deepspec.runtime import choose_device, provenance
from deepspec.targets.base import Target
from deepspec.targets.head_only import load_head_only
from deepspec.training import checkpoint as checkpoints
from deepspec.training.accelerator import make_accelerator
from deepspec.training.guard import SKIPPED
from deepspec.training.lock import lock_run_folder
from deepspec.training.loggers import METRICS, drop_lines_after
from deepspec.training.memory import memory_named
from deepspec.training.peers import Peers
from deepspec.training.resume import Start, find_start
from deepspec.training.runs import CONFIG, PROVENANCE, read_starts
from deepspec.training.signals import StoppedError, StopSignals
from deepspec.training.trainer import Trainer
from deepspec.training.warm_start import warm_started


def train(config: TrainConfig, memory: FeatureMemory | None = None) -> Path:
    """Train one draft in this process, which may be one of several, and return the last checkpoint.

    A run that finds checkpoints of its own continues from the last whole one; a finished run returns it at once. Asked
    to stop by a signal, it ends with StoppedError after the step that it is in and a checkpoint.

    Args:
        config: the run.
        memory: target passes shared with other trainings of this process; None makes one as `features` says.

    Raises:
        DeepSpecError: the configuration, data, target or run folder cannot be used; or training had to stop.
    """
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        device = choose_device(config.engine.device)
        accelerator = make_accelerator(
            config.engine, config.optimizer.clip_norm, device, int(os.environ.get("WORLD_SIZE", "1"))
        )
        folder = config.run_dir
        if not accelerator.is_main_process:
            console.set_quiet(True)
        peers = Peers(config.engine.timeout_seconds)
        stack.enter_context(peers.told())
        stack.enter_context(memory_named(config))
        starts: list[Start | None] = [None]
        if accelerator.is_main_process:
            stack.enter_context(lock_run_folder(folder))
            checkpoints.remove_leftovers(folder)
            starts = [find_start(config, folder)]
        broadcast_object_list(starts)
        start = starts[0]
        assert start is not None
        if start.checkpoint is not None and start.is_finished:
            return _finished(folder, start.checkpoint)
        memory = memory or FeatureMemory(config.features.memory_gib)
        weights = start.checkpoint or config.checkpoint.warm_start
        trainer = build_trainer(
            config, accelerator, device, start.data, memory, weights, lambda: peers.largest(signals.requested)
        )
        if start.checkpoint is not None:
            trainer.restore(start.checkpoint)
            if trainer.is_finished:
                accelerator.wait_for_everyone()  # others may still be restoring; as below
                return _finished(folder, start.checkpoint)
            console.info(f"continuing from {start.checkpoint}")
        if accelerator.is_main_process:
            _prepare_folder(config, start, trainer.step)
        with signals.until_boundary():
            try:
                final = trainer.run()
            except StoppedError:
                # As below; the others would be ended in the middle of the main one's save.
                accelerator.wait_for_everyone()
                raise
            # The main process may still be writing; ending early here would take its communication down.
            accelerator.wait_for_everyone()
            return final


def _finished(folder: Path, checkpoint: Path) -> Path:
    console.info(f"{folder} is finished: {checkpoint.name} is its last checkpoint.")
    return checkpoint


def _prepare_folder(config: TrainConfig, start: Start, step: int) -> None:
    """Say in the run folder what runs, and drop what an earlier process wrote past the step that is continued from."""
    folder = config.run_dir
    try:
        if start.checkpoint is not None and start.checkpoint.parent == folder:
            checkpoints.point_latest(folder, start.checkpoint)  # a damaged later one may hold the name
        write_json(folder / CONFIG, config.model_dump(mode="json"))
        # A start from this step or a later one took no step that is still there.
        starts = [earlier for earlier in read_starts(folder) if earlier["step"] < step]
        write_json(folder / PROVENANCE, [*starts, {"step": step, **provenance()}])
        drop_lines_after(folder / METRICS, step)
        drop_lines_after(folder / SKIPPED, step)
    except OSError as error:
        raise CheckpointError(
            f"cannot write into the run folder {folder}: {error}. Make room there or choose another "
            "output_dir, then start the same command again."
        ) from error


def build_trainer(
    config: TrainConfig,
    accelerator: Accelerator,
    device: torch.device,
    data: str,
    memory: FeatureMemory,
    weights: str | Path | None = None,
    stop: Callable[[], int] = lambda: 0,
) -> Trainer:
    """Load target and data, and make the draft and everything around it.

    Args:
        config: the run.
        accelerator: its processes.
        device: of this one.
        data: fingerprint of the training data.
        memory: where target passes are kept.
        weights: saved draft that the weights and a reduced vocabulary come from; None makes them.
        stop: see Trainer.
    """
    # Where features are read, nothing but decoding runs the target's layers; a draft that starts from some reads these.
    decodes = config.evaluation.every_steps is not None
    needs_layers = config.features.source == "online" or decodes
    target = (Target.load if needs_layers else load_head_only)(config.target, device)
    samples, counts = read_run_samples(config, target)
    console.info(
        f"{counts.samples:,} samples with {counts.answer_tokens:,} answer tokens from {counts.rows:,} rows "
        f"({counts.bad_rows:,} broken, {counts.truncated:,} cut or dropped at {config.data.max_length} tokens, "
        f"{counts.too_short:,} too short)"
    )
    draft = (
        build_draft(config.algorithm, target, AnswerRuns(samples), config.seed)
        if weights is None
        else warm_started(weights, config.algorithm, target)
    )
    draft.checkpoints_gradients = config.engine.gradient_checkpointing
    draft.attention_form = config.engine.attention
    if device.type == "cuda" and config.engine.attention in ("auto", "flex"):
        attention = next(layer.self_attn for layer in draft.modules() if hasattr(layer, "self_attn"))
        flex.probe(attention, device, torch.bfloat16 if config.engine.precision == "bf16" else torch.float32)
    pad_token_id = target.tokenizer.pad_token_id
    loader = BatchLoader(
        samples,
        limits=BatchLimits(
            global_batch_size=config.optimizer.global_batch_size,
            micro_batch_size=config.optimizer.micro_batch_size,
            bucket_steps=config.data.bucket_steps,
            max_tokens=config.data.max_tokens_per_batch,
            max_anchors=config.data.max_anchors_per_batch,
            anchor_sets=config.anchor_sets,
        ),
        num_anchors=config.data.num_anchors * config.anchor_sets,
        seed=config.seed,
        pad_token_id=0 if pad_token_id is None else pad_token_id,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    return Trainer(
        draft=draft,
        features=feature_source(config.features, target, samples, memory, draft.needs_log_normaliser),
        write_draft=functools.partial(save_draft, draft, num_anchors=config.data.num_anchors),
        loader=loader,
        sample_ids=[sample.id for sample in samples],
        accelerator=accelerator,
        config=config,
        folder=config.run_dir,
        data=data,
        target=head_hash(target),
        stop=stop,
        probe=TrainingProbe(draft, target, config) if decodes else None,
    )
