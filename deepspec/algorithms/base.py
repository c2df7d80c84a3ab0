"""What every draft model offers: a training forward, three decoding verbs, and its vocabulary.

The trainer calls `loss_counts` and the forward, the decoder calls `new_state`, `observe` and `propose`; neither knows
which algorithm it drives. Letters: B requests, L positions, K draft tokens, M taps, H hidden size, V target vocabulary,
Vd draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspec import lookup
from deepspec.attention import GROUPED_SDPA, AttentionForm
from deepspec.config import AlgorithmConfig, BlockAlgorithmConfig
from deepspec.data.anchors import label_positions, slot_labels, supervised_slots
from deepspec.decoding.sampling import Sampling, choose, sample, warp
from deepspec.errors import ConfigError
from deepspec.interop.hub import Shareable
from deepspec.targets.base import Target
from deepspec.targets.family import TargetFamily, family_named, family_of
from deepspec.types import FeatureBatch, LossTerms, SlotPlan, TokenBatch


class VocabMap(NamedTuple):
    """A reduced draft vocabulary, ids ascending, so that nonzero(t2d) == d2t + arange(Vd).

    Attributes:
        target_ids: [Vd] target id of each draft id.
        draft_ids: [V] draft id of each target id, -1 outside.
    """

    target_ids: Tensor
    draft_ids: Tensor

    @classmethod
    def from_target_ids(cls, ids: Iterable[int], vocab_size: int) -> VocabMap:
        """The vocabulary of the given target ids."""
        target_ids = torch.tensor(sorted(set(ids)), dtype=torch.int64)
        draft_ids = torch.full((vocab_size,), -1, dtype=torch.int64)
        draft_ids[target_ids] = torch.arange(len(target_ids))
        return cls(target_ids, draft_ids)

    @classmethod
    def from_answers(
        cls, answers: Iterable[Sequence[int]], size: int, vocab_size: int, always: Sequence[int]
    ) -> VocabMap:
        """The tokens that answers use most; ties and free places go to the lowest ids, never to chance.

        Args:
            answers: token ids that the target generated.
            size: Vd.
            vocab_size: V.
            always: ids that belong in whatever their count (stop tokens).

        Raises:
            ConfigError: size does not lie below V.
        """
        if not len(set(always)) <= size < vocab_size:
            raise ConfigError(
                f"algorithm.draft_vocab_size {size} must be below the target's {vocab_size} ids and leave room for its "
                f"{len(set(always))} stop tokens; use null for all ids."
            )
        counts = Counter(token for answer in answers for token in answer)
        ranked = sorted(range(vocab_size), key=lambda token: (token not in always, -counts[token], token))
        return cls.from_target_ids(ranked[:size], vocab_size)

    @classmethod
    def from_tensors(cls, stored: Mapping[str, Tensor], vocab_size: int) -> VocabMap | None:
        """Read what checkpoints store; None where it is no vocabulary.

        Args:
            stored: `d2t`, offsets (target id = draft id + d2t) to ids that ascend, and where it is there `t2d`, which
                must mark the same ids.
            vocab_size: V.
        """
        offsets = stored["d2t"]
        if offsets.ndim != 1 or not len(offsets) or offsets.is_floating_point():
            return None
        ids = offsets.long() + torch.arange(len(offsets))
        if not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
            return None
        vocab = cls.from_target_ids(ids.tolist(), vocab_size)
        marks = stored.get("t2d")
        return vocab if marks is None or torch.equal(marks.bool(), vocab.draft_ids >= 0) else None

    def to(self, device: torch.device) -> VocabMap:
        """The same map on another device."""
        return VocabMap(self.target_ids.to(device), self.draft_ids.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """`d2t` (int64 offsets, [Vd]) and `t2d` (bool, [V]) as checkpoints store them."""
        return {"d2t": self.target_ids - torch.arange(len(self.target_ids)), "t2d": self.draft_ids >= 0}


class Drawn(NamedTuple):
    """One slot of every request, as it was drawn.

    Attributes:
        ids: [B] draft ids.
        probs: [B, Vd] the distribution they were drawn from; None in greedy decoding, where the ids have all the mass.
        max_probs: [B] the largest probability at temperature 1.
    """

    ids: Tensor
    probs: Tensor | None
    max_probs: Tensor


class Sampler(NamedTuple):
    """Draws one token per request and slot from the very distribution that is scored later.

    Attributes:
        sampling: the request's warpers.
        uniforms: [B, K] draws in [0, 1), one a slot.
    """

    sampling: Sampling
    uniforms: Tensor

    def draw(self, logits: Tensor, slot: int) -> Drawn:
        """Draw slot `slot` from logits [B, Vd]."""
        if self.sampling.temperature == 0:
            ids = choose(logits)
            top = logits.gather(-1, ids[:, None]).squeeze(-1)
            return Drawn(ids, None, torch.exp(top - logits.logsumexp(dim=-1)))
        probs = warp(logits, self.sampling)
        max_probs = torch.exp(logits.amax(dim=-1) - logits.logsumexp(dim=-1))
        return Drawn(sample(probs, self.uniforms[:, slot]), probs, max_probs)


class Proposal(NamedTuple):
    """One round's draft.

    Attributes:
        tokens: [B, K] target ids.
        probs: [B, K, V] the distributions they were drawn from, zero outside the draft vocabulary; None in greedy
            decoding, where the tokens have all the mass.
        confidence_logits: [B, K] logits of c_k, or None for drafts without a confidence head.
        max_probs: [B, K] max_v q_k(v) at temperature 1.
    """

    tokens: Tensor
    probs: Tensor | None
    confidence_logits: Tensor | None
    max_probs: Tensor


class DraftSpec(NamedTuple):
    """What a draft takes over from its target, or brings in its own checkpoint.

    Attributes:
        family: whose stock layers it is made of.
        layer_config: transformers config of those layers.
        layer_ids: tapped layers of the target.
        mask_token_id: id of unknown slots, or None.
    """

    family: TargetFamily
    layer_config: Any
    layer_ids: tuple[int, ...]
    mask_token_id: int | None


class Observation(NamedTuple):
    """What the target has said about new positions of every request.

    Attributes:
        features: [B, Q, M*H] at positions start..start+Q-1; those past `counts` are to be ignored.
        next_tokens: [B, Q] token at the following position of each.
        starts: [B] first position of each row.
        counts: [B] how many of the Q are real, at least one.
        visible: upper bound of starts + Q, known without a device sync.
    """

    features: Tensor
    next_tokens: Tensor
    starts: Tensor
    counts: Tensor
    visible: int


class DraftModel(nn.Module, Shareable, ABC):
    """A trainable draft of one frozen target.

    Attributes:
        config: the algorithm's settings.
        spec: layers, taps and mask token.
        vocab: reduced vocabulary, or None.
        head: the target's vocabulary weights, by reference.
        stops_at_stop_token: whether drafting ends at a drafted stop token (the rest of the block is not proposed).
        attention_form: how attention of training blocks is computed, see deepspec.attention.BlockMask.
        checkpoints_gradients: keep only the inputs of layers for the backward pass and run the layers again there.
    """

    stops_at_stop_token: ClassVar[bool] = False
    attention_form: AttentionForm = "auto"
    checkpoints_gradients = False

    def __init__(self, config: AlgorithmConfig, spec: DraftSpec, target: Target, vocab: VocabMap | None) -> None:
        """Prepare what all drafts share; subclasses add their modules."""
        super().__init__()
        self.config = config
        self.spec = spec
        self.family, self.layer_config = spec.family, spec.layer_config
        # Whatever the target runs with: all draft layers can, and Eagle3's private keys need it.
        self.layer_config._attn_implementation = GROUPED_SDPA
        self.num_target_layers = target.num_layers
        self.vocab = None if vocab is None else vocab.to(target.device)
        self.head = target.head
        self.draft_head_weight = target.head.weight if self.vocab is None else target.head.weight[self.vocab.target_ids]
        # Rotary tables stay out of the module tree, so that .to(bfloat16) cannot round them.
        self._rotary = (self.family.rotary(self.layer_config),)

    @property
    def num_draft_tokens(self) -> int:
        """K, draft tokens per round."""
        return self.config.num_draft_tokens

    @property
    def has_confidence(self) -> bool:
        """Whether proposals carry `confidence_logits`."""
        return False

    @property
    def feature_size(self) -> int:
        """M * H."""
        return len(self.spec.layer_ids) * int(self.layer_config.hidden_size)

    def run(self, layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Run a layer, keeping nothing but its inputs for the backward pass where gradients are checkpointed."""
        if not (self.checkpoints_gradients and torch.is_grad_enabled()):
            return layer(*inputs)
        output: Tensor = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
        return output

    def rotation(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary tables cos and sin [B, Q, D] in the dtype of `hidden`, from fp32 angles."""
        return self.family.rotate(self._rotary[0], hidden, positions)

    def draft_labels(self, ids: Tensor) -> Tensor:
        """Target ids as draft ids, -1 outside a reduced vocabulary."""
        return ids if self.vocab is None else self.vocab.draft_ids[ids]

    def target_tokens(self, draft_ids: Tensor) -> Tensor:
        """Draft ids as target ids."""
        return draft_ids if self.vocab is None else self.vocab.target_ids[draft_ids]

    def full_probs(self, probs: Tensor) -> Tensor:
        """Probabilities [..., Vd] spread over the target's vocabulary [..., V]."""
        if self.vocab is None:
            return probs
        full = probs.new_zeros((*probs.shape[:-1], len(self.vocab.draft_ids)))
        full[..., self.vocab.target_ids] = probs
        return full

    def supervised(self, tokens: TokenBatch) -> Tensor:
        """Which of the tokens anchor+1..anchor+K are learned from [B, A, K] bool, one rule for all algorithms."""
        return supervised_slots(
            tokens.anchors,
            tokens.anchor_mask,
            tokens.answer_mask,
            tokens.lengths,
            self.num_draft_tokens,
            "anchor_first",
        )

    def slot_plan(self, tokens: TokenBatch) -> SlotPlan:
        """Which slots of a batch teach, and from which positions; slots with one teacher come to lie side by side."""
        slots = self.supervised(tokens).flatten().nonzero().squeeze(-1)
        batch, length = tokens.input_ids.shape
        sequence = torch.arange(batch, device=slots.device)[:, None, None] * length
        # The distribution over a token belongs to the position before it.
        taught_by = (self.label_positions(tokens) - 1 + sequence).flatten()[slots]
        order = taught_by.argsort(stable=True)
        return SlotPlan(slots[order], taught_by[order])

    def label_positions(self, tokens: TokenBatch) -> Tensor:
        """Positions of the tokens anchor+1..anchor+K [B, A, K], the same in both layouts."""
        return label_positions(tokens.anchors, self.num_draft_tokens, "anchor_first")

    def is_in_vocabulary(self, tokens: TokenBatch) -> Tensor:
        """Which of the tokens anchor+1..anchor+K the draft can propose [B, A, K] bool."""
        return self.draft_labels(slot_labels(tokens.input_ids, self.label_positions(tokens))) >= 0

    def as_proposal(self, drawn: Sequence[Drawn], confidence_logits: Tensor | None) -> Proposal:
        """Put slots together."""
        tokens = self.target_tokens(torch.stack([one.ids for one in drawn], dim=1))
        drawn_from = [one.probs for one in drawn if one.probs is not None]
        probs = self.full_probs(torch.stack(drawn_from, dim=1)) if drawn_from else None
        return Proposal(tokens, probs, confidence_logits, torch.stack([one.max_probs for one in drawn], dim=1))

    @property
    @abstractmethod
    def loss_weights(self) -> dict[str, float]:
        """Weight of each loss in the total, at the end of a training where it changes."""

    def loss_weights_at(self, progress: float) -> dict[str, float]:
        """Weights at a point of the training, 0 at its first step and 1 at its last."""
        return self.loss_weights

    @property
    def needs_log_normaliser(self) -> bool:
        """Whether the teacher's logsumexp over the whole vocabulary is part of the loss."""
        return False

    @abstractmethod
    def loss_counts(self, tokens: TokenBatch) -> dict[str, Tensor]:
        """Denominator of each loss (0-d fp32), a function of the tokens alone."""

    @abstractmethod
    def forward(self, batch: FeatureBatch, coefficients: dict[str, Tensor]) -> LossTerms:
        """Losses of one micro-batch.

        Args:
            batch: tokens and what the target says about them.
            coefficients: weight / global denominator of each loss.
        """

    @abstractmethod
    def new_state(self, batch: int) -> Any:
        """An empty decoding state of `batch` requests."""

    @abstractmethod
    def observe(self, state: Any, observation: Observation) -> None:
        """Take in what the target said about accepted positions."""

    @abstractmethod
    def propose(self, state: Any, anchors: Tensor, positions: Tensor, visible: int, sampler: Sampler) -> Proposal:
        """Draft K tokens per request.

        Args:
            state: after `observe` of everything before the anchors.
            anchors: [B] last known tokens.
            positions: [B] their positions.
            visible: upper bound of positions + K + 1.
            sampler: draws tokens.
        """

    @abstractmethod
    def initialise(self, target: Target, answers: Iterable[Sequence[int]], seed: int) -> None:
        """Give fresh weights their starting values as `config.init` says.

        Args:
            target: whose layers may be copied.
            answers: generated token ids, for starting values that come from data; gone through more than once.
            seed: of random starting values.
        """


def build_draft(
    config: AlgorithmConfig, target: Target, answers: Iterable[Sequence[int]] = (), seed: int = 0
) -> DraftModel:
    """Make a fresh draft of a target.

    Args:
        config: the algorithm's settings.
        target: the frozen target.
        answers: generated token ids of the training set, for a reduced vocabulary and for starting values from data.
        seed: of random starting values.

    Raises:
        ConfigError: settings and target do not go together.
    """
    if isinstance(config, BlockAlgorithmConfig) and target.mask_token_id in target.stop_token_ids:
        raise ConfigError(
            f"target.mask_token_id {target.mask_token_id} is a stop token of {target.name}, which ends its answers "
            "with it. Use an id that the target never emits."
        )
    vocab = None
    if config.draft_vocab_size is not None:
        vocab = VocabMap.from_answers(answers, config.draft_vocab_size, target.vocab_size, target.stop_token_ids)
    draft = make_draft(config, spec_of(config, target), target, vocab)
    draft.initialise(target, answers, seed)
    return draft


def spec_of(config: AlgorithmConfig, target: Target) -> DraftSpec:
    """Layers, taps and mask token of a fresh draft."""
    family = family_named("qwen3") if config.draft_layers == "qwen3" else family_of(target.config.model_type)
    layer_config = family.draft_config(target.config, config.num_layers)
    return DraftSpec(family, layer_config, target.layer_ids, target.mask_token_id)


def make_draft(config: AlgorithmConfig, spec: DraftSpec, target: Target, vocab: VocabMap | None) -> DraftModel:
    """A draft with unset weights, on the target's device."""
    module = lookup.load_module("algorithms", config.name, "algorithm")
    draft: DraftModel = module.Draft(config, spec, target, vocab)
    return draft.to(target.device)
