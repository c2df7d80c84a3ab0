"""Share of the machine's matrix peak that a whole train step reaches, and where its time goes.

    python -m benchmarks.matrix_peak [--tiny]

The peak is that of square products in the same dtype, with the same threads, in the same run. Parts are run on their
own after the step; what they do not explain is called rest.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks import cases
from benchmarks.train_step import LossAlone, Step
from deepspec.attention import block_mask, grouped_sdpa
from deepspec.runtime import available_cpus
from deepspec.training.optim import clip_gradients

# Rows of one product with the vocabulary's weights; more run no faster.
PRODUCT_ROWS = 128


class Setting(NamedTuple):
    """What is measured, and the share to reach."""

    shape: cases.Shape
    sequences: int
    answer: int
    anchors: int
    repeats: int
    goal: float


SETTINGS = [Setting(cases.SMOLLM2, 8, 150, 64, 3, 0.5), Setting(cases.QWEN3_4B, 1, 150, 64, 1, 0.6)]


def measure(setting: Setting, threads: Sequence[int]) -> Iterator[str]:
    """Share and breakdown of one setting with each number of threads, as markdown."""
    torch.set_num_threads(max(threads))
    target = cases.make_target(setting.shape)
    draft = cases.make_draft(target)
    batch = cases.make_batch(target, cases.answer_lengths(setting.answer, setting.sequences), setting.anchors)
    step = Step(draft, [batch], setting.anchors)
    step.ours()
    for count in threads:
        torch.set_num_threads(count)
        yield share_of_peak(setting, step, count)


def share_of_peak(setting: Setting, step: Step, threads: int) -> str:
    """Share and breakdown with the present number of threads."""

    def peak_rate() -> float:
        return cases.matrix_rate(torch.bfloat16, step.device, min(4 * setting.shape.hidden, 2048))

    def clock(work: Callable[[], Any]) -> float:
        return median(cases.seconds(work, step.device) for _ in range(setting.repeats))

    # Around the step, so that a machine that slows down in between does not flatter it.
    before, whole, after = peak_rate(), clock(step.ours), peak_rate()
    peak, flops = max(before, after), cases.needed_flops(step.draft, step.batches[0])
    share = sum(flops.values()) / whole / peak
    spent = _parts(step, clock)
    spent["rest"] = whole - sum(spent.values())
    rows = [
        [
            name,
            f"{flops[name] / 1e9:.0f}" if name in flops else "-",
            f"{time:.3f}",
            f"{100 * time / whole:.0f} %",
            f"{100 * flops[name] / time / peak:.0f} %" if name in flops else "-",
        ]
        for name, time in spent.items()
    ]
    rows.append(["whole step", f"{sum(flops.values()) / 1e9:.0f}", f"{whole:.3f}", "100 %", f"**{100 * share:.0f} %**"])
    return (
        f"Hidden size {setting.shape.hidden}, vocabulary {setting.shape.vocab}, {setting.sequences} sequences x "
        f"{setting.anchors} anchors, {step.positions} positions, {threads} thread(s), bf16 products at "
        f"{peak / 1e9:.0f} GFLOP/s: {step.positions / whole:.0f} positions/s, **{100 * share:.0f} % of the peak** "
        f"(goal {100 * setting.goal:.0f} %).\n\n"
        + cases.table(["part", "needed GFLOP", "seconds", "share of time", "share of peak"], rows)
    )


def _parts(step: Step, clock: Callable[[Callable[[], Any]], float]) -> dict[str, float]:
    """Seconds of each part on its own, forward and backward."""
    draft, batch = step.draft, step.batches[0]
    tokens = batch.tokens

    def context() -> None:
        with step.autocast():
            hidden = draft.context(batch.features)
            rotation = draft.rotation(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])
            made = [
                one for layer in draft.layers for one in draft.family.keys_values(layer.self_attn, hidden, rotation)
            ]
        torch.autograd.backward(made, [torch.ones_like(one) for one in made])

    def blocks() -> None:
        with step.autocast():
            hidden = draft.block_hidden(batch)
        hidden.backward(torch.ones_like(hidden))

    shape, queries = draft.layer_config, tokens.anchors.shape[1] * draft.inputs_per_block
    length = tokens.input_ids.shape[1]
    low = torch.get_autocast_dtype(step.device.type)
    query, key, value = (
        torch.randn(len(tokens.lengths), heads, count, shape.head_dim, device=step.device).to(low).requires_grad_()
        for heads, count in (
            (shape.num_attention_heads, queries),
            (shape.num_key_value_heads, length + queries),
            (shape.num_key_value_heads, length + queries),
        )
    )

    def attention() -> None:
        mask = block_mask(tokens.anchors, tokens.anchor_mask, draft.inputs_per_block, length)
        for _ in draft.layers:
            output, _ = grouped_sdpa(draft, query, key, value, mask)
            output.backward(torch.ones_like(output))

    spent = {"context": clock(context), "layers": clock(blocks), "attention": clock(attention)}
    spent["layers"] -= spent["context"] + spent["attention"]
    alone = LossAlone(step, batch)
    operator = clock(alone.ours)
    alone.close()
    spent |= _products(step, clock)
    spent["softmax and losses"] = operator - sum(spent[name] for name in ("head forward", "head gradient", "teacher"))

    def update() -> None:
        clip_gradients(step.parameters, 1.0)
        step.optimizer.step()

    step.gradients()
    spent["clipping and optimizer"] = clock(update)
    step.optimizer.zero_grad(set_to_none=True)
    return spent


def _products(step: Step, clock: Callable[[Callable[[], Any]], float]) -> dict[str, float]:
    """Seconds of the products with vocabulary weights alone, a chunk of rows at a time."""
    draft, batch = step.draft, step.batches[0]
    weight = draft.draft_head_weight
    vocab, hidden = weight.shape
    assert draft.latent_weight is not None
    low = torch.get_autocast_dtype(step.device.type)
    latent_weight = draft.latent_weight.detach().to(low)
    flops = cases.needed_flops(draft, batch)
    rows, taught = step.positions, round(flops["teacher"] / (2.0 * vocab * hidden))

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, device=step.device).to(low)

    states, latents = draw(rows, hidden), draw(rows, latent_weight.shape[1])
    gradients, begins = draw(PRODUCT_ROWS, vocab), range(0, rows, PRODUCT_ROWS)

    def forward() -> None:
        for begin in begins:
            states[begin : begin + PRODUCT_ROWS] @ weight.T
            latents[begin : begin + PRODUCT_ROWS] @ latent_weight.T

    def gradient() -> None:
        for begin in begins:
            part = gradients[: min(PRODUCT_ROWS, rows - begin)]
            part @ weight
            part @ latent_weight
            part.T @ latents[begin : begin + PRODUCT_ROWS]

    def teacher() -> None:
        for begin in range(0, taught, PRODUCT_ROWS):
            states[begin : min(begin + PRODUCT_ROWS, taught)] @ weight.T

    with torch.no_grad():
        return {"head forward": clock(forward), "head gradient": clock(gradient), "teacher": clock(teacher)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Share of the matrix peak that a train step reaches.")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--results", type=cases.Path, default=None, help="folder of the result file")
    chosen = parser.parse_args(arguments)
    found = [Setting(cases.TINY, 2, 20, 8, 1, 0.0)] if chosen.tiny else SETTINGS
    parts = []
    for setting in found:
        for part in measure(setting, [1] if chosen.tiny else sorted({1, available_cpus()})):
            parts.append(part)
            print(part, flush=True)
    text = "DSpark, 2 layers, K 7, optimizer included; only needed FLOPs count.\n\n" + "\n\n".join(parts)
    path = cases.write_result(
        "matrix_peak", "Share of the matrix peak", text, torch.device("cpu"), folder=cases.results_folder(chosen)
    )
    print(path)


if __name__ == "__main__":
    main()
