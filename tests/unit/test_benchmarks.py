"""The benchmarks compare like with like: the naive step has our losses and gradients, and the helpers measure right."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from helpers import coefficients_for

from benchmarks import data, evaluator, gpu, matrix_peak, peers, scaling, train_step, waiting
from benchmarks.cases import (
    TINY,
    answer_lengths,
    make_batch,
    make_draft,
    make_target,
    needed_flops,
    peak_bytes,
    write_result,
)
from benchmarks.naive import naive_objective

NUM_SLOTS = 24


# Weights of slots and their sums are fp32 whatever the dtype of the model.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@pytest.mark.parametrize("num_anchors", [5, 24])
def test_naive_step_has_our_loss_and_gradients(dtype: torch.dtype, tolerance: float, num_anchors: int) -> None:
    target = make_target(TINY, dtype)
    draft = make_draft(target, rank=8)
    batch = make_batch(target, [3, 9, 20], num_anchors, prompt=6)
    ours = draft(batch, coefficients_for(draft, batch)).objective
    naive = naive_objective(draft, batch, NUM_SLOTS, draft.slot_weights(batch.tokens).sum())
    torch.testing.assert_close(ours, naive, rtol=tolerance, atol=0.0)
    expected = torch.autograd.grad(naive, list(draft.parameters()))
    for (name, _), found, wanted in zip(
        draft.named_parameters(), torch.autograd.grad(ours, list(draft.parameters())), expected, strict=True
    ):
        assert (found - wanted).norm() <= tolerance * wanted.norm(), name


def test_naive_step_does_not_depend_on_how_many_slots_are_dummies() -> None:
    target = make_target(TINY, torch.float64)
    draft = make_draft(target, rank=8)
    batch = make_batch(target, [12, 20], 5, prompt=6)
    weight = draft.slot_weights(batch.tokens).sum()
    few, many = (naive_objective(draft, batch, slots, weight) for slots in (5, 40))
    torch.testing.assert_close(few, many, rtol=1e-12, atol=0.0)


def test_answer_lengths_have_the_mean_and_a_spread() -> None:
    lengths = answer_lengths(300, 9)
    assert abs(sum(lengths) / 9 - 300) < 1
    assert max(lengths) > 2.5 * min(lengths)


def test_peak_counts_what_is_alive_at_once() -> None:
    def work() -> None:
        first = torch.ones(1000)
        del first
        second = torch.ones(2000)
        third = second + second
        del second, third

    assert peak_bytes(work, torch.device("cpu")) == pytest.approx(16000, abs=256)


def test_result_file_says_what_it_was_measured_on(tmp_path: Path) -> None:
    path = write_result("step", "Train step", "| a |", torch.device("cpu"), folder=tmp_path)
    assert path.name.startswith("step_")
    text = path.read_text()
    assert torch.__version__ in text
    assert text.endswith("| a |\n")


def test_needed_flops_count_every_product_once() -> None:
    target = make_target(TINY, torch.float32)
    draft = make_draft(target, rank=8)
    # One sequence whose only anchor has exactly K labels after it.
    batch = make_batch(target, [1 + draft.num_draft_tokens], 1, prompt=6)
    tokens = batch.tokens._replace(anchors=torch.tensor([[6]]))
    flops = needed_flops(draft, batch._replace(tokens=tokens))
    rows, hidden, vocab = 7, 32, TINY.vocab
    assert flops["head forward"] == 2 * rows * vocab * (hidden + 8)
    assert flops["head gradient"] == 2 * rows * vocab * (hidden + 2 * 8)
    assert flops["teacher"] == 2 * rows * vocab * hidden
    # q and o are square, k and v half as wide; three products of 32 x 48.
    assert flops["layers"] == 6 * rows * 2 * (3 * hidden * hidden + 3 * hidden * 48)


@pytest.mark.parametrize(
    "module", [train_step, matrix_peak, scaling, gpu, evaluator, data, pytest.param(waiting, marks=pytest.mark.slow)]
)
def test_every_benchmark_runs_and_writes_its_result(module: ModuleType, tmp_path: Path) -> None:
    arguments = ["--answers", "20"] if module is train_step else []
    threads = torch.get_num_threads()
    try:
        module.main(["--tiny", "--results", str(tmp_path), *arguments])
    finally:
        torch.set_num_threads(threads)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith(module.__name__.rpartition(".")[2])
    assert "| --- |" in path.read_text()


def test_our_side_of_the_peers_has_the_loss_and_gradients_of_full_logits() -> None:
    tensors = peers.make_tensors(TINY, blocks=5)
    ours = peers.Ours(tensors)
    objective = ours.work()
    hidden, w1, w2 = (tensors[name].clone().requires_grad_() for name in ("hidden", "w1", "w2"))
    logits = hidden.float() @ tensors["weight"].float().T + w1[tensors["previous"]] @ w2.T
    teacher = (tensors["teacher"].float() @ tensors["weight"].float().T)[tensors["rows"]]
    distance = (logits.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)
    entropy = torch.nn.functional.cross_entropy(logits, tensors["labels"], reduction="none")
    decay = torch.exp(-torch.arange(peers.BLOCK) / peers.DECAY).repeat(5) / len(tensors["rows"])
    expected = ((0.1 * entropy + 0.9 * distance) * decay).sum()
    expected.backward()
    # The products run in bf16 as in the benchmark.
    assert objective == pytest.approx(float(expected.detach()), rel=0.01)
    for name, wanted in (("hidden", hidden), ("w1", w1), ("w2", w2)):
        found = ours.trained[name].grad
        assert found is not None
        assert wanted.grad is not None
        assert (found - wanted.grad).float().norm() <= 0.1 * wanted.grad.float().norm(), name
