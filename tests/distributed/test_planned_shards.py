"""What `deepspec plan` says a process holds under each engine, against two real ones; run as a script it is a worker.

Held is what the storages of all living tensors add up to; the most of a micro-batch is what torch's allocator gave out.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from engine_workers import ENGINES, SHARDED, leave, offer, prepare, run_workers
from helpers import coefficients_for, most_bytes_during, random_batch, tiny_draft, tiny_target
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from deepspec.config import TrainConfig, compose_train
from deepspec.planning.sharding import Held, held_by
from deepspec.training import accelerator as accelerators
from deepspec.training.engines import Engine, TorchEngine, make_engine
from deepspec.training.zero import Zero

NUM_LAYERS = 40
# Above what a parameter of a tiny draft has, below all of them: several buckets a backward.
BUCKET = 30_000


def config_for(engine: str) -> TrainConfig:
    return compose_train(
        [
            f"engine={engine}",
            "engine.num_processes=2",
            f"engine.device={'auto' if engine in SHARDED else 'cpu'}",
            "engine.precision=fp32",
            "target=smollm2_135m",
            "optimizer.global_batch_size=4",
            "optimizer.micro_batch_size=1",
        ]
    )


def storages_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of storages by address; those without memory left out."""
    mine = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in mine if not tensor.is_meta]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def living_storages() -> dict[int, int]:
    """Bytes of the storages of all tensors of this process."""
    gc.collect()
    found = [value for value in gc.get_objects() if type(value) in (Tensor, torch.nn.Parameter)]
    # Python knows no gradient that nobody has asked for.
    gradients = [value.grad for value in found if value.is_leaf]
    return storages_of([*found, *(gradient for gradient in gradients if gradient is not None)])


def counted(engine: Engine) -> dict[str, int]:
    """Bytes of the tensors of the training state, by what they are."""
    parameters = list(engine.parameters().values())
    states = [state for state in engine.optimizer.state.values() if state]
    weights = storages_of(getattr(value, "ds_tensor", value.data) for value in parameters)
    masters = storages_of(engine._flat_masters()) if isinstance(engine, Zero) else {}
    moments = storages_of(state[slot] for state in states for slot in ("exp_avg", "exp_avg_sq"))
    found = {"weights": weights, "moments": moments}
    found["masters"] = {place: size for place, size in masters.items() if place not in weights}
    return {name: sum(sizes.values()) for name, sizes in found.items()}


def measure(config: TrainConfig) -> dict[str, Any]:
    """What this process holds between the micro-batches of a step, and the most during one of them."""
    target = tiny_target()
    batch = random_batch(target, [8], [5], 1)
    before = living_storages()
    draft = tiny_draft(target, "dspark", num_layers=NUM_LAYERS)
    batch = batch._replace(plan=draft.slot_plan(batch.tokens))
    coefficients = coefficients_for(draft, batch)
    shapes = [list(parameter.shape) for parameter in draft.parameters() if parameter.requires_grad]
    accelerator = accelerators.make_accelerator(config.engine, 1.0, torch.device("cpu"), config.engine.num_processes)
    engine = make_engine(draft, accelerator, config.engine, config.optimizer)
    for step in range(2):
        for last in (False, True):
            if step == 0 or not last:
                engine.accumulate(batch, coefficients, is_last=last)
        if step == 0:
            engine.step(1e-3)
    living = living_storages()
    held = sum(size for place, size in living.items() if place not in before)
    if isinstance(engine, TorchEngine) and isinstance(engine._model, DistributedDataParallel):
        # Its buckets are no tensors that Python knows.
        held += sum(bucket.buffer().nbytes for bucket in engine._model.reducer._get_zeros_like_grad_buckets())
    most = most_bytes_during(lambda: engine.accumulate(batch, coefficients, is_last=False))
    return {"shapes": shapes, "held": held, "most": most, **counted(engine)}


def work(folder: Path) -> None:
    """What each of the two processes does: every engine."""
    prepare()
    accelerators.BUCKET_ELEMENTS = BUCKET
    for engine in ENGINES:
        offer(engine)
        found = measure(config_for(engine))
        (folder / f"{engine}_{PartialState().process_index}.json").write_text(json.dumps(found))
    leave()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each process holds, by engine and rank."""
    folder = tmp_path_factory.mktemp("shards")
    run_workers(__file__, folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, found: dict[str, dict[str, Any]]) -> Callable[[str, int], Held]:
    """What the plan says of a process."""
    monkeypatch.setattr(accelerators, "BUCKET_ELEMENTS", BUCKET)
    shapes = found["ddp_0"]["shapes"]
    return lambda engine, rank: held_by(engine, 2, shapes, is_summed=True, rank=rank)


@pytest.mark.distributed
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("engine", ENGINES)
def test_weights_masters_and_moments_of_every_process_have_the_planned_bytes(
    found: dict[str, dict[str, Any]], planned: Callable[[str, int], Held], engine: str, rank: int
) -> None:
    real, plan = found[f"{engine}_{rank}"], planned(engine, rank)
    assert {name: real[name] for name in ("weights", "masters", "moments")} == {
        "weights": plan.weights,
        "masters": plan.masters,
        "moments": plan.moments,
    }


@pytest.mark.distributed
@pytest.mark.parametrize("engine", ENGINES)
def test_all_that_a_process_holds_between_micro_batches_is_planned(
    found: dict[str, dict[str, Any]], planned: Callable[[str, int], Held], engine: str
) -> None:
    # Step counts, norms and, in ZeRO-3, a number in place of each weight; ZeRO-2 keeps whole weights on the edge.
    assert found[f"{engine}_0"]["held"] == pytest.approx(planned(engine, 0).throughout, rel=0.03)


@pytest.mark.distributed
@pytest.mark.parametrize("engine", ENGINES)
def test_weights_put_together_for_a_micro_batch_are_planned(
    found: dict[str, dict[str, Any]], planned: Callable[[str, int], Held], engine: str
) -> None:
    # DDP puts nothing together, so the rest of a micro-batch is what it takes.
    more = found[f"{engine}_0"]["most"] - found["ddp_0"]["most"]
    whole = planned("ddp", 0).weights
    assert more / whole == pytest.approx(planned(engine, 0).gathered / whole, abs=0.05)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
