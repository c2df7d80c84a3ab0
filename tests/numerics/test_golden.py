"""Equality with the public DeepSpec implementation on every case in a folder (DEEPSPEC_GOLDEN, default tests/golden).

A case is NAME.safetensors + NAME.json. What a file holds decides which checks run on it, so a new kind of head, seed or
size needs no change here.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from deepspec.algorithms.backbone import BlockDraft
from deepspec.algorithms.base import DraftModel
from deepspec.algorithms.checkpoint import load_draft
from deepspec.algorithms.eagle3 import Draft as Eagle3Draft
from deepspec.attention import GROUPED_SDPA, GrowingPrefix, block_mask
from deepspec.data.anchors import supervised_slots
from deepspec.decoding.decoder import Request, generate
from deepspec.decoding.sampling import Sampling
from deepspec.decoding.schedule import FullSchedule, ThresholdSchedule
from deepspec.targets.base import Target
from deepspec.types import FeatureBatch, LossTerms, SlotPlan, TokenBatch

FOLDER = Path(os.environ.get("DEEPSPEC_GOLDEN", Path(__file__).parent.parent / "golden"))
NOT_CASES = ("optim_schedule", "cache_")
STOP_TOKEN = 3
MAX_NEW_TOKENS = 40


def _names() -> list[str]:
    stems = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
    return [stem for stem in stems if not stem.startswith(NOT_CASES)]


def _keys(name: str) -> set[str]:
    return set(_case(name).tensors)


class Case(NamedTuple):
    tensors: dict[str, Tensor]
    meta: dict[str, Any]

    def group(self, prefix: str) -> dict[str, Tensor]:
        return {key[len(prefix) :]: value for key, value in self.tensors.items() if key.startswith(prefix)}


@lru_cache
def _case(name: str) -> Case:
    return Case(load_file(FOLDER / f"{name}.safetensors"), json.loads((FOLDER / f"{name}.json").read_text()))


BLOCK_CASES = [name for name in _names() if "anchor_positions" in _keys(name)]
STEP_CASES = [name for name in _names() if "step0.draft_logits" in _keys(name)]
DECODE_CASES = [
    (name, key.removesuffix("output_ids"))
    for name in _names()
    for key in sorted(_keys(name))
    if key.endswith("output_ids") and "greedy" in key
]


def _target(case: Case) -> Target:
    config = AutoConfig.for_model(**{k: v for k, v in case.meta["target_config"].items() if k != "dtype"})
    config._attn_implementation = GROUPED_SDPA
    model = AutoModelForCausalLM.from_config(config)
    weights = case.group("target.")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert set(missing) <= tied
    assert not unexpected
    return Target(
        model, None, name="golden", layer_ids=case.meta["config"]["target_layer_ids"], stop_token_ids=[STOP_TOKEN]
    )


def _draft(case: Case, target: Target, folder: Path) -> DraftModel:
    """The case's weights and config written as a DeepSpec checkpoint and read by our loader."""
    (folder / "config.json").write_text(json.dumps(case.meta["config"]))
    save_file(case.group("w."), folder / "model.safetensors")
    return load_draft(folder, target, dtype=torch.float32).requires_grad_(True)


def _batch(case: Case, anchors: Tensor | None = None, anchor_mask: Tensor | None = None) -> FeatureBatch:
    ids = case.tensors["in.input_ids"]
    none = torch.zeros(len(ids), 1, dtype=torch.int64)
    tokens = TokenBatch(
        input_ids=ids,
        lengths=case.tensors["in.attention_mask"].sum(dim=1),
        answer_mask=case.tensors["in.loss_mask"].bool(),
        anchors=none if anchors is None else anchors,
        anchor_mask=none.bool() if anchor_mask is None else anchor_mask,
        sample_index=torch.arange(len(ids)),
    )
    hidden, last = case.tensors["in.target_hidden_states"], case.tensors["in.target_last_hidden_states"]
    return FeatureBatch(tokens, hidden.float(), last.float())


def _block_batch(case: Case) -> FeatureBatch:
    return _batch(case, case.tensors["anchor_positions"], case.tensors["block_keep_mask"].bool())


def _assert_gradients(draft: DraftModel, case: Case) -> None:
    expected = case.group("grad.")
    found = {name: parameter.grad for name, parameter in draft.named_parameters() if parameter.grad is not None}
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize("name", BLOCK_CASES)
def test_block_masks_and_supervised_slots_are_those_of_deepspec(name: str) -> None:
    case = _case(name)
    batch = _block_batch(case)
    tokens, slots = batch.tokens, case.meta["config"]["block_size"]
    mask = block_mask(tokens.anchors, tokens.anchor_mask, slots, tokens.input_ids.shape[1]).dense()[:, 0]
    kept = tokens.anchor_mask.repeat_interleave(slots, dim=1)
    assert torch.equal(mask[kept], case.tensors["attention_mask_dense"].bool()[kept])
    supervised = supervised_slots(
        tokens.anchors, tokens.anchor_mask, tokens.answer_mask, tokens.lengths, slots, "anchor_first"
    )
    assert torch.equal(supervised, case.tensors["eval_mask"].bool())


@pytest.mark.parametrize("name", BLOCK_CASES)
def test_block_logits_losses_and_gradients_are_those_of_deepspec(name: str, tmp_path: Path) -> None:
    case = _case(name)
    target = _target(case)
    draft = _draft(case, target, tmp_path)
    assert isinstance(draft, BlockDraft)
    batch = _block_batch(case)
    supervised = case.tensors["eval_mask"].bool()

    hidden = draft.block_hidden(batch)
    offsets = torch.arange(draft.num_draft_tokens)
    positions = (batch.tokens.anchors[..., None] + offsets).clamp(max=batch.tokens.input_ids.shape[1] - 1)
    previous = batch.tokens.input_ids.gather(1, positions.flatten(1)).view_as(positions)
    heads = draft.head_inputs(hidden.flatten(0, 1), previous.flatten(0, 1), torch.arange(positions.numel()))
    logits = draft.head.logits(hidden)
    if heads.latent is not None and draft.latent_weight is not None:
        logits = logits + (heads.latent @ draft.latent_weight.T).view_as(logits)
    assert (logits - case.tensors["draft_logits"])[supervised].abs().max() <= 1e-5
    if "confidence_pred" in case.tensors and heads.confidence_logits is not None:
        found = heads.confidence_logits.view_as(case.tensors["confidence_pred"])
        assert (found - case.tensors["confidence_pred"])[supervised].abs().max() <= 1e-5

    names = {"ce": "ce_loss", "tv": "l1_loss", "confidence": "confidence_loss"}
    arguments = case.meta["model_args"]
    alphas = {
        "ce": arguments.get("ce_loss_alpha", 1.0),
        "tv": arguments.get("l1_loss_alpha", 0.0),
        "confidence": arguments.get("confidence_head_alpha", 0.0),
    }
    weights = {loss: alpha for loss, alpha in alphas.items() if alpha and f"term.{names[loss]}_num" in case.tensors}
    denominators = {loss: case.tensors[f"term.{names[loss]}_den"] for loss in weights}
    terms = draft(batch, {loss: weight / (denominators[loss] + 1e-6) for loss, weight in weights.items()})
    for loss, ratio in terms.losses.items():
        assert torch.allclose(ratio.total, case.tensors[f"term.{names[loss]}_num"], rtol=1e-5), loss
        assert torch.allclose(ratio.count, denominators[loss], rtol=1e-5), loss
    assert torch.allclose(terms.objective, case.tensors["loss"], rtol=1e-5)
    terms.objective.backward()
    _assert_gradients(draft, case)


def _deepspec_step_weights(case: Case, steps: int) -> Tensor:
    """DeepSpec gates row t of step s by loss_mask[t+s] (two positions early) and drops each sample's last token."""
    mask = case.tensors["in.loss_mask"].float()
    last = case.tensors["in.attention_mask"].sum(dim=1) - 1
    mask = mask.scatter(1, last[:, None], 0.0)
    shifted = [torch.nn.functional.pad(mask[:, step:], (0, step)) for step in range(steps)]
    return torch.stack(shifted)


def _seen_keys(draft: Eagle3Draft, batch: FeatureBatch, rows: Tensor, step: int, row: int) -> Tensor:
    """Keys that a row really depends on in a step, found by gradient: [steps so far, L] bool."""
    seen: list[Tensor] = []
    original = GrowingPrefix.update

    def watched(self: GrowingPrefix, keys: Tensor, values: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        values = values.detach().requires_grad_(True)
        seen.append(values)
        return original(self, keys, values, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrowingPrefix, "update", watched)
        hidden = draft.unroll(batch, rows)
    hidden[step, :, row].sum().backward()
    grads = [torch.zeros_like(values) if values.grad is None else values.grad for values in seen[: step + 1]]
    return torch.stack([gradient.abs().sum(dim=(1, 3)) > 0 for gradient in grads], dim=1)


@pytest.mark.parametrize("name", STEP_CASES)
def test_unrolled_rows_see_the_keys_that_deepspec_lets_them_see(name: str, tmp_path: Path) -> None:
    case = _case(name)
    draft = _draft(case, _target(case), tmp_path)
    assert isinstance(draft, Eagle3Draft)
    batch = _batch(case)
    count, length = batch.tokens.input_ids.shape
    rows = torch.arange(length).expand(count, -1)
    for step in range(draft.num_draft_tokens):
        expected = case.tensors[f"step{step}.attention_mask_dense"].bool().unflatten(2, (step + 1, length))
        for row in range(length - step):
            # Values are cut from their past, so the gradient shows this step's own attention alone.
            seen = _seen_keys(draft, batch, rows, step, row)
            valid = row < batch.tokens.lengths - step
            assert torch.equal(seen[valid], expected[valid, row])


@pytest.mark.parametrize("name", STEP_CASES)
def test_unrolled_steps_losses_and_gradients_are_those_of_deepspec(name: str, tmp_path: Path) -> None:
    case = _case(name)
    target = _target(case)
    draft = _draft(case, target, tmp_path)
    assert isinstance(draft, Eagle3Draft)
    batch = _batch(case)
    count, length = batch.tokens.input_ids.shape
    steps = draft.num_draft_tokens
    rows = torch.arange(length).expand(count, -1)
    hidden = draft.unroll(batch, rows)
    for step in range(steps):
        valid = torch.arange(length) < batch.tokens.lengths[:, None] - step
        # Before the norm values reach 114, where neighbouring fp32 numbers are 7.6e-6 apart: 1e-5 of their size.
        expected = case.tensors[f"step{step}.hidden"][valid]
        assert (hidden[step][valid] - expected).abs().max() <= 1e-5 * expected.square().mean().sqrt()
        logits = draft.head.logits(draft.norm(hidden[step]), draft.student_weight)
        assert (logits - case.tensors[f"step{step}.draft_logits"])[valid].abs().max() <= 1e-5

    # Past the end DeepSpec's teacher is uniform: logits of a zero hidden state. Rows of zeros behind the batch say so.
    padded = FeatureBatch(
        batch.tokens._replace(input_ids=torch.nn.functional.pad(batch.tokens.input_ids, (0, steps + 1))),
        batch.features,
        torch.nn.functional.pad(batch.last_hidden, (0, 0, 0, steps + 1)),
    )
    decay = case.meta["config"].get("step_loss_decay", 0.8)
    coefficients = {
        loss: torch.tensor(decay**step / batch.tokens.input_ids.numel()) for step, loss in enumerate(draft.loss_weights)
    }
    weights = _deepspec_step_weights(case, steps)
    chosen = weights.flatten().nonzero().squeeze(-1)
    step_of, sequence = torch.arange(steps)[:, None, None], torch.arange(count)[:, None]
    taught_by = (rows + 1 + step_of + sequence * (length + steps + 1)).flatten()[chosen]
    order = taught_by.argsort(stable=True)
    plan = SlotPlan(chosen[order], taught_by[order])
    terms: LossTerms = draft.step_losses(hidden, padded, weights, plan, coefficients)
    assert torch.allclose(terms.objective, case.tensors["loss"], rtol=1e-5)
    terms.objective.backward()
    _assert_gradients(draft, case)


@pytest.mark.parametrize(("name", "prefix"), DECODE_CASES)
def test_greedy_rounds_are_those_of_deepspec(name: str, prefix: str, tmp_path: Path) -> None:
    case = _case(name)
    group = case.group(prefix)
    source = case if "target_config" in case.meta and case.group("target.") else _case(name)
    target = _target(source)
    draft = _draft(source, target, tmp_path)
    which = prefix.split(".")[0]
    prompt = case.tensors["eval.prompt" + (which[1:] if which.startswith("p") else "")][0].tolist()
    threshold = prefix.split("_conf")[1].rstrip(".") if "_conf" in prefix else None
    schedule = FullSchedule() if threshold is None else ThresholdSchedule(float(threshold))
    finished = list(
        generate(
            target,
            draft,
            [Request("golden", prompt)],
            Sampling(temperature=0.0),
            max_new_tokens=MAX_NEW_TOKENS,
            schedule=schedule,
        )
    )
    output = prompt + list(finished[0].output_ids)
    assert output == group["output_ids"][0].tolist()
    rounds = finished[0].rounds
    emitted = group["acceptance_lengths"].tolist()
    # The public loop starts one more round when exactly max_new_tokens are out; ours starts none.
    kept = len(emitted) - (1 if sum(emitted[:-1]) + 1 >= MAX_NEW_TOKENS else 0)
    assert [one.emitted for one in rounds] == emitted[:kept]
    assert [one.proposed for one in rounds] == group["proposal_lengths"].tolist()[:kept]
    assert [one.accepted for one in rounds] == group["accepted_draft_lengths"].tolist()[:kept]
