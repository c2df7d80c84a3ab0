"""The training forward of every draft: it learns, sees no future, and sums what it says it sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import KINDS, all_rows, coefficients_for, kind_of_draft, overfit, random_batch, tiny_target
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspec.algorithms.backbone import BlockDraft
from deepspec.algorithms.base import DraftModel, Observation, Sampler
from deepspec.algorithms.dspark import Draft as DSparkDraft
from deepspec.algorithms.eagle3 import Draft as Eagle3Draft
from deepspec.decoding.sampling import Sampling
from deepspec.targets.base import Target
from deepspec.types import FeatureBatch, LossTerms, TokenBatch

FAMILIES = ("qwen3", "llama", "gemma4")
BLOCK_KINDS = [kind for kind in KINDS if not kind.startswith("eagle3")]
LENGTHS, PROMPTS = (19, 11, 15), (4, 3, 9)


def _exact(family: str = "qwen3") -> Target:
    return tiny_target(family, dtype=torch.float64)


def _gradients(draft: DraftModel, scalar: Tensor) -> list[Tensor]:
    leaves = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(scalar, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_finite_and_falls_and_every_parameter_gets_a_gradient(kind: str, family: str) -> None:
    target = tiny_target(family)
    draft = kind_of_draft(target, kind, draft_layers="target")
    draft.initialise(target, (), seed=0)
    batch = random_batch(target, LENGTHS, PROMPTS)
    history = overfit(draft, batch, steps=12)
    assert all(torch.tensor(history).isfinite())
    assert history[-1] < 0.9 * history[0]
    terms = draft(batch, coefficients_for(draft, batch))
    terms.objective.backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
        assert bool(parameter.grad.isfinite().all()), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [None, 40])
def test_counts_known_before_the_forward_equal_what_the_forward_summed(kind: str, vocab: int | None) -> None:
    target = tiny_target()
    draft = kind_of_draft(target, kind, draft_vocab_size=vocab)
    batch = random_batch(target, LENGTHS, PROMPTS)
    counts, coefficients = draft.loss_counts(batch.tokens), coefficients_for(draft, batch)
    terms: LossTerms = draft(batch, coefficients)
    assert terms.losses.keys() == counts.keys() == draft.loss_weights.keys()
    for name, ratio in terms.losses.items():
        assert counts[name].dtype == torch.float32
        assert counts[name].dim() == 0
        torch.testing.assert_close(ratio.count, counts[name])
        assert counts[name] > 0
    total = sum(coefficients[name] * ratio.total for name, ratio in terms.losses.items())
    torch.testing.assert_close(terms.objective, total)
    assert not any(part.requires_grad for ratio in (*terms.losses.values(), *terms.metrics.values()) for part in ratio)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_a_supervised_token_gives_zero_and_can_be_differentiated(kind: str) -> None:
    target = tiny_target()
    draft = kind_of_draft(target, kind)
    batch = random_batch(target, (6, 5), (9, 9))
    assert not batch.tokens.answer_mask.any()
    assert not batch.tokens.anchor_mask.any()
    terms = draft(batch, coefficients_for(draft, batch))
    assert terms.objective.item() == 0.0
    assert all(gradient.abs().sum() == 0 for gradient in _gradients(draft, terms.objective))


def _only(batch: FeatureBatch, row: int) -> FeatureBatch:
    """One sample of a batch, without its padding."""
    length = int(batch.tokens.lengths[row])
    one, part = slice(row, row + 1), slice(0, length)
    tokens = batch.tokens
    assert batch.log_normaliser is not None
    return FeatureBatch(
        TokenBatch(
            tokens.input_ids[one, part],
            tokens.lengths[one],
            tokens.answer_mask[one, part],
            tokens.anchors[one],
            tokens.anchor_mask[one],
            tokens.sample_index[one],
        ),
        batch.features[one, part],
        batch.last_hidden[one, part],
        batch.log_normaliser[one, part],
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [None, 40])
def test_a_packed_batch_equals_its_samples_one_at_a_time(kind: str, vocab: int | None) -> None:
    target = _exact()
    draft = kind_of_draft(target, kind, draft_vocab_size=vocab)
    batch = random_batch(target, LENGTHS, PROMPTS)
    coefficients = coefficients_for(draft, batch)
    objective = draft(batch, coefficients).objective
    alone = torch.stack([draft(_only(batch, row), coefficients).objective for row in range(len(LENGTHS))]).sum()
    torch.testing.assert_close(objective, alone, rtol=1e-9, atol=1e-9)
    for packed, single in zip(_gradients(draft, objective), _gradients(draft, alone), strict=True):
        torch.testing.assert_close(packed, single, rtol=1e-7, atol=1e-9)


# Leaks --------------------------------------------------------------------------------------------------------------


def _with_noise(batch: FeatureBatch, row: int, tokens_from: int, features_from: int) -> FeatureBatch:
    """Everything changed but the given sample's tokens before `tokens_from` and features before `features_from`."""
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(4, 90, batch.tokens.input_ids.shape, generator=generator)
    features = torch.randn(batch.features.shape, generator=generator, dtype=batch.features.dtype)
    ids[row, :tokens_from] = batch.tokens.input_ids[row, :tokens_from]
    features[row, :features_from] = batch.features[row, :features_from]
    return batch._replace(tokens=batch.tokens._replace(input_ids=ids), features=features)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_block_never_sees_features_at_or_after_its_anchor_nor_later_tokens_nor_other_samples(
    kind: str, family: str
) -> None:
    target = _exact(family)
    draft = kind_of_draft(target, kind, draft_layers="target")
    assert isinstance(draft, BlockDraft)
    batch = random_batch(target, LENGTHS, PROMPTS)
    inputs = batch.features.clone().requires_grad_()
    hidden = draft.block_hidden(batch._replace(features=inputs))
    for row, block in batch.tokens.anchor_mask.nonzero().tolist():
        anchor = int(batch.tokens.anchors[row, block])
        reach = torch.autograd.grad(hidden[row, block].square().sum(), inputs, retain_graph=True)[0]
        used = reach.abs().sum(dim=-1) > 0
        expected = torch.zeros_like(used)
        expected[row, :anchor] = True
        assert torch.equal(used, expected)
        changed = _with_noise(batch, row, anchor + 1, anchor)
        other = draft.block_hidden(changed)
        assert torch.equal(other[row, block], hidden[row, block])
        torch.testing.assert_close(
            _gradients(draft, other[row, block].sum()),
            [*_gradients(draft, draft.block_hidden(batch)[row, block].sum())],
            rtol=1e-9,
            atol=1e-12,
        )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("dspark")])
def test_a_heads_slot_reads_no_token_after_the_one_before_it(kind: str) -> None:
    draft = kind_of_draft(_exact(), kind)
    assert isinstance(draft, DSparkDraft)
    hidden = torch.randn(2, 4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    previous = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    rows = torch.arange(8)
    base = draft.head_inputs(hidden, previous, rows)
    for slot in range(4):
        changed, other_hidden = previous.clone(), hidden.clone()
        changed[:, slot + 1 :] = 50
        other_hidden[:, slot + 1 :] = 0.0
        found = draft.head_inputs(other_hidden, changed, rows)
        for before, after in zip(base, found, strict=True):
            if before is not None and after is not None:
                assert torch.equal(before.view(2, 4, -1)[:, : slot + 1], after.view(2, 4, -1)[:, : slot + 1])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unrolled_row_never_sees_later_features_or_tokens_or_other_samples(family: str) -> None:
    target = _exact(family)
    draft = kind_of_draft(target, "eagle3", draft_layers="target")
    assert isinstance(draft, Eagle3Draft)
    batch = random_batch(target, (12, 7, 9), PROMPTS)
    hidden = draft.unroll(batch, all_rows(batch))
    inputs = batch.features.clone().requires_grad_()
    reached = draft.unroll(batch._replace(features=inputs), all_rows(batch))
    for row, length in enumerate(batch.tokens.lengths.tolist()):
        for step in range(draft.num_draft_tokens):
            for position in range(length - step):
                changed = _with_noise(batch, row, position + 2 + step, position + 1)
                assert torch.equal(
                    draft.unroll(changed, all_rows(batch))[step, row, position], hidden[step, row, position]
                )
        step, position = draft.num_draft_tokens - 1, length - draft.num_draft_tokens
        reach = torch.autograd.grad(reached[step, row, position].square().sum(), inputs, retain_graph=True)[0]
        used = reach.abs().sum(dim=-1) > 0
        expected = torch.zeros_like(used)
        expected[row, : position + 1] = True
        assert torch.equal(used, expected)


# Numbers ------------------------------------------------------------------------------------------------------------


def _slot_logits(draft: BlockDraft, hidden: Tensor, previous: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Final logits of the slots of one block [K, H] and its confidence logits, slot by slot."""
    logits = list(draft.head.logits(hidden, draft.draft_head_weight))
    if not isinstance(draft, DSparkDraft):
        return logits, None
    heads = draft.head_inputs(hidden[None], previous[None], torch.arange(len(logits)))
    if draft.markov_head is None:
        return logits, heads.confidence_logits
    memory = torch.zeros(1, draft.config.markov_rank, dtype=hidden.dtype)
    for slot in range(len(logits)):
        embedded = draft.markov_head.markov_w1(previous[slot : slot + 1])
        latent, memory = draft.markov_head.step(embedded, hidden[slot : slot + 1], memory)
        logits[slot] = logits[slot] + (draft.markov_head.markov_w2(latent))[0]
    return logits, heads.confidence_logits


def _losses_of(q: Tensor, p: Tensor, known: Tensor, label: int) -> dict[str, Tensor]:
    tv = (q - p).abs().sum() + 1 - known
    return {"ce": -q[label].log() if label >= 0 else q.new_zeros(()), "tv": tv, "soft_ce": -(p * q.log()).sum()}


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("vocab", [None, 40])
@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_block_losses_equal_a_loop_over_samples_anchors_and_slots(kind: str, vocab: int | None, family: str) -> None:
    target = _exact(family)
    losses = {"ce": 0.5, "tv": 0.3, "soft_ce": 0.2}
    draft = kind_of_draft(target, kind, draft_vocab_size=vocab)
    weights = losses | ({"confidence": 1.0} if getattr(draft, "confidence_head", None) is not None else {})
    if isinstance(draft, DSparkDraft):
        weights.setdefault("confidence", 0.0)
    draft.config = draft.config.model_copy(update={"losses": type(draft.config.losses)(**weights)})  # type: ignore[attr-defined]
    assert isinstance(draft, BlockDraft)
    batch = random_batch(target, LENGTHS, PROMPTS)
    tokens, hidden = batch.tokens, draft.block_hidden(batch)
    totals: dict[str, Any] = dict.fromkeys([*draft.loss_weights], 0.0)
    for row, block in tokens.anchor_mask.nonzero().tolist():
        anchor, ids = int(tokens.anchors[row, block]), tokens.input_ids[row]
        end = min(anchor + draft.num_draft_tokens, LENGTHS[row] - 1)
        previous = ids[torch.arange(anchor, anchor + draft.num_draft_tokens).clamp(max=len(ids) - 1)]
        logits, confidence = _slot_logits(draft, hidden[row, block], previous)
        for position in range(anchor + 1, end + 1):
            slot = position - anchor - 1
            weight = float(torch.exp(torch.tensor(-slot / draft.config.position_decay)))
            p = target.logits(batch.last_hidden[row, position - 1]).softmax(dim=-1)
            if draft.vocab is not None:
                p = p[draft.vocab.target_ids]
            label = int(draft.draft_labels(ids[position]))
            q = logits[slot].softmax(dim=-1)
            found = _losses_of(q, p, p.sum(), label)
            if confidence is not None:
                overlap = torch.minimum(p, q).sum()
                sure = torch.nn.functional.logsigmoid(confidence[slot])
                unsure = torch.nn.functional.logsigmoid(-confidence[slot])
                found["confidence"] = -(overlap * sure + (1 - overlap) * unsure)
            for name in totals:
                totals[name] = totals[name] + weight * found[name].detach()
    terms = draft(batch, coefficients_for(draft, batch))
    for name, ratio in terms.losses.items():
        # The teacher's normalisers are kept in fp32.
        torch.testing.assert_close(ratio.total.double(), totals[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3-own_head"])
@pytest.mark.parametrize("vocab", [None, 40])
def test_unrolled_losses_equal_a_loop_over_samples_steps_and_rows(kind: str, vocab: int | None, family: str) -> None:
    target = _exact(family)
    draft = kind_of_draft(target, kind, draft_vocab_size=vocab)
    assert isinstance(draft, Eagle3Draft)
    batch = random_batch(target, LENGTHS, PROMPTS)
    hidden = draft.unroll(batch, all_rows(batch))
    terms = draft(batch, coefficients_for(draft, batch))
    for step in range(draft.num_draft_tokens):
        total = torch.zeros((), dtype=torch.float64)
        for row, length in enumerate(LENGTHS):
            ids, losses = batch.tokens.input_ids[row], []
            anchors = batch.tokens.anchors[row][batch.tokens.anchor_mask[row]].tolist()
            for position in range(length - 2 - step):
                if position + 1 not in anchors:
                    continue
                is_answer = bool(batch.tokens.answer_mask[row, position + 1 : position + 3 + step].all())
                if not is_answer or int(draft.draft_labels(ids[position + 2 + step])) < 0:
                    continue
                taught = target.logits(batch.last_hidden[row, position + 1 + step])
                taught = taught if draft.vocab is None else taught[draft.vocab.target_ids]
                logits = draft.head.logits(draft.norm(hidden[step, row, position]), draft.student_weight)
                losses.append(-(taught.softmax(dim=-1) * logits.log_softmax(dim=-1)).sum())
            if losses:
                summed = torch.stack(losses).sum().detach()
                total += summed / len(losses) if draft.config.normalise == "sequence" else summed
        torch.testing.assert_close(terms.losses[f"soft_ce_{step}"].total.double(), total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [None, 40])
def test_decoding_drafts_from_the_very_distributions_that_training_scores(
    kind: str, family: str, vocab: int | None
) -> None:
    target = _exact(family)
    draft = kind_of_draft(target, kind, draft_vocab_size=vocab, draft_layers="target").eval()
    anchor, block = 9, draft.num_draft_tokens
    ids = torch.randint(4, 90, (1, anchor + 1 + block), generator=torch.Generator().manual_seed(2))
    features, last_hidden = target.features(ids)
    uniforms = torch.rand(1, block, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    starts, counts = torch.tensor([0]), torch.tensor([anchor])
    with torch.no_grad():
        state = draft.new_state(1)
        seen = Observation(features[:, :anchor], ids[:, 1 : anchor + 1], starts, counts, anchor)
        draft.observe(state, seen)
        proposal = draft.propose(
            state, ids[:, anchor], torch.tensor([anchor]), anchor + block + 1, Sampler(Sampling(), uniforms)
        )
        ids[:, anchor + 1 :] = proposal.tokens
        length = torch.tensor([ids.shape[1]])
        none = torch.ones_like(ids, dtype=torch.bool)
        anchors = torch.tensor([[anchor]])
        tokens = TokenBatch(ids, length, none, anchors, torch.ones_like(anchors, dtype=torch.bool), starts)
        batch = FeatureBatch(tokens, features, last_hidden)
        if isinstance(draft, BlockDraft):
            hidden = draft.block_hidden(batch)[0, 0]
            logits, confidence = _slot_logits(draft, hidden, ids[0, anchor : anchor + block])
            if proposal.confidence_logits is not None:
                torch.testing.assert_close(proposal.confidence_logits[0], confidence)
        else:
            assert isinstance(draft, Eagle3Draft)
            rows = draft.norm(draft.unroll(batch, anchors - 1)[:, 0, 0])
            logits = list(draft.head.logits(rows, draft.student_weight))
        expected = draft.full_probs(torch.stack(logits).softmax(dim=-1))
    torch.testing.assert_close(proposal.probs[0], expected)
    torch.testing.assert_close(proposal.max_probs[0], expected.amax(dim=-1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_gradients_are_the_same_and_keep_fewer_bytes(kind: str, family: str) -> None:
    target = _exact(family)
    draft = kind_of_draft(target, kind, draft_layers="target")
    batch = random_batch(target, LENGTHS, PROMPTS)
    own = {parameter.data_ptr() for parameter in draft.parameters()}
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[-1] += tensor.nbytes
        return tensor

    results = []
    for is_checkpointed in (False, True):
        draft.checkpoints_gradients = is_checkpointed
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            objective = draft(batch, coefficients_for(draft, batch)).objective
        results.append((objective, *_gradients(draft, objective)))
    torch.testing.assert_close(results[1], results[0])
    assert kept[1] < 0.7 * kept[0]


class _Waits(TorchDispatchMode):
    """Collects operations whose result decides a shape or a branch on the host: a device would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        is_by_mask = name.startswith(("aten.index.Tensor", "aten.index_put")) and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if is_by_mask or any(word in name for word in ("nonzero", "_local_scalar_dense", "unique", "masked_select")):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [None, 40])
def test_a_planned_step_never_waits_for_the_device(kind: str, vocab: int | None) -> None:
    target = tiny_target()
    draft = kind_of_draft(target, kind, draft_vocab_size=vocab)
    batch = random_batch(target, LENGTHS, PROMPTS)
    batch = batch._replace(plan=draft.slot_plan(batch.tokens))
    coefficients = coefficients_for(draft, batch)
    with _Waits() as waits:
        draft(batch, coefficients).objective.backward()
    # What the head operator asks of the plan, it asks of a tensor that stays on the host.
    assert set(waits.found) <= {"aten.unique_consecutive.default"}
    assert len(waits.found) <= 1
