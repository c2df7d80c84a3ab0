"""`deepspec plan`: sizes, arithmetic and settings, against closed forms, counters and real drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_config, tiny_draft, tiny_target, with_features
from torch.utils.flop_counter import FlopCounterMode

from deepspec.cli import main
from deepspec.config import TrainConfig, compose_train, config_folder
from deepspec.data.anchors import draw_anchors, supervised_slots
from deepspec.errors import ConfigError, TargetError
from deepspec.planning.amounts import checkpoints_at_once, share_of_passes
from deepspec.planning.dryrun import DryRun, StepShape
from deepspec.planning.flops import SequenceCounts, count_sequence, sequence_flops
from deepspec.planning.plan import find_changes, make_plan
from deepspec.planning.settings import compose_plan
from deepspec.planning.shapes import target_config
from deepspec.training.rotation import Keep, kept_steps
from deepspec.types import TokenBatch

ALGORITHMS = ("dspark", "dflash", "eagle3")
MARKOV_HEADS = [("dspark", {"markov_head": head}) for head in ("vanilla", "gated", "rnn")]


def run_of(*overrides: str) -> tuple[TrainConfig, DryRun]:
    train = compose_train(overrides)
    return train, DryRun(train, target_config(train.target)[0])


def test_arithmetic_of_a_dspark_step_on_qwen3_4b_is_that_of_the_design() -> None:
    train, run = run_of("experiment=dspark_qwen3_4b")
    # The design counts 951 tokens that are all answer, and blocks that are all supervised.
    counts = count_sequence(951, 951, 512, 7)
    assert counts.anchors == 512
    parts = {name: flops / 1e12 for name, flops in sequence_flops(train.algorithm, run.parameters, counts).items()}
    assert parts["draft layers"] == pytest.approx(10.9, rel=0.02)
    assert parts["head: draft logits"] == pytest.approx(2.8, rel=0.02)
    assert parts["head: gradient of hidden states"] == pytest.approx(2.8, rel=0.02)
    assert parts["head: teacher, once a position"] == pytest.approx(0.74, rel=0.02)
    assert parts["head: Markov bias"] == pytest.approx(0.84, rel=0.02)
    assert parts["draft attention"] == pytest.approx(0.4, abs=0.05)  # the design gives one digit
    assert parts["target pass"] == pytest.approx(7.2, rel=0.02)


@pytest.mark.parametrize(("answer", "anchors", "block"), [(40, 12, 7), (90, 512, 5), (6, 3, 7)])
def test_expected_counts_of_a_sequence_are_those_of_drawn_anchors(answer: int, anchors: int, block: int) -> None:
    length = answer + 10
    mask = [position >= 10 for position in range(length)]
    rows, positions = [], []
    for seed in range(400):
        drawn = torch.from_numpy(draw_anchors(mask, anchors, seed, 0, 0))[None]
        supervised = supervised_slots(
            drawn,
            torch.ones_like(drawn, dtype=torch.bool),
            torch.tensor([mask]),
            torch.tensor([length]),
            block,
            "anchor_first",
        )
        labels = (drawn[..., None] + torch.arange(1, block + 1))[supervised]
        rows.append(len(labels))
        positions.append(len(labels.unique()))
    counts = count_sequence(length, answer, anchors, block)
    assert counts.rows == pytest.approx(np.mean(rows), rel=0.03)
    assert counts.positions == pytest.approx(np.mean(positions), rel=0.06)  # the closed form draws with replacement


def addmm_flops(total: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...], **_: object) -> int:
    """The counter does not know the form that adds in place."""
    return 2 * left[0] * left[1] * right[1]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [*((name, {"draft_vocab_size": size}) for name in ALGORITHMS for size in (None, 40)), *MARKOV_HEADS],
)
def test_products_of_a_real_step_are_those_of_the_closed_form(name: str, overrides: dict[str, Any]) -> None:
    target = tiny_target()
    draft = tiny_draft(target, name, **overrides)
    length, prompt, num_anchors = 64, 12, 20
    mask = torch.arange(length) >= prompt
    anchors = torch.from_numpy(draw_anchors(mask.tolist(), num_anchors, 0, 0, 0))[None]
    # With a reduced vocabulary no label may fall outside, where a row would drop out.
    tokens = TokenBatch(
        torch.full((1, length), 5),
        torch.tensor([length]),
        mask[None],
        anchors,
        torch.ones_like(anchors, dtype=torch.bool),
        torch.tensor([0]),
    )
    batch = with_features(target, tokens)
    plan = draft.slot_plan(tokens)
    counts = SequenceCounts(length, length - prompt, 1, num_anchors, len(plan.slots), len(plan.taught_by.unique()))
    coefficients = {loss: torch.ones(()) for loss in draft.loss_weights}
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_flops}) as counter:
        draft(batch, coefficients).objective.backward()
    by_operator = counter.get_flop_counts()["Global"]
    # Attention alone multiplies batches of matrices.
    counted = sum(flops for operator, flops in by_operator.items() if operator is not torch.ops.aten.bmm)
    train = compose_train([f"algorithm={name}", "target=qwen3_4b"])
    sizes = DryRun(_with(train, draft.config, target.layer_ids), tiny_config("qwen3")).parameters
    parts = sequence_flops(draft.config, sizes, counts)
    # The teacher's whole head was run when the features were made.
    normaliser = 2 * sizes.hidden * sizes.vocab * counts.answer if sizes.needs_log_normaliser else 0
    expected = sum(parts.values()) - parts["target pass"] - parts["draft attention"] - normaliser
    assert counted == pytest.approx(expected, rel=0.03)  # the confidence head, teachers on the edge of a tile


def _with(train: TrainConfig, algorithm: object, layers: tuple[int, ...]) -> TrainConfig:
    """A run with a tiny draft's own settings."""
    target = train.target.model_copy(update={"layers": layers, "mask_token_id": 95})
    return train.model_copy(update={"algorithm": algorithm, "target": target})


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("vocabulary", [None, 40])
def test_counted_parameters_are_those_of_a_real_draft(name: str, vocabulary: int | None) -> None:
    target = tiny_target()
    draft = tiny_draft(target, name, draft_vocab_size=vocabulary)
    train = _with(compose_train([f"algorithm={name}", "target=qwen3_4b"]), draft.config, target.layer_ids)
    sizes = DryRun(train, tiny_config("qwen3")).parameters
    assert sizes.trainable == sum(value.numel() for value in draft.parameters() if value.requires_grad)
    assert (sizes.hidden, sizes.vocab, sizes.draft_vocab) == (32, 96, vocabulary or 96)


def test_every_target_of_the_configuration_is_known_without_a_network() -> None:
    for file in (config_folder() / "target").glob("*.yaml"):
        if file.stem != "auto":
            target = compose_train(["algorithm=dspark", f"target={file.stem}"]).target
            config, source = target_config(target)
            assert "known" in source or "config.json" in source
            assert target.layers is None or max(target.layers) < config.num_hidden_layers - 1


@pytest.mark.parametrize(("name", "billions"), [("qwen3_4b", 4.02), ("qwen3_8b", 8.19), ("qwen3_14b", 14.77)])
def test_known_sizes_give_the_published_number_of_parameters(name: str, billions: float) -> None:
    train, run = run_of("algorithm=eagle3", f"target={name}")
    sizes = run.parameters
    embeddings = sizes.hidden * sizes.vocab * (1 if name == "qwen3_4b" else 2)
    assert (sizes.target + embeddings) / 1e9 == pytest.approx(billions, rel=0.01)
    assert train.target.name_or_path.startswith("Qwen/Qwen3")


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    train = compose_train(["algorithm=eagle3", "target=auto", "target.name_or_path=/nowhere/at-all"])
    with pytest.raises(TargetError, match=r"'/nowhere/at-all' cannot be read.*Qwen/Qwen3-4B"):
        target_config(train.target)


def test_memory_grows_with_the_batch_and_shrinks_with_checkpointed_gradients() -> None:
    train = compose_train(["algorithm=dspark", "target=qwen3_4b", "algorithm.markov_rank=8", "algorithm.num_layers=1"])
    run = DryRun(
        train.model_copy(update={"target": _with(train, train.algorithm, (0, 2)).target}),
        tiny_config("qwen3", num_layers=4),
    )
    one, two = (run.measure(StepShape(batch, 128, 100, 32)) for batch in (1, 2))
    assert one.static == two.static
    assert one.static < one.peak < two.peak
    assert sum(one.parts.values()) == one.peak
    assert run.measure(StepShape(2, 128, 100, 32), checkpoints_gradients=True).peak < two.peak
    assert run.measure(StepShape(1, 128, 100, 32)) == one


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_target_that_runs_ahead_takes_one_feature_batch_more_and_on_a_gpu_its_own_pass(device: str) -> None:
    small = ["algorithm=dspark", "target=qwen3_4b", "algorithm.markov_rank=8", "algorithm.num_layers=1"]
    train = compose_train([*small, f"engine.device={device}"])
    run = DryRun(
        train.model_copy(update={"target": _with(train, train.algorithm, (0, 2)).target}),
        tiny_config("qwen3", num_layers=4),
    )
    shape = StepShape(2, 256, 200, 32)
    in_turn, ahead = (run.measure(shape, overlaps=overlaps) for overlaps in (False, True))
    # Two taps and the last hidden states of 32 bf16 numbers.
    features = 2 * 256 * 3 * 32 * 2
    assert in_turn.phase == ahead.phase
    assert in_turn.phase != "target pass"
    assert ahead.parts["features"] - in_turn.parts["features"] == features
    beside = ahead.parts.get("target pass", 0) - in_turn.parts.get("target pass", 0)
    assert ahead.peak - in_turn.peak == features + beside
    # At the least the states that a layer of 4 x 8 query numbers reads and writes, beside nothing on a CPU.
    assert beside >= 2 * 256 * 32 * 2 if device == "cuda" else beside == 0
    assert run.measure(shape) == in_turn


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("rate_tflops=0", ("rate_tflops: got 0", "greater than 0")),
        ("rate_tflops=fast", ("rate_tflops: got 'fast'",)),
        ("mean_answer=2000", ("mean_answer 2000 must be below mean_length 951",)),
        ("length=5000", ("length 5000 is above data.max_length 4096",)),
        ("gpu_gib=[]", ("gpu_gib: got []",)),
        ("gpu_gib=[16", ("'gpu_gib=[16' cannot be read as key=value",)),
        ("gpu_gib=[inf]", ("gpu_gib.0: got inf", "finite")),
        ("gpu_gib=[1e300]", ("gpu_gib.0: got 1e+300", "less than or equal to 1048576")),
        ("num_samples", ("'num_samples' cannot be read as key=value",)),
        ("rate_tflop=3", ("rate_tflop: there is no such key", "'rate_tflops'")),
        ("data.num_anchor=3", ("data.num_anchor: there is no such key", "'data.num_anchors'")),
    ],
)
def test_a_wrong_word_is_refused_with_its_key_and_a_way_out(word: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        compose_plan(["experiment=dspark_qwen3_4b", word])
    for part in parts:
        assert part in str(refused.value)


def tiny_run(folder: Path) -> list[str]:
    tiny_config("qwen3", num_layers=3).save_pretrained(folder)
    target = ["target=auto", f"target.name_or_path={folder}", "target.mask_token_id=95", "target.layers=[0,1]"]
    run = ["data.max_length=256", "data.num_anchors=64", "optimizer.global_batch_size=8", "optimizer.epochs=4"]
    return ["algorithm=dspark", "algorithm.num_layers=1", *target, *run, "num_samples=1500", "rate_tflops=0.4"]


def test_a_plan_says_what_fits_what_takes_the_room_and_how_long(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(("plan", *tiny_run(tmp_path), "gpu_gib=[2,16]"))
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "trainable parameters",
        "Sizes of the target from its config.json",
        "peak",
        "Does it fit?",
        "16 GiB",
        "target pass",
        "Disk: ",
        # 256 tokens, 188 of them answer, 2 taps of 32 numbers: 255 x 128 + 188 x 72 + 5 x 256 + 64 bytes in bf16.
        "cache (features=cached) of 1,500 sequences (num_samples): bf16 68.0 MiB, fp8 47.6 MiB, int8 47.6 MiB, "
        "deepspec_v2",
        "752 steps of 8 sequences",
        "at 0.4 TFLOP/s",
        "cut at data.max_length to 256",
    ):
        assert words in shown


def test_a_cpu_has_hours_only_at_a_rate_that_was_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [word for word in tiny_run(tmp_path) if not word.startswith("rate_tflops=")]
    shown = []
    for more in ([], ["engine.device=cpu"], ["engine.device=cpu", "rate_tflops=0.4"]):
        plan = make_plan(compose_plan([*words, *more]))
        main(("plan", *words, *more))
        shown.append(" ".join(capsys.readouterr().out.split()))
        assert (plan.hours is None) == (plan.cache_hours is None) == (more == ["engine.device=cpu"])
    assert "TFLOP; for hours, give rate_tflops=<TFLOP/s that this CPU reaches>." in shown[1]
    for text in ("TFLOP/s each", "at the rate", "rate_tflops=200"):
        assert text in shown[0]
        assert text not in shown[1]
    assert "at 0.4 TFLOP/s each" in shown[2]


def test_changes_of_settings_are_measured_and_listed_by_what_they_save(tmp_path: Path) -> None:
    run = [
        *tiny_run(tmp_path),
        "engine.device=cpu",
        "optimizer.micro_batch_size=2",
        "mean_length=200",
        "mean_answer=150",
    ]
    config = compose_plan(run)
    plan = make_plan(config)
    changes = {change.setting: change.peak for change in find_changes(config, plan)}
    assert set(changes) == {
        "optimizer.micro_batch_size=1",
        "data.num_anchors=32",
        "data.max_length=128",
        "engine.gradient_checkpointing=true",
    }
    assert list(changes.values()) == sorted(changes.values())
    assert all(peak < plan.memory.peak for peak in changes.values())
    half = compose_plan([word for word in run if "num_anchors" not in word] + ["data.num_anchors=32"])
    assert make_plan(half).memory.peak == changes["data.num_anchors=32"]


def test_a_plan_over_a_cache_has_no_target_pass_in_memory_arithmetic_and_hours(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # Enough vocabulary to be reduced, which asks for the logsumexp over all of it.
    words = [*tiny_run(tmp_path), "algorithm.draft_vocab_size=40", "engine.device=cpu"]
    live, cached, theirs = (
        make_plan(compose_plan([*words, *more]))
        for more in ([], ["features=cached"], ["features=cached", "features.format=deepspec_v2"])
    )
    assert cached.memory.static < live.memory.static
    assert set(live.flops) - set(cached.flops) == {"target pass"}
    # Our caches hold the logsumexps; DeepSpec's do not.
    whole_head = 2 * live.sizes.hidden * live.sizes.vocab * live.counts.answer
    teacher = "head: teacher, once a position"
    assert live.flops[teacher] == theirs.flops[teacher] == pytest.approx(cached.flops[teacher] + whole_head)
    assert theirs.flops.keys() == cached.flops.keys()
    ratio = sum(cached.flops.values()) / sum(live.flops.values())
    assert cached.hours == pytest.approx(live.hours * ratio)
    assert cached.cache_flops == pytest.approx(live.flops["target pass"] + whole_head)
    main(("plan", *words, "features=cached", "features.encoding=int8", "features.memory_gib=5"))
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "embedding and head of the",
        "sequences (num_samples): int8 47.6 MiB. Writing one takes",
        "which are no part of the time below",
    ):
        assert text in shown
    for text in ("target pass", "features.memory_gib", "deepspec_v2"):
        assert text not in shown


def test_batches_read_ahead_wait_in_the_memory_of_the_host(tmp_path: Path) -> None:
    words = [*tiny_run(tmp_path), "features=cached", "features.prefetch_batches=3", "optimizer.micro_batch_size=2"]
    on_gpu, on_cpu, single = (
        make_plan(compose_plan([*words, *more]))
        for more in ([], ["engine.device=cpu"], ["optimizer.global_batch_size=2"])
    )
    batch = 2 * 256 * 3 * 32 * 2
    assert on_gpu.memory.phases["forward"]["features"] == batch
    assert on_gpu.read_ahead_bytes == 4 * batch
    assert (on_cpu.memory.phases["forward"]["features"], on_cpu.read_ahead_bytes) == (4 * batch, 0)
    # A step of one micro-batch hears of the next step's alone.
    assert single.read_ahead_bytes == 2 * batch


@pytest.mark.parametrize("best", [None, "loss"])
@pytest.mark.parametrize(("every", "last", "keep_every"), [(3, 2, None), (2, 1, 3), (2, 3, 4), (None, 2, 5), (5, 9, 1)])
def test_no_more_checkpoints_lie_on_the_disk_than_planned(
    every: int | None, last: int, keep_every: int | None, best: str | None
) -> None:
    values = {"every_steps": every, "keep_last": last, "keep_every": keep_every, "keep_best": best}
    checkpoint = compose_train(["algorithm=dspark", "target=qwen3_4b"]).checkpoint.model_copy(update=values)
    for steps in (1, 2, 6, 7, 29, 30):
        kept: set[int] = set()
        most = 0
        for step in range(1, steps + 1):
            if step == steps or (every is not None and step % every == 0):
                most = max(most, len(kept) + 1)
                recorded = {number: {"loss": abs(number - 5.0)} for number in kept | {step}}
                kept = kept_steps(recorded, Keep(last, keep_every, best, "lowest"))
        planned = checkpoints_at_once(checkpoint, steps)
        # Where the best one stays by another rule as well, it is planned for twice.
        assert planned == most if best is None else most <= planned <= most + 1


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("fits", [0.0, 0.3, 1.0])
def test_the_target_runs_as_often_as_passes_are_not_found_in_the_memory_of_the_process(
    processes: int, fits: float
) -> None:
    samples, epochs, pass_bytes = 3000, 4, 2**20
    words = ["algorithm=dspark", "target=qwen3_4b", "optimizer.global_batch_size=60", "optimizer.micro_batch_size=1"]
    engine = ["engine=ddp", f"engine.num_processes={processes}"] if processes > 1 else []
    train = compose_train([*words, *engine, f"features.memory_gib={fits * samples / 1024}"])
    draw = np.random.default_rng(0)
    held: list[set[int]] = [set() for _ in range(processes)]
    runs = 0
    for _ in range(epochs):
        for sample in draw.permutation(samples).tolist():
            mine = held[int(draw.integers(processes))]
            if sample not in mine:
                runs += 1
                if len(mine) < round(fits * samples):
                    mine.add(sample)
    planned = share_of_passes(train, pass_bytes, samples, epochs * samples // 60)
    assert planned == pytest.approx(runs / (samples * epochs), abs=0.02)


def test_settings_that_take_less_can_be_given_as_they_are_listed(tmp_path: Path) -> None:
    run = [*tiny_run(tmp_path), "features.anchors_per_target_pass=192", "features.overlap=true"]
    tiny_config("qwen3", num_layers=16).save_pretrained(tmp_path)  # layers that are worth leaving out
    run += ["evaluation.every_steps=5", "target.dtype=float32", "features.prefetch_batches=1", "engine.device=cpu"]
    config = compose_plan(run)
    changes = find_changes(config, make_plan(config))
    assert {"data.num_anchors=32 features.anchors_per_target_pass=96"} < {change.setting for change in changes}
    assert {"features=cached evaluation.every_steps=null"} < {change.setting for change in changes}
    for change in changes:
        compose_plan([*run, *change.setting.split()])
