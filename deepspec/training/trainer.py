"""The training loop: features in, weighted sums of losses out, one update per global batch.

It knows `features.complete(tokens)`, `model(batch, coefficients)` and the optimizer, not which algorithm or target
family is behind them. Losses are divided by counts over the whole global batch, so the gradient does not depend on how
a batch is cut into micro-batches or spread over processes.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from deepspec import console
from deepspec.algorithms.base import DraftModel
from deepspec.config import TrainConfig
from deepspec.data.features import FeatureSource
from deepspec.data.loader import BatchLoader, StepBatches, distinct
from deepspec.evaluation.during_training import TrainingProbe
from deepspec.lookup import unknown_name
from deepspec.training import checkpoint as checkpoints
from deepspec.training.checkpoint import Progress, TrainingState
from deepspec.training.engines import make_engine, masters
from deepspec.training.guard import SKIPPED, FiniteGuard, Update
from deepspec.training.loggers import METRICS, RunLog, read_lines
from deepspec.training.meters import Meters
from deepspec.training.optim import learning_rate
from deepspec.training.resume import check_order, check_target
from deepspec.training.rotation import Keep
from deepspec.training.signals import stop_error
from deepspec.training.spikes import SpikeAlarm
from deepspec.types import Ratio, TokenBatch


class Trainer:
    """Trains one draft model in one run folder.

    Args:
        draft: the draft model; its trainable parameters become fp32 master weights.
        features: completes token batches with what the target says about them.
        loader: this process's micro-batches of every step.
        write_draft: writes the draft, with the weights given, into a checkpoint folder.
        sample_ids: id of each sample, for error messages.
        accelerator: the processes and the device.
        config: the run's configuration.
        folder: the run folder.
        data: fingerprint of the training data, kept in the checkpoints.
        target: fingerprint of the target, kept there as well.
        stop: number of a signal that asks for an end, 0 for none, the same on all processes; asked after every step.
        probe: decodes prompts with the weights of the moment, None for no such evaluation.
    """

    def __init__(
        self,
        *,
        draft: DraftModel,
        features: FeatureSource,
        loader: BatchLoader,
        write_draft: Callable[[Path, Mapping[str, Tensor]], None],
        sample_ids: Sequence[str],
        accelerator: Accelerator,
        config: TrainConfig,
        folder: Path,
        data: str,
        target: str,
        stop: Callable[[], int] = lambda: 0,
        probe: TrainingProbe | None = None,
    ) -> None:
        """Prepare model and optimizer; nothing is written yet."""
        self.draft = draft.train()
        self._features = features
        self.loader = loader
        self._write_draft = write_draft
        self._accelerator = accelerator
        self._config = config
        self._folder = folder
        self._data, self._target = data, target
        self._stop = stop
        self._probe = probe
        self._needed_bytes = checkpoints.bytes_needed(draft)
        self.engine = make_engine(self.draft, accelerator, config.engine, config.optimizer)
        self._progress = Progress(step=0, samples=0)
        self._total_steps = self._planned_steps()
        self._meters = Meters()
        self._spikes = SpikeAlarm()
        self._unknown_best = config.checkpoint.keep_best
        self._last_line: dict[str, float | int] = {}
        self._skips_bad = config.optimizer.on_nonfinite == "skip"
        record = folder / SKIPPED if accelerator.is_main_process else None
        self._guard = FiniteGuard(sample_ids, skips=self._skips_bad, record=record)

    def restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint exactly.

        Raises:
            ConfigError: the target is another one, or the samples that are left of the epoch would be others.
            CheckpointError: the checkpoint is of a draft with other parameters.
        """
        state = checkpoints.read_training_state(checkpoint)
        check_target(checkpoint, state, self._config, self._target)
        if state.data == self._data:
            check_order(checkpoint, state, self._config, self.loader.left_in_epoch(state.progress.samples))
        checkpoints.load_training_state(checkpoint, self.engine)
        self._progress = state.progress
        self._total_steps = self._planned_steps()
        if self._accelerator.is_main_process:
            self._meters.load(state.meters)
            self._last_line = dict(state.metrics)
            for line in read_lines(self._folder / METRICS):
                if line["step"] <= self.step:
                    self._spikes.recall(line)

    @property
    def is_finished(self) -> bool:
        """Whether no step is left."""
        return self._progress.step >= self._total_steps

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self._progress.step

    def run(self) -> Path:
        """Train to the last step and return the final checkpoint.

        Raises:
            StoppedError: a signal asked for an end, and a checkpoint of the step reached was written.
            NonFiniteLossError: a loss or gradient became NaN or infinite; the checkpoints before are sound.
            CheckpointError: a checkpoint could not be written; those before are untouched.
            ConfigError: no line of metrics holds the number that the best checkpoint is to be kept by.
        """
        final = self._folder / f"step_{self._progress.step}"
        every = self._config.logger.every_steps
        save_every = self._config.checkpoint.every_steps
        if self._accelerator.is_main_process:
            checkpoints.check_room(self._folder, self._needed_bytes)
        with self._open_log() as log:
            since, logged = time.perf_counter(), self._progress.step
            for batches in self._steps_left():
                rate = self._update(batches)
                step = self._progress.step
                is_last = step == self._total_steps
                if log is not None:
                    log.advance()
                is_decoded = self._is_decoded(is_last)
                if is_last or is_decoded or step % every == 0:
                    self._guard.check()
                    seconds = (time.perf_counter() - since) / (step - logged)
                    decoded = self._decode() if is_decoded else {}
                    self._log_line(log, rate, batches.epoch, seconds, decoded)
                    since, logged = time.perf_counter(), step
                stopped_by = 0 if is_last else self._stop()
                if is_last or stopped_by or (save_every is not None and step % save_every == 0):
                    final = self._save()
                if stopped_by:
                    raise stop_error(stopped_by, f"after step {step}, which is in {final}")
        if log is not None:
            console.info(f"trained to step {self._progress.step}: {log.status}   checkpoint: {final}")
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
        # Over all processes the counts sum to the number of steps.
        steps = torch.tensor(1.0 / self._accelerator.num_processes, dtype=torch.float64)
        self._meters.add({"tokens": Ratio(torch.tensor(num_tokens), steps)})
        self._meters.mark()
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
            terms = self.engine.accumulate(batch, coefficients, is_last=is_last)
            objectives.append(terms.objective.detach())
            self._meters.add({f"loss/{name}": ratio for name, ratio in terms.losses.items()})
            self._meters.add(terms.metrics)
        return objectives

    def _planned_steps(self) -> int:
        """Optimizer steps of the whole run; epochs count samples, of which earlier steps may have held others."""
        settings, progress = self._config.optimizer, self._progress
        if settings.steps is not None:
            return settings.steps
        assert settings.epochs is not None
        return progress.step + self.loader.steps_left(progress.samples, settings.epochs)

    def _steps_left(self) -> Iterator[StepBatches]:
        """The steps that are still to be taken; features hear of each before the one ahead of it is taken."""
        left = max(self._total_steps - self._progress.step, 0)
        waiting: StepBatches | None = None
        for batches in itertools.islice(self.loader.steps(*self._progress), left):
            self._features.upcoming(batches.micro_batches)
            if waiting is not None:
                yield waiting
            waiting = batches
        if waiting is not None:
            yield waiting

    def _update(self, batches: StepBatches) -> float:
        """Take one optimizer step and return its learning rate."""
        objectives = self.accumulate_gradients(batches.micro_batches)
        rate = self._learning_rate(self._progress.step)
        norm = self.engine.step(rate, self._skips_bad)
        self._meters.add({"gradient_norm": Ratio(norm, torch.ones_like(norm))})
        if self._skips_bad:
            is_bad = ~norm.isfinite()
            self._meters.undo_if(is_bad)
            self._meters.add({"skipped_updates": Ratio(is_bad / self._accelerator.num_processes, norm.new_ones(()))})
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

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        total: Tensor = self._accelerator.reduce(tensor, reduction="sum")
        return total

    def _loss_weights(self) -> dict[str, float]:
        return self.draft.loss_weights_at(min(self._progress.step / max(self._total_steps - 1, 1), 1.0))

    def _learning_rate(self, step: int) -> float:
        settings = self._config.optimizer
        return learning_rate(
            step,
            peak=settings.learning_rate,
            total_steps=self._total_steps,
            warmup_share=settings.warmup_share,
            schedule=settings.schedule,
            decay_share=settings.decay_share,
        )

    def _is_decoded(self, is_last: bool) -> bool:
        """Whether prompts are decoded after this step; the main process looks at the clock for all."""
        if self._probe is None or not self._probe.is_planned(self._progress.step, is_last=is_last):
            return False
        is_due = self._accelerator.is_main_process and self._probe.has_time(is_last=is_last)
        return bool(self._all_reduce(torch.tensor(float(is_due), device=self._accelerator.device)) > 0)

    def _decode(self) -> dict[str, float]:
        """Acceptance length of the weights of the moment; all processes must call this."""
        assert self._probe is not None
        if not self._config.engine.is_sharded:
            weights: Mapping[str, Tensor] | None = self.draft.state_dict()
            rank, size = self._accelerator.process_index, self._accelerator.num_processes
        else:
            gathered = self.draft.state_dict() | masters(self.engine.gather())
            weights, rank, size = gathered if self._accelerator.is_main_process else None, 0, 1
        return self._probe.measure(weights, rank, size, self._all_reduce)

    def _log_line(
        self, log: RunLog | None, rate: float, epoch: int, seconds_per_step: float, decoded: Mapping[str, float]
    ) -> None:
        """Reduce the meters, on all processes, and write a line on the main one."""
        sums = self._meters.reduce(self._all_reduce, self._accelerator.device)
        tokens = sums.pop("tokens").mean
        skipped = {"skipped_updates": sums.pop("skipped_updates").total} if self._skips_bad else {}
        means = {name: value.mean for name, value in sorted(sums.items())}
        weights = self._loss_weights()
        parts = [weight * means[f"loss/{name}"] for name, weight in weights.items() if sums[f"loss/{name}"].count]
        line: dict[str, float | int] = {
            "step": self._progress.step,
            "samples": self._progress.samples,
            "epoch": epoch,
            "loss": sum(parts) if parts else float("nan"),
            **means,
            **skipped,
            **decoded,
            "learning_rate": rate,
            "tokens_per_second": tokens / seconds_per_step,
            "seconds_per_step": seconds_per_step,
        }
        self._check_best(line, is_decoded=bool(decoded))
        if log is not None:
            line["spikes"] = self._spikes.look(line)
            self._last_line = line
            log.write(line)

    def _check_best(self, line: Mapping[str, float], *, is_decoded: bool) -> None:
        """Refuse, at the first line that should hold it, a number to keep the best checkpoint by that never comes."""
        name = self._unknown_best
        if name is None or (name.startswith("eval/") and not is_decoded):
            return
        if name not in line:
            raise unknown_name("checkpoint.keep_best", name, line)
        self._unknown_best = None

    def _open_log(self) -> contextlib.AbstractContextManager[RunLog | None]:
        if not self._accelerator.is_main_process:
            return contextlib.nullcontext()
        return RunLog(self._folder, self._config, first_step=self._progress.step, total_steps=self._total_steps)

    def _save(self) -> Path:
        """Write a checkpoint from the main process, after making sure that no update was poisoned."""
        self._guard.check()
        step = self._progress.step
        tensors = self.engine.gather()
        meters = self._meters.fold(self._all_reduce, self._accelerator.device, self._accelerator.is_main_process)
        if not self._accelerator.is_main_process:
            return self._folder / f"step_{step}"
        state = TrainingState(
            self._progress,
            self._total_steps,
            self._data,
            self._target,
            self._config.model_dump(mode="json"),
            self._last_line,
            meters,
        )
        settings = self._config.checkpoint
        keep = Keep(settings.keep_last, settings.keep_every, settings.keep_best, settings.best_is)

        def write(folder: Path) -> None:
            self._write_draft(folder, masters(tensors))
            checkpoints.save_training_state(folder, tensors, state)

        return checkpoints.save_checkpoint(self._folder, step, write, keep, self._needed_bytes)
