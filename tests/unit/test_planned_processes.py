"""`deepspec plan` for several processes: shares add up, and what is printed; real bytes are in tests/distributed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import tiny_config

from deepspec.cli import main
from deepspec.planning.plan import find_changes, make_plan
from deepspec.planning.settings import compose_plan
from deepspec.planning.sharding import ENGINES, held_by, spread
from deepspec.training.accelerator import BUCKET_ELEMENTS

SHAPES = [(7, 5), (3,), (1, 4), (16, 2)]
WHOLE = 4 * (35 + 3 + 4 + 32)


def tiny_run(folder: Path, *words: str) -> list[str]:
    tiny_config("qwen3", num_layers=3).save_pretrained(folder)
    target = ["target=auto", f"target.name_or_path={folder}", "target.mask_token_id=95", "target.layers=[0,1]"]
    run = ["data.max_length=256", "data.num_anchors=64", "optimizer.global_batch_size=8", "optimizer.epochs=4"]
    return ["algorithm=dspark", "algorithm.num_layers=1", *target, *run, "num_samples=1500", *words]


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_shares_of_all_processes_are_the_whole_with_little_padding(processes: int) -> None:
    for engine in ENGINES:
        held = [held_by(engine, processes, SHAPES, is_summed=True, rank=rank) for rank in range(processes)]
        moments = sum(one.moments for one in held)
        if engine == "ddp":
            assert moments == processes * 2 * WHOLE
        elif engine == "fsdp2":
            assert moments == 2 * WHOLE
        else:
            # A number is added to each weight at most (ZeRO-3), or two for each process to all of them.
            assert 2 * WHOLE <= moments <= 2 * (WHOLE + 4 * 2 * processes * len(SHAPES))
        assert max(one.throughout for one in held) == held[0].throughout


def test_engines_hold_less_the_more_they_spread() -> None:
    shapes = [(4000, 5000)] * 40  # 3 GiB
    ddp, _, zero1, zero2, zero3 = (held_by(engine, 8, shapes, is_summed=True) for engine in ENGINES)
    whole = 4 * 40 * 4000 * 5000
    bucket = 4 * BUCKET_ELEMENTS
    assert ddp.throughout == 5 * whole
    assert zero1.throughout == 2 * whole + 3 * whole // 8 + bucket
    assert zero2.throughout == whole + 4 * whole // 8 + bucket
    assert zero3.throughout == 5 * whole // 8 + bucket


def test_one_process_holds_what_was_traced(tmp_path: Path) -> None:
    plan = make_plan(compose_plan(tiny_run(tmp_path)))
    assert list(plan.shares) == ["single"]
    assert (plan.memory.peak, plan.memory.parts, plan.memory.static) == (
        plan.alone.peak,
        plan.alone.parts,
        plan.alone.static,
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_the_peak_of_a_process_is_that_of_the_step_with_its_share_in_place_of_the_whole(
    tmp_path: Path, engine: str
) -> None:
    plan = make_plan(compose_plan(tiny_run(tmp_path, f"engine={engine}", "engine.num_processes=2")))
    held = plan.shares[engine]
    whole = 4 * plan.sizes.trainable
    in_forward = plan.alone.phases["forward"]
    peak = sum(in_forward.values()) - 4 * whole + held.throughout + held.gathered
    assert sum(spread(plan.alone, held).phases["forward"].values()) == peak
    assert plan.memory.peak == max(sum(parts.values()) for parts in plan.memory.phases.values()) >= peak
    assert plan.memory.static == plan.alone.static - 4 * whole + held.throughout


def test_a_plan_of_several_processes_says_what_each_and_all_of_them_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tiny_run(tmp_path, "engine=zero2", "engine.num_processes=4", "rate_tflops=0.4", "features.memory_gib=3")
    main(("plan", *words))
    shown = " ".join(capsys.readouterr().out.split())
    assert "Each of the 4 processes, GiB: its training state" in shown
    for engine in ENGINES:
        assert re.search(rf" {engine} {'[*]' if engine == 'zero2' else ''}", shown)
    each, total = re.search(r"In all: 4 x (\S+) = (\S+) GiB of GPU memory\.", shown).groups()  # type: ignore[union-attr]
    assert float(total) == pytest.approx(4 * float(each), abs=0.3)  # both are rounded
    assert "GiB in the main process while it saves and features.memory_gib=3 in each, 12 GiB" in shown
    assert "on 4 device(s) at 0.4 TFLOP/s each. A step of all of them is " in shown


def test_other_engines_are_among_what_makes_the_peak_smaller(tmp_path: Path) -> None:
    config = compose_plan(tiny_run(tmp_path, "engine=zero1", "engine.num_processes=2"))
    plan = make_plan(config)
    changes = {change.setting: change.peak for change in find_changes(config, plan)}
    smaller = {name for name, held in plan.shares.items() if spread(plan.alone, held).peak < 0.99 * plan.memory.peak}
    assert {f"engine={name}" for name in smaller} == {word for word in changes if word.startswith("engine=")}
    assert "engine=ddp" in changes  # DeepSpeed's bucket of 200 MB is far above all weights of this draft


def test_processes_on_a_cpu_have_no_other_engine_and_share_its_ram(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(("plan", *tiny_run(tmp_path, "engine=ddp", "engine.num_processes=2", "engine.device=cpu")))
    shown = " ".join(capsys.readouterr().out.split())
    assert " ddp * " in shown
    assert "zero" not in shown
    assert re.search(r"In all: 2 x \S+ = \S+ GiB of RAM\.", shown)
