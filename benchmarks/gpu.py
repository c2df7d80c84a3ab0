"""One GPU: correctness first, then step, head operator and decoding against naive ones, and a short table last.

python -m benchmarks.gpu [--tiny]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median

import torch

from benchmarks import cases
from benchmarks.naive import naive_objective
from benchmarks.train_step import GIB, NUM_SLOTS, LossAlone, Step, split
from deepspec.algorithms.dspark import Draft
from deepspec.data.ahead import AheadFeatures
from deepspec.data.features import FeatureMemory, FeatureSource, OnlineFeatures
from deepspec.decoding.decoder import Request, generate
from deepspec.decoding.sampling import Sampling
from deepspec.runtime import choose_device
from deepspec.targets.base import Target
from deepspec.types import FeatureBatch, TokenBatch

GREEDY = Sampling(temperature=0.0)
# Target passes of one step, the most of which can run beside the draft.
MICRO_BATCHES = 4


def check_training(device: str) -> str:
    """Ours equals naive, in fp32 element by element of the gradient's norm."""
    target = cases.make_target(cases.TINY, torch.float32, device)
    draft = cases.make_draft(target, rank=8)
    batch = cases.make_batch(target, [3, 9, 20], 12, prompt=6)
    counts, total = draft.loss_counts(batch.tokens), draft.slot_weights(batch.tokens).sum()
    coefficients = {name: weight / counts[name] for name, weight in draft.loss_weights.items()}
    ours = draft(batch, coefficients).objective
    naive = naive_objective(draft, batch, 24, total)
    parameters = list(draft.parameters())
    found = torch.autograd.grad(ours, parameters)
    wanted = torch.autograd.grad(naive, parameters)
    worst = max(float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True))
    assert abs(float(ours.detach() / naive.detach()) - 1.0) < 1e-4, "objective differs from the naive one"
    assert worst < 1e-3, f"gradient is {worst:.1e} off the naive one"
    return f"train step fp32 against naive: gradients within {worst:.0e}"


def check_decoding(device: str) -> str:
    """Greedy text with a draft, without one, and by running the whole sequence again for every token."""
    target = cases.make_target(cases.TINY, torch.float32, device, is_runnable=True)
    draft = cases.make_draft(target, rank=8).eval()
    prompts = [list(range(5, 5 + length)) for length in (4, 9, 17)]
    requests = [Request(str(index), prompt) for index, prompt in enumerate(prompts)]
    wanted = {request.prompt_id: _greedy(target, list(request.prompt_ids), 24) for request in requests}
    for model in (None, draft):
        answers = generate(target, model, requests, GREEDY, max_new_tokens=24, batch_size=2)
        assert {answer.prompt_id: answer.output_ids for answer in answers} == wanted, "decoding is not lossless"
    return "greedy decoding with and without a draft: the target's own text"


def check_overlap(device: str) -> str:
    """A target that runs ahead gives the features of its turn, however busy the draft's stream is."""
    target = cases.make_target(cases.TINY, torch.float32, device, is_runnable=True)
    tokens = [cases.make_batch(target, [answer, 20], 8, prompt=6).tokens for answer in range(8, 24)]
    large, differences = torch.randn(1024, 1024, device=device), []
    in_turn = OnlineFeatures(target, [], FeatureMemory(0.0), needs_log_normaliser=True)
    ahead = AheadFeatures(in_turn, target.device)
    expected = [in_turn.complete(one) for one in tokens]
    ahead.upcoming([_on_host(one) for one in tokens])
    for one, wanted in zip(tokens, expected, strict=True):
        found = ahead.complete(one)
        for _ in range(10):
            large = torch.tanh(large @ large)
        differences += [(part != other).sum() for part, other in zip(found[1:4], wanted[1:4], strict=True)]
        del found
    assert not int(torch.stack(differences).sum()), "a target that runs ahead gives other features"
    return "target beside the draft's step: the very features of its turn"


def _on_host(tokens: TokenBatch) -> TokenBatch:
    """As a loader makes it; features know a batch by its sample index."""
    return TokenBatch(*(tensor.cpu() for tensor in tokens))._replace(sample_index=tokens.sample_index)


@torch.inference_mode()
def _greedy(target: Target, ids: list[int], count: int) -> list[int]:
    start = len(ids)
    for _ in range(count):
        logits = target.model(torch.tensor([ids], device=target.device), use_cache=False).logits
        ids = [*ids, int(logits[0, -1].argmax())]
    return ids[start:]


def measure_training(target: Target, draft: Draft, answers: Sequence[int], slots: int) -> list[list[str]]:
    """Rows of the table: step and head operator."""
    batch = cases.make_batch(target, answers, slots)
    step = Step(draft, [batch], slots)
    step.check()
    step.make_states(step.optimizer, step.naive_optimizer)
    rows = [_row("train step, ms", step.naive, step.ours, step.device)]
    alone = LossAlone(step, split(batch)[-1])
    rows.append(_row("head and losses, one sequence, ms", alone.naive, alone.ours, step.device))
    alone.close()
    rows.append(measure_overlap(target, step))
    flops = sum(cases.needed_flops(draft, batch).values())
    peak = cases.matrix_rate(torch.bfloat16, step.device, 8192 if step.device.type == "cuda" else 256)
    time = median(cases.seconds(step.ours, step.device) for _ in range(3))
    rows.append(["positions/s, whole step", "-", f"{step.positions / time:.0f}", "-", "-", "-"])
    rows.append([f"share of {peak / 1e12:.1f} TFLOP/s", "-", f"{100 * flops / time / peak:.0f} %", "-", "-", "-"])
    return rows


def measure_overlap(target: Target, step: Step) -> list[str]:
    """Row of the table: target passes and draft steps over several micro-batches, in turn and overlapped."""
    batch = step.batches[0]
    micro_batches = [
        batch.tokens._replace(sample_index=batch.tokens.sample_index.clone()) for _ in range(MICRO_BATCHES)
    ]
    online = OnlineFeatures(target, [], FeatureMemory(0.0))

    def train(source: FeatureSource) -> None:
        source.upcoming([_on_host(tokens) for tokens in micro_batches])
        found: FeatureBatch | None = None
        for tokens in micro_batches:
            found = None  # as the trainer: a batch is let go before the next is asked for
            found = source.complete(tokens)._replace(plan=batch.plan)
            with step.autocast():
                objective = step.draft(found, step.coefficients).objective
            objective.backward()
        step.draft.zero_grad(set_to_none=True)

    what = f"target of {target.num_layers} layers and step, in turn / overlapped, ms"
    return _row(what, lambda: train(online), lambda: train(AheadFeatures(online, target.device)), step.device)


def _row(what: str, naive: Callable[[], None], ours: Callable[[], None], device: torch.device) -> list[str]:
    peaks = [cases.peak_bytes(work, device) for work in (naive, ours)]  # also warms up
    times = [1e3 * median(cases.seconds(work, device) for _ in range(3)) for work in (naive, ours)]
    return [what, f"{times[0]:.1f}", f"{times[1]:.1f}", f"{times[0] / times[1]:.1f}x"] + [
        f"{peak / GIB:.2f}" for peak in peaks
    ]


def measure_decoding(target: Target, draft: Draft, tokens: int) -> list[list[str]]:
    """Rows of the table: plain decoding against transformers' own, and the parts of a round with a draft."""
    draft = draft.to(target.dtype).eval()
    request = Request("0", list(range(5, 69)))
    ids = torch.tensor([list(request.prompt_ids)], device=target.device)

    def theirs() -> None:
        target.model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)

    def ours() -> None:
        list(generate(target, None, [request], GREEDY, max_new_tokens=tokens, timers=False))

    times = []
    for work in (theirs, ours):
        work()
        times.append(1e3 * min(cases.seconds(work, target.device) for _ in range(2)) / tokens)
    row = ["plain decoding, ms a token", *(f"{time:.2f}" for time in times), f"{times[0] / times[1]:.1f}x", "-", "-"]
    list(generate(target, draft, [request], GREEDY, max_new_tokens=8))
    (answer,) = generate(target, draft, [request], GREEDY, max_new_tokens=tokens)
    drafting = 1e3 * median(one.seconds_draft for one in answer.rounds)
    verifying = 1e3 * median(one.seconds_verify for one in answer.rounds)
    even = (drafting + verifying) / times[1]
    return [
        row,
        ["round: draft, ms", "-", f"{drafting:.2f}", "-", "-", "-"],
        ["round: verification, ms", "-", f"{verifying:.2f}", "-", "-", "-"],
        ["tau at which a draft pays", "-", f"{even:.2f}", "-", "-", "-"],
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Checks and measurements on one GPU.")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs, also without a GPU")
    parser.add_argument("--results", type=cases.Path, default=None, help="folder of the result file")
    chosen = parser.parse_args(arguments)
    device = choose_device("auto" if chosen.tiny else "cuda")
    for check in (check_training, check_overlap, check_decoding):
        print(check(str(device)), flush=True)
    shape, sequences, answer, slots, tokens = cases.QWEN3_4B, 4, 300, NUM_SLOTS, 64
    if chosen.tiny:
        shape, sequences, answer, slots, tokens = cases.TINY, 2, 20, 40, 8
    target = cases.make_target(shape, torch.bfloat16, str(device), is_runnable=True)
    draft = cases.make_draft(target)
    rows = measure_training(target, draft, cases.answer_lengths(answer, sequences), slots)
    rows += measure_decoding(target, draft, tokens)
    text = cases.table(["bf16, batch 1 in decoding", "naive", "ours", "ratio", "naive peak GiB", "ours peak GiB"], rows)
    about = (
        f"Random weights; hidden size {shape.hidden}, vocabulary {shape.vocab}, {cases.NUM_TAPS + 3} target layers, "
    )
    about += f"2 draft layers, {sequences} sequences of 300 answer tokens on average, {slots} slots in the naive step."
    path = cases.write_result("gpu", "On one GPU", f"{about}\n\n{text}", device, folder=cases.results_folder(chosen))
    print(f"{text}\n{path}")


if __name__ == "__main__":
    main()
