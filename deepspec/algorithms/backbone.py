"""Block drafts: one parallel pass over a block that attends to the target's features before its anchor.

DFlash is this backbone alone; DSpark puts heads on it. Letters: B requests, A anchors, S inputs of a block (K for the
layout `anchor_first`, K + 1 for `fill_in`), N blocks, K slots that predict, R supervised rows.
Source: DFlash (arXiv 2602.06036); DSpark paper, section on the parallel backbone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspec.algorithms.base import (
    DraftModel,
    DraftSpec,
    Observation,
    Proposal,
    Sampler,
    VocabMap,
)
from deepspec.algorithms.initial import copied_layers, copy_target_layer, reset_weights
from deepspec.attention import BlockMask, FeaturePrefix, block_mask
from deepspec.config import DFlashConfig, DSparkConfig
from deepspec.data.anchors import slot_labels
from deepspec.decoding.kv_cache import RaggedCache
from deepspec.errors import ConfigError
from deepspec.losses import RowCoefficients, RowTerms, Teacher, head_losses
from deepspec.targets.base import Target
from deepspec.types import FeatureBatch, LossTerms, Ratio, TokenBatch


class BlockState(NamedTuple):
    """Keys and values of the accepted context in every draft layer."""

    cache: RaggedCache

    def assign(self, rows: Tensor, other: BlockState) -> None:
        """Overwrite rows by the first ones of another state."""
        self.cache.assign(rows, other.cache)

    def keep(self, rows: Tensor) -> None:
        """Keep only the given rows."""
        self.cache.keep(rows)


class SlotInputs(NamedTuple):
    """What the heads of a block draft read, per supervised row or per block.

    Attributes:
        latent: Markov latents [R, r], or None.
        confidence_logits: [R], or None.
    """

    latent: Tensor | None
    confidence_logits: Tensor | None


class BlockDraft(DraftModel):
    """The parallel backbone with its training loss and decoding; heads are added by overriding two methods."""

    config: DSparkConfig | DFlashConfig

    def __init__(
        self, config: DSparkConfig | DFlashConfig, spec: DraftSpec, target: Target, vocab: VocabMap | None
    ) -> None:
        """Make fc, the norms and the layers; weights are not initialised yet (see `initialise`)."""
        super().__init__(config, spec, target, vocab)
        if spec.mask_token_id is None:
            raise ConfigError(
                f"target.mask_token_id is not set, and {config.name} needs one for {target.name}. "
                "Set it to an id that the target never emits and that has an embedding row."
            )
        size = int(self.layer_config.hidden_size)
        self.fc = nn.Linear(self.feature_size, size, bias=False)
        self.hidden_norm = self.family.norm(self.layer_config)
        self.layers = nn.ModuleList([self.family.layer(self.layer_config, index) for index in range(config.num_layers)])
        self.norm = self.family.norm(self.layer_config)

    # Training -------------------------------------------------------------------------------------------------------

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight of each loss in the total; losses that never count are left out."""
        start = {} if self.config.losses_at_start is None else self.config.losses_at_start.model_dump()
        final = self.config.losses.model_dump()
        return {name: weight for name, weight in final.items() if weight > 0 or start.get(name, 0.0) > 0}

    def loss_weights_at(self, progress: float) -> dict[str, float]:
        """The mix on its way from `losses_at_start` to `losses`."""
        start = {} if self.config.losses_at_start is None else self.config.losses_at_start.model_dump()
        return {
            name: weight + (1.0 - progress) * (start.get(name, weight) - weight)
            for name, weight in self.loss_weights.items()
        }

    @property
    def needs_log_normaliser(self) -> bool:
        """A reduced vocabulary is scored with the teacher's true probabilities, not renormalised ones."""
        return self.vocab is not None

    @property
    def inputs_per_block(self) -> int:
        """S: `fill_in` spends its first input on the known anchor."""
        return self.num_draft_tokens + (1 if self.config.layout == "fill_in" else 0)

    def slot_weights(self, tokens: TokenBatch) -> Tensor:
        """Weight of each slot's losses, exp(-k / decay) where supervised and 0 elsewhere: [B, A, K] fp32.

        Both layouts predict the tokens anchor+1..anchor+K, so the rule is one.
        """
        supervised = self.supervised(tokens)
        slots = torch.arange(self.num_draft_tokens, device=supervised.device, dtype=torch.float32)
        return supervised * torch.exp(-slots / self.config.position_decay)

    def loss_counts(self, tokens: TokenBatch) -> dict[str, Tensor]:
        """Sum of slot weights; cross-entropy drops slots whose label lies outside the draft vocabulary."""
        weights = self.slot_weights(tokens)
        inside = self.is_in_vocabulary(tokens)
        total, known = weights.sum(), (weights * inside).sum()
        return {name: known if name == "ce" else total for name in self.loss_weights}

    def forward(self, batch: FeatureBatch, coefficients: dict[str, Tensor]) -> LossTerms:
        """See DraftModel.forward."""
        tokens = batch.tokens
        hidden = self.block_hidden(batch)
        rows, taught_by = batch.plan or self.slot_plan(tokens)
        rows = rows.to(hidden.device, non_blocking=True)
        positions = self.label_positions(tokens)
        previous = slot_labels(tokens.input_ids, positions - 1)
        heads = self.head_inputs(hidden.flatten(0, 1), previous.flatten(0, 1), rows)
        row_weights = self.slot_weights(tokens).flatten()[rows]
        labels = self.draft_labels(slot_labels(tokens.input_ids, positions).flatten()[rows])
        normaliser = batch.log_normaliser
        objective, terms = head_losses(
            hidden.flatten(0, 2)[rows],
            labels,
            Teacher(
                batch.last_hidden.flatten(0, 1),
                taught_by,
                self.draft_head_weight,
                None if normaliser is None or self.vocab is None else normaliser.flatten(),
            ),
            RowCoefficients(
                *(
                    row_weights * coefficients[name] if name in coefficients else None
                    for name in RowCoefficients._fields
                )
            ),
            self.draft_head_weight,
            latent=heads.latent,
            latent_weight=self.latent_weight,
            softcap=self.head.softcap,
        )
        losses = {
            name: Ratio((row_weights * getattr(terms, name)).sum(), row_weights.sum())
            for name in RowCoefficients._fields
            if name in coefficients
        }
        if "ce" in losses:
            losses["ce"] = Ratio(losses["ce"].total, (row_weights * (labels >= 0)).sum())
        if heads.confidence_logits is not None and "confidence" in coefficients:
            surprise = nn.functional.binary_cross_entropy_with_logits(
                heads.confidence_logits, terms.acceptance.to(heads.confidence_logits.dtype), reduction="none"
            )
            total = (row_weights * surprise).sum()
            objective = objective + coefficients["confidence"] * total
            losses["confidence"] = Ratio(total.detach(), row_weights.sum())
        return LossTerms(objective, losses, self._slot_metrics(terms, rows))

    def block_hidden(self, batch: FeatureBatch) -> Tensor:
        """Normed hidden states of the predicting slots of every block [B, A, K, H]."""
        tokens = batch.tokens
        count, size = tokens.anchors.shape[1], self.inputs_per_block
        context = self.context(batch.features)
        positions = torch.arange(context.shape[1], device=context.device)[None]
        rotation = self.rotation(context, positions)
        prefix = FeaturePrefix([self.family.keys_values(layer.self_attn, context, rotation) for layer in self.layers])
        offsets = torch.arange(size, device=context.device)
        queries = (tokens.anchors[..., None] + offsets).flatten(1)
        mask = block_mask(tokens.anchors, tokens.anchor_mask, size, context.shape[1], self.attention_form)
        hidden = self.embed_blocks(tokens.input_ids.gather(1, tokens.anchors)).flatten(1, 2)
        hidden = self._through_layers(hidden, queries, mask, prefix)
        return hidden.view(len(hidden), count, size, -1)[:, :, size - self.num_draft_tokens :]

    def context(self, features: Tensor) -> Tensor:
        """Features [B, L, M*H] to the context that all layers attend to [B, L, H]."""
        context: Tensor = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        return context

    def embed_blocks(self, anchors: Tensor) -> Tensor:
        """Anchors [...] to block inputs [anchor, MASK, MASK, ...] embedded: [..., S, H]."""
        assert self.spec.mask_token_id is not None
        ids = anchors.new_full((*anchors.shape, self.inputs_per_block), self.spec.mask_token_id)
        ids[..., 0] = anchors
        return self.head.embed(ids).to(self.fc.weight.dtype)

    def head_inputs(self, hidden: Tensor, previous: Tensor, rows: Tensor) -> SlotInputs:
        """What the heads say about supervised rows; none here.

        Args:
            hidden: [N, K, H].
            previous: [N, K] token before each slot.
            rows: [R] indices into the flattened N * K slots.
        """
        return SlotInputs(None, None)

    @property
    def latent_weight(self) -> Tensor | None:
        """Projection of Markov latents onto the draft vocabulary [Vd, r], or None."""
        return None

    def _through_layers(self, hidden: Tensor, positions: Tensor, mask: Tensor | BlockMask, cache: Any) -> Tensor:
        rotation = self.rotation(hidden, positions)
        for layer in self.layers:
            call = functools.partial(
                layer,
                attention_mask=mask,
                position_embeddings=rotation,
                position_ids=positions,
                cache=cache,
                use_cache=True,
                **self.family.layer_arguments(),
            )
            hidden = self.run(call, hidden)
        normed: Tensor = self.norm(hidden)
        return normed

    def _slot_metrics(self, terms: RowTerms, rows: Tensor) -> dict[str, Ratio]:
        """Teacher-forced acceptance alpha_k of every slot, and how often the label is the draft's first choice."""
        slots = rows % self.num_draft_tokens
        count = torch.zeros(self.num_draft_tokens, device=rows.device).index_add_(
            0, slots, torch.ones_like(terms.acceptance, dtype=torch.float32)
        )
        total = torch.zeros_like(count).index_add_(0, slots, terms.acceptance.float())
        metrics = {f"acceptance@{slot + 1}": Ratio(total[slot], count[slot]) for slot in range(self.num_draft_tokens)}
        metrics["top1"] = Ratio(terms.is_top.sum(), count.sum())
        return metrics

    # Decoding -------------------------------------------------------------------------------------------------------

    def new_state(self, batch: int) -> BlockState:
        """See DraftModel.new_state."""
        return BlockState(RaggedCache.for_batch(batch))

    def observe(self, state: BlockState, observation: Observation) -> None:
        """Write the context keys and values of the new positions; those past the counts are overwritten later."""
        context = self.context(observation.features)
        offsets = torch.arange(context.shape[1], device=context.device)
        positions = observation.starts[:, None] + offsets
        rotation = self.rotation(context, positions)
        state.cache.plan(positions, observation.visible)
        for index, layer in enumerate(self.layers):
            state.cache.write(*self.family.keys_values(layer.self_attn, context, rotation), index)

    def propose(
        self, state: BlockState, anchors: Tensor, positions: Tensor, visible: int, sampler: Sampler
    ) -> Proposal:
        """See DraftModel.propose."""
        size = self.inputs_per_block
        seen = visible - self.num_draft_tokens - 1
        slots = positions[:, None] + torch.arange(size, device=positions.device)
        state.cache.plan(slots, seen, keep_new=False)
        ones = torch.ones_like(positions[:, None], dtype=torch.bool)
        mask = block_mask(positions[:, None], ones, size, seen).dense()
        hidden = self._through_layers(self.embed_blocks(anchors), slots, mask, state.cache)
        return self.draw_block(hidden[:, size - self.num_draft_tokens :], anchors, sampler)

    def draw_block(self, hidden: Tensor, anchors: Tensor, sampler: Sampler) -> Proposal:
        """Draw every slot of a block [B, K, H] on its own."""
        logits = self.head.logits(hidden, self.draft_head_weight)
        return self.as_proposal([sampler.draw(logits[:, slot], slot) for slot in range(self.num_draft_tokens)], None)

    # Starting values ------------------------------------------------------------------------------------------------

    def initialise(self, target: Target, answers: Iterable[Sequence[int]], seed: int) -> None:
        """Copy layers, final norm and last tap of the target where `init` says so; else N(0, 0.02)."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        reset_weights(self, float(self.layer_config.initializer_range), generator)
        if self.config.init == "random":
            return
        for layer, source in zip(self.layers, copied_layers(self.config, target), strict=True):
            copy_target_layer(layer, target.layer(source), source)
        self.norm.load_state_dict(target.final_norm.state_dict())
        # The context then is what the layer after the last tap makes its keys and values from in the target.
        reader = target.layer(self.spec.layer_ids[-1] + 1)
        self.hidden_norm.load_state_dict(reader.get_submodule("input_layernorm").state_dict())
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, -self.fc.weight.shape[0] :] = torch.eye(self.fc.weight.shape[0])
