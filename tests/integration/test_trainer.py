"""The training loop around a small stand-in draft: splits, resume, bad numbers, logs."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate import Accelerator
from helpers import tiny_draft, tiny_target
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepspec.config import TrainConfig, compose_train
from deepspec.data.chat import TokenSample
from deepspec.data.features import FeatureMemory, OnlineFeatures
from deepspec.data.loader import BatchLimits, BatchLoader
from deepspec.errors import CheckpointError, ConfigError
from deepspec.files import hash_file
from deepspec.training.checkpoint import latest_valid, read_training_state
from deepspec.training.guard import SKIPPED, NonFiniteLossError
from deepspec.training.loggers import METRICS, drop_lines_after
from deepspec.training.resume import find_start
from deepspec.training.signals import StoppedError, StopSignals
from deepspec.training.trainer import Trainer
from deepspec.types import FeatureBatch, LossTerms, Ratio, TokenBatch

VOCAB, HIDDEN = 13, 6


class LinearDraft(nn.Module):
    """Predicts the token after each anchor from the features before it; sees nothing where there is no anchor."""

    loss_weights: ClassVar = {"ce": 0.25, "norm": 2.0}

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3)
        self.bias = nn.Parameter(torch.zeros(VOCAB))
        self.frozen = nn.Parameter(torch.ones(VOCAB, dtype=torch.bfloat16), requires_grad=False)

    def loss_weights_at(self, progress: float) -> dict[str, float]:
        return self.loss_weights

    def slot_plan(self, tokens: TokenBatch) -> None:
        """The forward finds its places itself."""

    def loss_counts(self, tokens: TokenBatch) -> dict[str, Tensor]:
        count = tokens.anchor_mask.sum().float()
        return {"ce": count, "norm": count}

    def forward(self, batch: FeatureBatch, coefficients: dict[str, Tensor]) -> LossTerms:
        tokens = batch.tokens
        rows, slots = tokens.anchor_mask.nonzero(as_tuple=True)
        positions = tokens.anchors[rows, slots]
        hidden = batch.features[rows, positions]
        logits = nn.functional.linear(hidden, self.weight, self.bias).float()
        labels = tokens.input_ids[rows, positions + 1]
        totals = {
            "ce": nn.functional.cross_entropy(logits, labels, reduction="sum"),
            "norm": logits.square().mean(dim=-1).sum(),
        }
        count = tokens.anchor_mask.sum().float()
        objective = torch.stack([coefficients[name] * total for name, total in totals.items()]).sum()
        hits = (logits.argmax(dim=-1) == labels).sum().float()
        losses = {name: Ratio(total.detach(), count) for name, total in totals.items()}
        return LossTerms(objective, losses, {"acceptance@1": Ratio(hits, count)})

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        save_file({"weight": weights["weight"], "bias": weights["bias"]}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")


class TableFeatures:
    """Features that depend on the token alone; the call `fail_at` interrupts the run, samples in `poison` give NaN."""

    def __init__(self, fail_at: int | None = None, poison: Sequence[int] = ()) -> None:
        self.table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
        self.calls = 0
        self.fail_at = fail_at
        self.poison = poison

    def upcoming(self, micro_batches: Sequence[TokenBatch]) -> None:
        """A table needs no time."""

    def complete(self, tokens: TokenBatch, before: FeatureBatch | None = None) -> FeatureBatch:
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        features = self.table[tokens.input_ids]
        is_poisoned = torch.isin(tokens.sample_index, torch.tensor(self.poison))
        features = features.masked_fill(is_poisoned[:, None, None], float("nan"))
        return FeatureBatch(tokens, features, features, None)


def make_samples(count: int = 22) -> list[TokenSample]:
    generator = torch.Generator().manual_seed(9)
    samples = []
    for number in range(count):
        length = int(torch.randint(4, 40, (1,), generator=generator))
        ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        samples.append(TokenSample(f"sample-{number}", ids, [position >= 2 for position in range(length)]))
    return samples


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    path.write_text("{}\n")
    return path


def make_config(answers: Path, *overrides: str) -> TrainConfig:
    return compose_train(
        [
            "experiment=dspark_smollm2_135m",
            f"data.answers={answers}",
            f"output_dir={answers.parent}",
            "exp_name=run",
            "engine.device=cpu",
            "engine.precision=fp32",
            "optimizer.epochs=null",
            "optimizer.steps=10",
            "optimizer.global_batch_size=8",
            "optimizer.micro_batch_size=4",
            "optimizer.learning_rate=0.05",
            "optimizer.warmup_share=0.2",
            "logger.every_steps=2",
            "checkpoint.every_steps=4",
            *overrides,
        ]
    )


def make_trainer(
    config: TrainConfig,
    features: TableFeatures | None = None,
    draft: Any = None,
    stop: Callable[[], int] = lambda: 0,
    samples: Sequence[TokenSample] = (),
    target: str = "a target",
) -> Trainer:
    samples = samples or make_samples()
    draft = draft if draft is not None else LinearDraft()
    loader = BatchLoader(
        samples,
        limits=BatchLimits(config.optimizer.global_batch_size, config.optimizer.micro_batch_size),
        num_anchors=6,
        seed=config.seed,
        pad_token_id=0,
    )
    config.run_dir.mkdir(exist_ok=True)
    return Trainer(
        draft=draft,
        features=features if features is not None else TableFeatures(),
        loader=loader,
        write_draft=draft.write,
        sample_ids=[sample.id for sample in samples],
        accelerator=Accelerator(cpu=True),
        config=config,
        folder=config.run_dir,
        data=hash_file(Path(config.data.answers)),
        target=target,
        stop=stop,
    )


def resume(config: TrainConfig, features: TableFeatures | None = None) -> Trainer:
    """A trainer that goes on from where the run's folder, or its checkpoint.resume, says."""
    start = find_start(config, config.run_dir)
    assert start.checkpoint is not None
    trainer = make_trainer(config, features, LinearDraft(seed=1))
    trainer.restore(start.checkpoint)
    drop_lines_after(config.run_dir / METRICS, trainer.step)
    return trainer


def assert_same_runs(one: TrainConfig, two: TrainConfig, step: int) -> None:
    """Bit for bit: weights, masters, optimizer, position, and every number in the metrics but the times."""
    folders = [config.run_dir / f"step_{step}" for config in (one, two)]
    for name in ("model.safetensors", "training_state.safetensors"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    states = [read_training_state(folder) for folder in folders]
    assert states[0].progress == states[1].progress
    assert states[0].meters == states[1].meters
    timing = ("tokens_per_second", "seconds_per_step")
    metrics = [
        [{key: value for key, value in line.items() if key not in timing} for line in read_metrics(config)]
        for config in (one, two)
    ]
    assert metrics[0] == metrics[1]


def read_metrics(config: TrainConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in (config.run_dir / METRICS).read_text().splitlines()]


def micro_batches(size: int) -> list[TokenBatch]:
    loader = BatchLoader(make_samples(), limits=BatchLimits(4, size), num_anchors=6, seed=3, pad_token_id=0)
    return next(loader.steps()).micro_batches


def test_gradient_does_not_depend_on_how_a_batch_is_split(answers: Path) -> None:
    gradients = []
    for size in (4, 2, 1):
        draft = LinearDraft()
        trainer = make_trainer(make_config(answers), draft=draft)
        batches = micro_batches(size)
        assert len(batches) == 4 // size
        trainer.accumulate_gradients(batches)
        gradients.append(torch.cat([draft.weight.grad.flatten(), draft.bias.grad]))
    reference = naive_gradient(micro_batches(4)[0])
    for gradient in gradients:
        # fp32 sums in another order
        assert (gradient - reference).norm() <= 1e-6 * reference.norm()


def test_gradient_does_not_depend_on_how_anchors_are_shared_out_over_target_passes(answers: Path) -> None:
    gradients = []
    for sets in (1, 3):
        draft = LinearDraft()
        loader = BatchLoader(
            make_samples(), limits=BatchLimits(4, 2, anchor_sets=sets), num_anchors=6, seed=3, pad_token_id=0
        )
        make_trainer(make_config(answers), draft=draft).accumulate_gradients(next(loader.steps()).micro_batches)
        gradients.append(torch.cat([draft.weight.grad.flatten(), draft.bias.grad]))
    assert (gradients[1] - gradients[0]).norm() <= 1e-6 * gradients[0].norm()


def test_processes_meet_once_a_step_for_the_denominators_and_once_a_log_line_for_the_metrics(
    answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    reduce = Accelerator.reduce

    def counted(self: Accelerator, tensor: Tensor, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return reduce(self, tensor, **options)

    monkeypatch.setattr(Accelerator, "reduce", counted)
    trainer = make_trainer(make_config(answers, "logger.every_steps=5", "checkpoint.every_steps=null"))
    assert all(len(step.micro_batches) > 1 for step, _ in zip(trainer.loader.steps(), range(10), strict=False))
    trainer.run()
    counts = len(LinearDraft.loss_weights)
    # A total and a count for each loss, and for acceptance@1, tokens and the gradient's norm.
    line = 2 * (counts + 3)
    assert sizes == 2 * [*5 * [counts], line]


@pytest.mark.parametrize("algorithm", ["dspark", "eagle3"])
def test_gradients_of_real_drafts_are_those_of_their_own_forwards(answers: Path, algorithm: str) -> None:
    target = tiny_target()
    samples = make_samples()
    loader = BatchLoader(samples, limits=BatchLimits(8, 2, anchor_sets=2), num_anchors=8, seed=3, pad_token_id=0)
    draft = tiny_draft(target, algorithm)
    features = OnlineFeatures(target, samples, FeatureMemory(0.0))
    config = make_config(answers)
    config.run_dir.mkdir(exist_ok=True)
    trainer = Trainer(
        draft=draft,
        features=features,
        loader=loader,
        write_draft=lambda folder: None,
        sample_ids=[sample.id for sample in samples],
        accelerator=Accelerator(cpu=True),
        config=config,
        folder=config.run_dir,
        data="",
        target="",
    )
    micro_batches = next(loader.steps()).micro_batches
    assert len(micro_batches) == 8
    trainer.accumulate_gradients(micro_batches)
    found = {name: parameter.grad for name, parameter in draft.named_parameters()}
    draft.zero_grad(set_to_none=True)
    counts = [draft.loss_counts(tokens) for tokens in micro_batches]
    for tokens in micro_batches:
        weights = draft.loss_weights_at(0.0)
        coefficients = {name: weight / sum(count[name] for count in counts) for name, weight in weights.items()}
        draft(features.complete(tokens), coefficients).objective.backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None
        assert found[name] is not None
        assert (found[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-9, name


def naive_gradient(tokens: TokenBatch) -> Tensor:
    """Mean over all supervised places of 0.25 * cross-entropy + 2 * mean square, one place at a time in float64."""
    start, table = LinearDraft(), TableFeatures().table.double()
    weight = start.weight.detach().double().requires_grad_()
    bias = start.bias.detach().double().requires_grad_()
    terms = []
    for row in range(len(tokens.lengths)):
        for anchor, is_real in zip(tokens.anchors[row].tolist(), tokens.anchor_mask[row].tolist(), strict=True):
            if is_real:
                logits = weight @ table[tokens.input_ids[row, anchor]] + bias
                label = tokens.input_ids[row, anchor + 1]
                terms.append(-0.25 * logits.log_softmax(0)[label] + 2.0 * logits.square().mean())
    torch.stack(terms).mean().backward()
    return torch.cat([weight.grad.flatten(), bias.grad]).float()


def test_resumed_run_equals_uninterrupted_run_bit_by_bit(answers: Path) -> None:
    straight = make_config(answers, "exp_name=straight")
    final = make_trainer(straight).run()
    broken = make_config(answers, "exp_name=broken")
    with pytest.raises(KeyboardInterrupt):
        make_trainer(broken, TableFeatures(fail_at=14)).run()  # inside step 7, after step_4 was saved
    start = find_start(broken, broken.run_dir)
    assert start.checkpoint == broken.run_dir / "step_4"
    resumed = resume(broken).run()
    for name in ("model.safetensors", "training_state.safetensors"):
        assert (final / name).read_bytes() == (resumed / name).read_bytes()
    assert read_training_state(final).progress == read_training_state(resumed).progress
    timing = ("tokens_per_second", "seconds_per_step")
    one, two = (
        [{key: value for key, value in line.items() if key not in timing} for line in read_metrics(config)]
        for config in (straight, broken)
    )
    assert one == two
    assert [line["step"] for line in one] == [2, 4, 6, 8, 10]


def test_run_leaves_the_last_checkpoints_and_step_latest(answers: Path) -> None:
    config = make_config(answers, "checkpoint.keep_last=2")
    final = make_trainer(config).run()
    assert final == latest_valid(config.run_dir) == config.run_dir / "step_10"
    assert sorted(path.name for path in config.run_dir.glob("step_*")) == ["step_10", "step_8", "step_latest"]
    assert os.readlink(config.run_dir / "step_latest") == "step_10"
    assert read_training_state(final).progress == (10, 22 * 3 + 8)


def test_loss_falls_and_the_learning_rate_follows_the_schedule(answers: Path) -> None:
    config = make_config(answers, "optimizer.steps=40", "optimizer.warmup_share=0.1", "logger.every_steps=1")
    make_trainer(config).run()
    lines = read_metrics(config)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert [line["learning_rate"] for line in lines].index(0.05) == 4
    assert all(0.0 <= line["acceptance@1"] <= 1.0 for line in lines)
    assert all(line["loss"] == pytest.approx(0.25 * line["loss/ce"] + 2.0 * line["loss/norm"]) for line in lines)


def test_a_batch_without_a_supervised_token_changes_no_weight_by_its_loss(answers: Path) -> None:
    draft = LinearDraft()
    trainer = make_trainer(make_config(answers), draft=draft)
    batches = [batch._replace(anchor_mask=torch.zeros_like(batch.anchor_mask)) for batch in micro_batches(2)]
    objectives = trainer.accumulate_gradients(batches)
    assert [float(objective) for objective in objectives] == [0.0, 0.0]
    assert not draft.weight.grad.any()


def test_a_poisoned_sample_stops_the_run_by_name_and_no_poisoned_checkpoint_is_written(answers: Path) -> None:
    config = make_config(answers, "logger.every_steps=100", "checkpoint.every_steps=1", "optimizer.micro_batch_size=1")
    first_epoch = [batches for batches, _ in zip(make_trainer(config).loader.steps(), range(3), strict=False)]
    poisoned = int(first_epoch[1].micro_batches[3].sample_index[0])
    with pytest.raises(NonFiniteLossError, match=rf"at step 2 .*samples: sample-{poisoned}\."):
        make_trainer(config, TableFeatures(poison=[poisoned])).run()
    assert latest_valid(config.run_dir) == config.run_dir / "step_1"


def test_bf16_autocast_keeps_fp32_master_weights_and_stays_near_fp32(answers: Path) -> None:
    losses = []
    for precision in ("fp32", "bf16"):
        config = make_config(answers, f"engine.precision={precision}", f"exp_name={precision}")
        draft = LinearDraft()
        make_trainer(config, draft=draft).run()
        assert draft.weight.dtype == torch.float32
        assert draft.frozen.dtype == torch.bfloat16
        losses.append(read_metrics(config)[-1]["loss"])
    # bf16 products have 8 bits; the losses here are near 1
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1] != losses[0]


def test_a_changed_config_is_refused_with_the_difference_and_a_longer_run_is_not(answers: Path) -> None:
    config = make_config(answers)
    make_trainer(config).run()
    changed = make_config(answers, "optimizer.learning_rate=0.01")
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate: 0\.05 -> 0\.01"):
        find_start(changed, changed.run_dir)
    longer = make_config(answers, "optimizer.steps=12", "logger.every_steps=1", "checkpoint.keep_last=7")
    assert not find_start(longer, longer.run_dir).is_finished
    assert find_start(config, config.run_dir).is_finished


def test_changed_answers_are_refused(answers: Path) -> None:
    config = make_config(answers)
    make_trainer(config).run()
    answers.write_text("{}\n{}\n")
    with pytest.raises(ConfigError, match="other data"):
        find_start(config, config.run_dir)


def test_resume_never_refuses_to_write_over_an_earlier_run(answers: Path) -> None:
    config = make_config(answers, "checkpoint.resume=never")
    assert find_start(config, config.run_dir).checkpoint is None
    make_trainer(config).run()
    with pytest.raises(CheckpointError, match=r"step_10.*'never'"):
        find_start(config, config.run_dir)


def test_a_run_ends_with_a_line_that_names_step_loss_and_checkpoint(
    answers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(answers)
    final = make_trainer(config).run()
    last = read_metrics(config)[-1]
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"trained to step {last['step']}: loss {last['loss']:.4f}")
    assert line.endswith(f"   checkpoint: {final}")


def test_a_broken_tracker_is_said_once_and_the_run_goes_on(
    answers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(answers, "logger.tensorboard=true")
    config.run_dir.mkdir()
    (config.run_dir / "tensorboard").write_text("a file where the tracker wants a folder")
    make_trainer(config).run()
    assert capsys.readouterr().err.count("TensorBoard is switched off") == 1
    assert len(read_metrics(config)) == 5


def test_tensorboard_events_are_written(answers: Path) -> None:
    config = make_config(answers, "logger.tensorboard=true")
    make_trainer(config).run()
    assert list((config.run_dir / "tensorboard").glob("events.*"))


@pytest.mark.parametrize("fail_at", [1, 3, 8, 12, 17, 20])
def test_metrics_go_on_exactly_though_checkpoints_lie_between_log_lines(answers: Path, fail_at: int) -> None:
    settings = ("logger.every_steps=3", "checkpoint.every_steps=2")
    straight, broken = (make_config(answers, f"exp_name={name}", *settings) for name in ("straight", "broken"))
    make_trainer(straight).run()
    with pytest.raises(KeyboardInterrupt):
        make_trainer(broken, TableFeatures(fail_at=fail_at)).run()
    (resume(broken) if fail_at > 5 else make_trainer(broken)).run()
    assert_same_runs(straight, broken, 10)
    assert [line["step"] for line in read_metrics(broken)] == [3, 6, 9, 10]


def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint_and_the_run_goes_on_exactly(answers: Path) -> None:
    straight, stopped = (make_config(answers, f"exp_name={name}") for name in ("straight", "stopped"))
    make_trainer(straight).run()
    with StopSignals() as signals, signals.until_boundary():

        class SignalledFeatures(TableFeatures):
            def complete(self, tokens: TokenBatch, before: FeatureBatch | None = None) -> FeatureBatch:
                if self.calls == 8:  # inside step 5; checkpoints come every 4 steps
                    os.kill(os.getpid(), signal.SIGTERM)
                    while not signals.requested:
                        time.sleep(0.001)
                return super().complete(tokens, before)

        trainer = make_trainer(stopped, SignalledFeatures(), stop=lambda: signals.requested)
        with pytest.raises(StoppedError, match=r"SIGTERM after step 5, which is in .*step_5\. .*exit status 75"):
            trainer.run()
    assert latest_valid(stopped.run_dir) == stopped.run_dir / "step_5"
    resume(stopped).run()
    assert_same_runs(straight, stopped, 10)


def test_a_signal_in_the_last_step_changes_nothing(answers: Path) -> None:
    config = make_config(answers)
    assert make_trainer(config, stop=lambda: 0).run().name == "step_10"
    done = make_config(answers, "exp_name=done", "optimizer.steps=1")
    assert make_trainer(done, stop=lambda: signal.SIGTERM).run().name == "step_1"


def poisoned_step(config: TrainConfig, step: int) -> list[int]:
    """Samples of one micro-batch of a step, from 1."""
    batches = next(make_trainer(config).loader.steps(step - 1))
    return batches.micro_batches[0].sample_index.tolist()


def test_a_skipped_update_leaves_weights_and_optimizer_as_they_are_and_is_counted(
    answers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(
        answers,
        "optimizer.on_nonfinite=skip",
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=9",
        "optimizer.steps=3",
    )
    poison = poisoned_step(config, 2)[:1]
    make_trainer(config, TableFeatures(poison=poison)).run()
    states = [load_file(config.run_dir / f"step_{step}" / "training_state.safetensors") for step in (1, 2, 3)]
    for name, before in states[0].items():
        assert torch.equal(states[1][name], before), name
        assert states[2][name].isfinite().all()
    assert not torch.equal(states[2]["master/weight"], states[1]["master/weight"])
    assert float(states[2]["optimizer/weight/step"]) == 2
    assert [line["skipped_updates"] for line in read_metrics(config)] == [1, 0]
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["gradient_norm"]) for line in read_metrics(config))
    (line,) = (config.run_dir / SKIPPED).read_text().splitlines()
    assert json.loads(line) == {"step": 2, "what": "loss", "samples": [f"sample-{i}" for i in poisoned_step(config, 2)]}
    assert "update skipped: the loss is not finite at step 2 (gradient norm nan); samples: sample-" in (
        capsys.readouterr().err
    )


def test_skipping_changes_nothing_where_all_is_finite(answers: Path) -> None:
    stop, skip = (
        make_config(answers, f"exp_name={policy}", f"optimizer.on_nonfinite={policy}") for policy in ("stop", "skip")
    )
    for config in (stop, skip):
        make_trainer(config).run()
    for name in ("model.safetensors", "training_state.safetensors"):
        assert (stop.run_dir / "step_10" / name).read_bytes() == (skip.run_dir / "step_10" / name).read_bytes()


def test_a_loss_that_is_infinite_with_a_finite_gradient_is_bad_too(answers: Path) -> None:
    class InfiniteLoss(LinearDraft):
        def forward(self, batch: FeatureBatch, coefficients: dict[str, Tensor]) -> LossTerms:
            terms = super().forward(batch, coefficients)
            return terms._replace(objective=terms.objective + math.inf)

    config = make_config(answers)
    with pytest.raises(NonFiniteLossError, match=r"the loss is not finite at step 1 .*on_nonfinite=skip"):
        make_trainer(config, draft=InfiniteLoss()).run()


def test_a_run_that_only_skips_ends_with_the_weights_of_before(answers: Path) -> None:
    config = make_config(answers, "optimizer.on_nonfinite=skip", "optimizer.steps=40", "checkpoint.every_steps=19")
    with pytest.raises(NonFiniteLossError, match="the 19 before it"):
        make_trainer(config, TableFeatures(poison=range(22))).run()
    weights = load_file(config.run_dir / "step_19" / "training_state.safetensors")
    assert torch.equal(weights["master/weight"], LinearDraft().weight)


def test_the_best_checkpoint_by_a_recorded_metric_stays_and_has_a_link(answers: Path) -> None:
    config = make_config(
        answers,
        "logger.every_steps=1",
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=1",
        "checkpoint.keep_every=5",
        "checkpoint.keep_best=gradient_norm",
        "checkpoint.best_is=lowest",
    )
    make_trainer(config).run()
    norms = {int(line["step"]): line["gradient_norm"] for line in read_metrics(config)}
    best = min(norms, key=lambda step: norms[step])
    kept = {f"step_{step}" for step in (5, best, 10)}
    assert {path.name for path in config.run_dir.glob("step_*[0-9]")} == kept
    assert os.readlink(config.run_dir / "step_best") == f"step_{best}"
    assert read_training_state(config.run_dir / f"step_{best}").metrics["gradient_norm"] == norms[best]


def test_changes_are_allowed_by_key_or_section_and_said(answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(answers)
    make_trainer(config).run()
    changed = ("optimizer.learning_rate=0.01", "optimizer.weight_decay=0.5", "optimizer.steps=20")
    with pytest.raises(ConfigError, match=r"allow_changes=\[optimizer\.learning_rate,optimizer\.weight_decay\]"):
        find_start(make_config(answers, *changed), config.run_dir)
    with pytest.raises(ConfigError, match=r"weight_decay: 0\.0 -> 0\.5") as refusal:
        find_start(make_config(answers, *changed, "checkpoint.allow_changes=[optimizer.learning_rate]"), config.run_dir)
    assert "learning_rate: " not in str(refusal.value)
    answers.write_text("{}\n{}\n")
    allowed = make_config(answers, *changed, "checkpoint.allow_changes=[optimizer,data.answers]")
    assert find_start(allowed, config.run_dir).checkpoint == config.run_dir / "step_10"
    shown = capsys.readouterr().out
    assert "optimizer.learning_rate: 0.05 -> 0.01; optimizer.weight_decay: 0.0 -> 0.5; content of data.answers" in shown
    wrong = make_config(answers, "checkpoint.allow_changes=[optimizer.learning_rat]")
    with pytest.raises(ConfigError, match=r"no key or section 'optimizer\.learning_rat'\. Did you mean"):
        find_start(wrong, config.run_dir)


def edit_stored_config(checkpoint: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the configuration that a checkpoint was written with, and its manifest."""
    path = checkpoint / "training_state.json"
    state = json.loads(path.read_text())
    edit(state["config"])
    path.write_text(json.dumps(state))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][path.name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_a_key_younger_than_the_checkpoint_had_its_default_then(answers: Path) -> None:
    config = make_config(answers)
    final = make_trainer(config).run()

    def forget(stored: dict[str, Any]) -> None:
        del stored["optimizer"]["betas"], stored["algorithm"]["init_layers"], stored["target"]["draft_layers"]

    edit_stored_config(final, forget)
    # init_layers and draft_layers are not the default in this experiment.
    with pytest.raises(ConfigError, match=r"init_layers: \(not set\), by default None -> \[27, 29\]") as refusal:
        find_start(config, config.run_dir)
    assert "betas" not in str(refusal.value)
    changed = make_config(answers, "optimizer.betas=[0.8,0.9]", "algorithm.init_layers=null")
    with pytest.raises(ConfigError, match=r"betas: \(not set\), by default \[0\.9, 0\.999\] -> \[0\.8, 0\.9\]"):
        find_start(changed, config.run_dir)
    assert find_start(make_config(answers, "algorithm.init_layers=null"), config.run_dir).checkpoint == final


def test_a_run_goes_on_exactly_in_another_folder_from_a_checkpoint_that_it_is_given(answers: Path) -> None:
    first = make_config(answers, "exp_name=first", "optimizer.steps=10", "checkpoint.keep_last=9")
    make_trainer(first).run()
    for given in ("step_4", "step_latest", ""):
        copy = make_config(answers, f"exp_name=from_{given}", f"checkpoint.resume={first.run_dir / given}")
        start = find_start(copy, copy.run_dir)
        assert start.checkpoint == first.run_dir / ("step_4" if given == "step_4" else "step_10")
        assert start.is_finished == (given != "step_4")
    fork = make_config(answers, "exp_name=fork", f"checkpoint.resume={first.run_dir / 'step_4'}")
    resume(fork).run()
    final = (first.run_dir / "step_10", fork.run_dir / "step_10")
    for name in ("model.safetensors", "training_state.safetensors"):
        assert (final[0] / name).read_bytes() == (final[1] / name).read_bytes()
    # The same command again goes on from the fork's own last checkpoint.
    assert find_start(fork, fork.run_dir).checkpoint == final[1]


def test_a_checkpoint_to_go_on_from_that_cannot_be_used_is_refused_by_name(answers: Path) -> None:
    first = make_config(answers, "exp_name=first", "checkpoint.keep_last=9")
    make_trainer(first).run()
    typo = make_config(answers, "checkpoint.resume=atuo")
    with pytest.raises(CheckpointError, match=r"checkpoint\.resume is 'atuo'.*Use auto, never"):
        find_start(typo, typo.run_dir)
    earlier = make_config(answers, "exp_name=first", f"checkpoint.resume={first.run_dir / 'step_4'}")
    with pytest.raises(CheckpointError, match=r"already holds the later step_10"):
        find_start(earlier, earlier.run_dir)
    (first.run_dir / "step_4" / "model.safetensors").write_bytes(b"")
    damaged = make_config(answers, f"checkpoint.resume={first.run_dir / 'step_4'}")
    with pytest.raises(CheckpointError, match=r"step_4 is no whole checkpoint: model\.safetensors has 0 bytes"):
        find_start(damaged, damaged.run_dir)
    empty = make_config(answers, f"checkpoint.resume={answers.parent}")
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing.*warm_start"):
        find_start(empty, empty.run_dir)


def damages(path: Path) -> dict[str, Callable[[], object]]:
    """What can happen to a file; each returns it to disk damaged."""
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    return {
        "truncated": lambda: path.write_bytes(content[:middle]),
        "garbled": lambda: path.write_bytes(flipped),
        "emptied": lambda: path.write_bytes(b""),
        "removed": path.unlink,
        "longer": lambda: path.write_bytes(content + b"\0"),
    }


def test_any_damage_to_any_file_of_a_checkpoint_is_found_and_the_one_before_is_used(
    answers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(answers)
    final = make_trainer(config).run()
    names = sorted(path.name for path in final.iterdir())
    assert len(names) == 5
    for name in names:
        content = (final / name).read_bytes()
        for kind, damage in damages(final / name).items():
            damage()
            start = find_start(config, config.run_dir)
            assert start.checkpoint == config.run_dir / "step_8", f"{name} {kind}"
            assert f"checkpoint {final} is damaged and is passed over: " in capsys.readouterr().err
            (final / name).write_bytes(content)
    assert find_start(config, config.run_dir).checkpoint == final


class SeenFeatures(TableFeatures):
    """Notes the samples of every forward."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__(fail_at)
        self.seen: list[int] = []

    def complete(self, tokens: TokenBatch, before: FeatureBatch | None = None) -> FeatureBatch:
        batch = super().complete(tokens, before)
        self.seen += tokens.sample_index.tolist()
        return batch


TWO_EPOCHS = ("optimizer.steps=null", "optimizer.epochs=2", "optimizer.micro_batch_size=2")


def test_a_smaller_global_batch_in_the_middle_of_an_epoch_repeats_and_leaves_out_no_sample(answers: Path) -> None:
    settings = (*TWO_EPOCHS, "data.bucket_steps=1")
    first = SeenFeatures(fail_at=16)  # in step 5, of three steps in each epoch
    with pytest.raises(KeyboardInterrupt):
        make_trainer(make_config(answers, *settings), first).run()
    changed = ("optimizer.global_batch_size=4", "checkpoint.allow_changes=[optimizer.global_batch_size]")
    rest = SeenFeatures()
    final = resume(make_config(answers, *settings, *changed), rest).run()
    state = read_training_state(final)
    # Step 4 ends after 22 + 8 samples; the other 14 take four steps of 4.
    assert state.progress == (8, 44)
    assert state.planned_steps == 8
    seen = first.seen[: 22 + 8] + rest.seen
    assert sorted(seen[:22]) == sorted(seen[22:]) == list(range(22))


def test_buckets_of_another_size_are_refused_in_the_middle_of_an_epoch_and_not_at_its_end(answers: Path) -> None:
    settings = (*TWO_EPOCHS, "data.bucket_steps=2", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    make_trainer(make_config(answers, *settings)).run()
    changed = ("data.bucket_steps=4", "checkpoint.allow_changes=[data,optimizer]")
    for step, left in ((2, 6), (3, 0), (5, 6)):
        given = f"checkpoint.resume={answers.parent / 'run' / f'step_{step}'}"
        config = make_config(answers, *settings, *changed, f"exp_name=fork_{step}", given)
        if left:
            with pytest.raises(ConfigError, match=rf"{left} samples before its end.*bucket_steps: 2 -> 4"):
                resume(config)
        else:
            assert resume(config).run().name == "step_6"


def test_added_answers_are_trained_and_removed_ones_end_the_run_at_the_checkpoint_that_exists(answers: Path) -> None:
    settings = (*TWO_EPOCHS, "checkpoint.allow_changes=[data.answers]")
    config = make_config(answers, *settings)
    make_trainer(config).run()
    assert find_start(config, config.run_dir).is_finished
    answers.write_text("{}\n{}\n")
    start = find_start(config, config.run_dir)
    assert start.checkpoint == config.run_dir / "step_6"
    assert not start.is_finished
    more, fewer = (make_trainer(config, samples=make_samples(count)) for count in (40, 10))
    for trainer in (more, fewer):
        trainer.restore(start.checkpoint)
    assert fewer.is_finished
    assert not more.is_finished
    # 44 of 80 samples were seen; the second epoch goes on at its fifth sample.
    assert more.run().name == "step_11"


def test_a_best_checkpoint_by_a_number_that_no_line_holds_is_refused_at_the_first_line(answers: Path) -> None:
    config = make_config(answers, "checkpoint.keep_best=aceptance@1", "checkpoint.every_steps=1")
    with pytest.raises(ConfigError, match=r"keep_best 'aceptance@1' does not exist.*Did you mean 'acceptance@1'"):
        make_trainer(config).run()
    assert latest_valid(config.run_dir) == config.run_dir / "step_1"
    assert resume(make_config(answers, "checkpoint.keep_best=acceptance@1")).run().name == "step_10"


def test_another_target_of_the_same_name_is_refused_unless_it_is_allowed(answers: Path) -> None:
    config = make_config(answers)
    final = make_trainer(config, target="one").run()
    assert read_training_state(final).target == "one"
    longer = make_config(answers, "optimizer.steps=11")
    with pytest.raises(ConfigError, match=r"had hash one and now have two.*allow_changes=\[target\.revision\]"):
        make_trainer(longer, target="two").restore(final)
    make_trainer(longer, target="one").restore(final)
    allowed = make_config(answers, "optimizer.steps=11", "checkpoint.allow_changes=[target.revision]")
    trainer = make_trainer(allowed, target="two")
    trainer.restore(final)
    assert read_training_state(trainer.run()).target == "two"


class SpikeFeatures(TableFeatures):
    """Features of some samples are a hundred times those of the others."""

    loud: Sequence[int] = ()

    def complete(self, tokens: TokenBatch, before: FeatureBatch | None = None) -> FeatureBatch:
        batch = super().complete(tokens, before)
        is_loud = torch.isin(tokens.sample_index, torch.tensor(self.loud))
        return batch._replace(features=batch.features * torch.where(is_loud, 100.0, 1.0)[:, None, None])


def test_a_spike_is_counted_in_its_line_also_by_a_run_that_was_killed_before_it(
    answers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = make_samples(100)
    straight, broken = (make_config(answers, f"exp_name={name}", "logger.every_steps=1") for name in ("one", "two"))
    loader = make_trainer(straight, samples=samples).loader
    SpikeFeatures.loud = [int(i) for one in next(loader.steps(9)).micro_batches for i in one.sample_index]
    make_trainer(straight, SpikeFeatures(), samples=samples).run()
    with pytest.raises(KeyboardInterrupt):
        make_trainer(broken, SpikeFeatures(fail_at=18), samples=samples).run()  # inside step 9
    trainer = make_trainer(broken, SpikeFeatures(), LinearDraft(seed=1), samples=samples)
    trainer.restore(broken.run_dir / "step_8")
    drop_lines_after(broken.run_dir / METRICS, 8)
    trainer.run()
    assert_same_runs(straight, broken, 10)
    assert [line["spikes"] for line in read_metrics(straight)] == [0] * 9 + [1]
    assert capsys.readouterr().err.count("gradient_norm jumped") == 2
