"""The training loop: features in, weighted sums of losses out, one update per global batch.

It knows `features.complete(tokens)`, `model(batch, coefficients)` and the optimizer, not which algorithm or target
family is behind them. Losses are divided by counts over the whole global batch, so the gradient does not depend on how
a batch is cut into micro-batches or spread over processes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list
from torch import Tensor, nn

from deepspec import console, flex
from deepspec.algorithms.base import DraftModel, build_draft
from deepspec.algorithms.checkpoint import save_draft
from deepspec.config import TrainConfig
from deepspec.data.features import FeatureMemory, OnlineFeatures
from deepspec.data.loader import BatchLimits, BatchLoader, StepBatches, distinct
from deepspec.data.samples import answer_runs, read_token_samples
from deepspec.errors import CheckpointError, ConfigError
from deepspec.files import write_json
from deepspec.runtime import choose_device, provenance
from deepspec.targets.base import Target
from deepspec.training import checkpoint as checkpoints
from deepspec.training.checkpoint import Progress, TrainingState
from deepspec.training.guard import FiniteGuard, Update
from deepspec.training.loggers import METRICS, RunLog, drop_lines_after
from deepspec.training.meters import Meters
from deepspec.training.optim import clip_gradients, learning_rate, make_optimizer, set_learning_rate
from deepspec.training.resume import Start, find_start, planned_steps
from deepspec.types import Ratio, TokenBatch


class Trainer:
    """Trains one draft model in one run folder.

    Args:
        draft: the draft model; its trainable parameters become fp32 master weights.
        features: completes token batches with what the target says about them.
        loader: this process's micro-batches of every step.
        write_draft: writes the draft into a checkpoint folder.
        sample_ids: id of each sample, for error messages.
        accelerator: the processes and the device.
        config: the run's configuration.
        folder: the run folder.
        data: fingerprint of the training data, kept in the checkpoints.
    """

    def __init__(
        self,
        *,
        draft: DraftModel,
        features: OnlineFeatures,
        loader: BatchLoader,
        write_draft: Callable[[Path], None],
        sample_ids: Sequence[str],
        accelerator: Accelerator,
        config: TrainConfig,
        folder: Path,
        data: str,
    ) -> None:
        """Prepare model and optimizer; nothing is written yet."""
        for parameter in draft.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        self.draft = draft.train()
        self._features = features
        self.loader = loader
        self._write_draft = write_draft
        self._accelerator = accelerator
        self._config = config
        self._folder = folder
        self._data = data
        self._total_steps = planned_steps(config, loader.steps_per_epoch)
        optimizer = make_optimizer(
            draft.parameters(), betas=config.optimizer.betas, weight_decay=config.optimizer.weight_decay
        )
        self._model, self._optimizer = accelerator.prepare(draft, optimizer)
        if isinstance(self._model, nn.parallel.DistributedDataParallel):
            self._model.device_ids = None  # it would copy to the device, and wait for, what stays on the host
        self._trainable = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        self._progress = Progress(step=0, samples=0)
        self._meters = Meters()
        self._guard = FiniteGuard(sample_ids)
        # DDP averages gradients over processes; losses are already divided by global counts.
        self._unscale = float(accelerator.num_processes)

    def restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint exactly."""
        checkpoints.load_training_state(checkpoint, self.draft, self._optimizer)
        self._progress = checkpoints.read_training_state(checkpoint).progress

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self._progress.step

    def run(self) -> Path:
        """Train to the last step and return the final checkpoint.

        Raises:
            NonFiniteLossError: a loss or gradient became NaN or infinite; the checkpoints before are sound.
            CheckpointError: a checkpoint could not be written; those before are untouched.
        """
        final = self._folder / f"step_{self._progress.step}"
        every = self._config.logger.every_steps
        save_every = self._config.checkpoint.every_steps
        with self._open_log() as log:
            since, logged = time.perf_counter(), self._progress.step
            for batches in self.loader.steps(self._progress.step):
                if self._progress.step >= self._total_steps:
                    break
                rate = self._update(batches)
                step = self._progress.step
                is_last = step == self._total_steps
                if log is not None:
                    log.advance()
                if is_last or step % every == 0:
                    self._guard.check(self._all_reduce)
                    seconds = (time.perf_counter() - since) / (step - logged)
                    self._log_line(log, rate, batches.epoch, seconds, step - logged)
                    since, logged = time.perf_counter(), step
                if is_last or (save_every is not None and step % save_every == 0):
                    final = self._save()
        return final

    def accumulate_gradients(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        """Leave the gradient of the whole global batch in the parameters, reading nothing back from the device.

        Only the log normalisers of a reduced vocabulary, and features kept in host memory, wait for it.

        Args:
            micro_batches: this process's part of the global batch.

        Returns:
            The objective of each micro-batch, still on the device.
        """
        # Counted on the host, where the loader made the batches.
        num_tokens = sum(int(tokens.lengths.sum()) for tokens in distinct(micro_batches))
        self._meters.add({"tokens": Ratio(torch.tensor(num_tokens), torch.tensor(1))})
        plans = [self.draft.slot_plan(tokens) for tokens in micro_batches]
        micro_batches = [self._on_device(tokens) for tokens in micro_batches]
        coefficients = self._coefficients(micro_batches)
        objectives: list[Tensor] = []
        batch = None
        for index, tokens in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            if batch is not None and batch.tokens.sample_index is not tokens.sample_index:
                batch = None  # its features are not needed, and the target's next ones take as much room
            batch = self._features.complete(tokens, batch)._replace(plan=plans[index])
            with contextlib.nullcontext() if is_last else self._accelerator.no_sync(self._model):
                with self._autocast():
                    terms = self._model(batch, coefficients)
                objective = terms.objective
                if is_last and self._accelerator.num_processes > 1:
                    objective = objective + self._zero()
                if objective.requires_grad:
                    self._accelerator.backward(objective * self._unscale)
            objectives.append(objective.detach())
            self._meters.add({f"loss/{name}": ratio for name, ratio in terms.losses.items()})
            self._meters.add(terms.metrics)
        return objectives

    def _update(self, batches: StepBatches) -> float:
        """Take one optimizer step and return its learning rate."""
        objectives = self.accumulate_gradients(batches.micro_batches)
        norm = clip_gradients(self._trainable, self._config.optimizer.clip_norm)
        self._meters.add({"gradient_norm": Ratio(norm, torch.ones_like(norm))})
        rate = self._learning_rate(self._progress.step)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._progress = Progress(self._progress.step + 1, self._progress.samples + batches.num_samples)
        indices = [tokens.sample_index for tokens in batches.micro_batches]
        self._guard.add(Update(self._progress.step, norm, objectives, indices))
        return rate

    def _on_device(self, tokens: TokenBatch) -> TokenBatch:
        """Copy a batch to the device; the sample index stays, since only the host looks at it."""
        device = self._accelerator.device
        moved = TokenBatch(*(tensor.to(device, non_blocking=True) for tensor in tokens))
        return moved._replace(sample_index=tokens.sample_index)

    def _coefficients(self, micro_batches: Sequence[TokenBatch]) -> dict[str, Tensor]:
        """Weight of each loss over its count in the whole global batch: one all-reduce, before any forward."""
        weights = self._loss_weights()
        names = sorted(weights)
        local = [self.draft.loss_counts(tokens) for tokens in micro_batches]
        sums = torch.stack([torch.stack([counts[name] for counts in local]).sum() for name in names])
        counts = self._all_reduce(sums)
        values = torch.tensor([weights[name] for name in names]).to(counts.device, non_blocking=True)
        coefficients = torch.where(counts > 0, values / counts.clamp(min=torch.finfo(counts.dtype).tiny), 0.0)
        return dict(zip(names, coefficients.unbind(), strict=True))

    def _zero(self) -> Tensor:
        """A zero that depends on every parameter.

        DDP waits in its synchronising backward for every gradient; on a process without a supervised token the losses
        do not reach all parameters, and the other processes would wait for ever.
        """
        return 0.0 * torch.stack([parameter.sum() for parameter in self._trainable]).sum()

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        is_bf16 = self._config.engine.precision == "bf16"
        return torch.autocast(self._accelerator.device.type, dtype=torch.bfloat16, enabled=is_bf16)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        total: Tensor = self._accelerator.reduce(tensor, reduction="sum")
        return total

    def _loss_weights(self) -> dict[str, float]:
        return self.draft.loss_weights_at(min(self._progress.step / max(self._total_steps - 1, 1), 1.0))

    def _learning_rate(self, step: int) -> float:
        settings = self._config.optimizer
        return learning_rate(
            step, peak=settings.learning_rate, total_steps=self._total_steps, warmup_share=settings.warmup_share
        )

    def _log_line(self, log: RunLog | None, rate: float, epoch: int, seconds_per_step: float, steps: int) -> None:
        """Reduce the meters, on all processes, and write a line on the main one."""
        sums = self._meters.reduce(self._all_reduce, self._accelerator.device)
        if log is None:
            return
        tokens = sums.pop("tokens").total
        means = {name: value.mean for name, value in sorted(sums.items())}
        weights = self._loss_weights()
        loss = sum(weight * means[f"loss/{name}"] for name, weight in weights.items() if sums[f"loss/{name}"].count)
        line: dict[str, float | int] = {
            "step": self._progress.step,
            "samples": self._progress.samples,
            "epoch": epoch,
            "loss": loss,
            **means,
            "learning_rate": rate,
            "tokens_per_second": tokens / steps / seconds_per_step,
            "seconds_per_step": seconds_per_step,
        }
        log.write(line)

    def _open_log(self) -> contextlib.AbstractContextManager[RunLog | None]:
        if not self._accelerator.is_main_process:
            return contextlib.nullcontext()
        settings = self._config.logger
        return RunLog(
            self._folder,
            first_step=self._progress.step,
            total_steps=self._total_steps,
            config=self._config.model_dump(mode="json"),
            tensorboard=settings.tensorboard,
            wandb_project=settings.wandb_project if settings.wandb else None,
        )

    def _save(self) -> Path:
        """Write a checkpoint from the main process, after making sure that no update was poisoned."""
        self._guard.check(self._all_reduce)
        step = self._progress.step
        if not self._accelerator.is_main_process:
            return self._folder / f"step_{step}"
        state = TrainingState(
            self._progress, self.loader.steps_per_epoch, self._data, self._config.model_dump(mode="json")
        )

        def write(folder: Path) -> None:
            self._write_draft(folder)
            checkpoints.save_training_state(folder, self.draft, self._optimizer, state)

        return checkpoints.save_checkpoint(self._folder, step, write, self._config.checkpoint.keep_last)


def train(config: TrainConfig, memory: FeatureMemory | None = None) -> Path:
    """Train one draft in this process, which may be one of several, and return the last checkpoint.

    A run that finds checkpoints of its own continues from the last whole one; a finished run returns it at once.

    Args:
        config: the run.
        memory: target passes shared with other trainings of this process; None makes one as `features` says.

    Raises:
        DeepSpecError: the configuration, data, target or run folder cannot be used; or training had to stop.
    """
    device = choose_device(config.engine.device)
    accelerator = _make_accelerator(device)
    folder = config.run_dir
    if not accelerator.is_main_process:
        console.set_quiet(True)
    with contextlib.ExitStack() as stack:
        starts: list[Start | None] = [None]
        if accelerator.is_main_process:
            stack.enter_context(checkpoints.lock_run_folder(folder))
            checkpoints.remove_leftovers(folder)
            starts = [find_start(config, folder)]
        broadcast_object_list(starts)
        start = starts[0]
        assert start is not None
        if start.checkpoint is not None and start.is_finished:
            console.info(f"{folder} is finished: {start.checkpoint.name} is its last checkpoint.")
            return start.checkpoint
        memory = memory or FeatureMemory(config.features.memory_gib)
        trainer = build_trainer(config, accelerator, device, start.data, memory)
        if start.checkpoint is not None:
            trainer.restore(start.checkpoint)
            console.info(f"continuing from {start.checkpoint}")
        if accelerator.is_main_process:
            try:
                if start.checkpoint is not None:  # a damaged later one may hold the name
                    checkpoints.point_latest(folder, start.checkpoint)
                write_json(folder / "config.json", config.model_dump(mode="json"))
                write_json(folder / "provenance.json", provenance())
                drop_lines_after(folder / METRICS, trainer.step)
            except OSError as error:
                raise CheckpointError(
                    f"cannot write into the run folder {folder}: {error}. Make room there or choose another "
                    "output_dir, then start the same command again."
                ) from error
        final = trainer.run()
        # The main process may still be writing; ending early here would take its communication down.
        accelerator.wait_for_everyone()
        return final


def _make_accelerator(device: torch.device) -> Accelerator:
    # Gradients are accumulated by hand and autocast is ours, so Accelerate is asked for neither.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=[ddp])
    wanted = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != wanted:
        raise ConfigError(
            f"{wanted} processes were started (WORLD_SIZE), but Accelerate runs {accelerator.num_processes}. "
            "Start them with torchrun, or with train.py and engine.num_processes."
        )
    return accelerator


def build_trainer(
    config: TrainConfig, accelerator: Accelerator, device: torch.device, data: str, memory: FeatureMemory
) -> Trainer:
    """Load target and data, and make the draft and everything around it."""
    target = Target.load(config.target, device)
    samples, counts = read_token_samples(
        config.data.answers,
        target.tokenizer,
        config.data,
        enable_thinking=config.target.enable_thinking,
        system_prompt=config.target.system_prompt,
        vocab_size=target.vocab_size,
        target_name=config.target.name_or_path,
    )
    console.info(
        f"{counts.samples:,} samples with {counts.answer_tokens:,} answer tokens from {counts.rows:,} rows "
        f"({counts.bad_rows:,} broken, {counts.truncated:,} cut or dropped at {config.data.max_length} tokens, "
        f"{counts.too_short:,} too short)"
    )
    draft = build_draft(config.algorithm, target, answer_runs(samples), config.seed)
    draft.checkpoints_gradients = config.engine.gradient_checkpointing
    draft.attention_form = config.engine.attention
    if device.type == "cuda" and config.engine.attention in ("auto", "flex"):
        flex.probe(draft.layer_config, device, torch.bfloat16 if config.engine.precision == "bf16" else torch.float32)
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
        features=OnlineFeatures(target, samples, memory, needs_log_normaliser=draft.needs_log_normaliser),
        write_draft=functools.partial(save_draft, draft, num_anchors=config.data.num_anchors),
        loader=loader,
        sample_ids=[sample.id for sample in samples],
        accelerator=accelerator,
        config=config,
        folder=config.run_dir,
        data=data,
    )
