"""Eagle3: one layer that drafts step by step from its own last hidden state, trained on its own unrolled steps.

Row t of step s pairs token x[t+1+s] with the hidden state of step s-1 (step 0: the fused features of position t), at
rotary position t+s, and predicts x[t+2+s]. Letters: B requests, L positions, A anchors
(row t = anchor - 1), S = K steps.
Source: EAGLE-3 (arXiv 2503.01840), training-time test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspec.algorithms.base import (
    DraftModel,
    DraftSpec,
    Drawn,
    Observation,
    Proposal,
    Sampler,
    VocabMap,
)
from deepspec.algorithms.initial import copied_layers, copy_target_layer, reset_weights
from deepspec.attention import BlockMask, GrowingPrefix
from deepspec.config import Eagle3Config
from deepspec.decoding.kv_cache import RaggedCache
from deepspec.losses import RowCoefficients, Teacher, head_losses
from deepspec.targets.base import Target
from deepspec.types import FeatureBatch, LossTerms, Ratio, SlotPlan, TokenBatch


class Eagle3State:
    """The layer's keys and values, and the hidden state that the next step continues from."""

    def __init__(self, batch: int) -> None:
        self.cache = RaggedCache.for_batch(batch)
        self.hidden: Tensor | None = None
        self._batch = batch

    def assign(self, rows: Tensor, other: Eagle3State) -> None:
        """Overwrite rows by the first ones of another state."""
        assert other.hidden is not None, "a state is assigned after it has observed its prompts"
        self.cache.assign(rows, other.cache)
        if self.hidden is None:
            self.hidden = other.hidden.new_zeros(self._batch, other.hidden.shape[1])
        self.hidden = self.hidden.index_copy(0, rows, other.hidden[: len(rows)])

    def keep(self, rows: Tensor) -> None:
        """Keep only the given rows."""
        self.cache.keep(rows)
        self._batch = len(rows)
        self.hidden = None if self.hidden is None else self.hidden.index_select(0, rows)


class Draft(DraftModel):
    """Eagle3 with any number of taps, a shared or an own head, and a full or reduced vocabulary."""

    config: Eagle3Config
    stops_at_stop_token = True

    def __init__(self, config: Eagle3Config, spec: DraftSpec, target: Target, vocab: VocabMap | None) -> None:
        """Make fc, the wide layer and the norm; weights are not initialised yet (see `initialise`)."""
        super().__init__(config, spec, target, vocab)
        size = int(self.layer_config.hidden_size)
        self.fc = nn.Linear(self.feature_size, size, bias=False)
        layer: Any = self.family.layer(self.layer_config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(layer.self_attn, name)
            if narrow is not None:
                wide = nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None)
                setattr(layer.self_attn, name, wide)
        layer.hidden_norm = self.family.norm(self.layer_config)
        self.layers = nn.ModuleList([layer])
        self.norm = self.family.norm(self.layer_config)
        self.lm_head = nn.Linear(size, self.draft_head_weight.shape[0], bias=False) if config.own_head else None

    @property
    def student_weight(self) -> Tensor:
        """The head that drafts [Vd, H]: its own, or the target's."""
        return self.draft_head_weight if self.lm_head is None else self.lm_head.weight

    # Training -------------------------------------------------------------------------------------------------------

    @property
    def loss_weights(self) -> dict[str, float]:
        """One loss a step, decaying geometrically."""
        weight, decay = self.config.losses.soft_ce, self.config.step_decay
        return {f"soft_ce_{step}": weight * decay**step for step in range(self.num_draft_tokens)}

    def row_weights(self, tokens: TokenBatch) -> Tensor:
        """Weight of the row before anchor a in step s [S, B, A] fp32, by the slot rule of the block drafts.

        All algorithms therefore learn from the same places. Rows whose label lies outside a reduced vocabulary are
        dropped; with `normalise: sequence` every sequence weighs the same.
        """
        weights = (self.supervised(tokens) & self.is_in_vocabulary(tokens)).permute(2, 0, 1).float()
        if self.config.normalise == "sequence":
            weights = weights / weights.sum(dim=2, keepdim=True).clamp(min=1.0)
        return weights

    def loss_counts(self, tokens: TokenBatch) -> dict[str, Tensor]:
        """Sum of row weights of every step."""
        return dict(zip(self.loss_weights, self.row_weights(tokens).sum(dim=(1, 2)), strict=True))

    def forward(self, batch: FeatureBatch, coefficients: dict[str, Tensor]) -> LossTerms:
        """See DraftModel.forward."""
        tokens = batch.tokens
        rows = (tokens.anchors - 1).clamp(min=0)
        slots, taught_by = batch.plan or self.slot_plan(tokens)
        # The plan counts slots anchor by anchor, the unrolled rows come step by step.
        by_step = slots % self.num_draft_tokens * tokens.anchors.numel() + slots // self.num_draft_tokens
        return self.step_losses(
            self.unroll(batch, rows),
            batch,
            self.row_weights(tokens),
            SlotPlan(by_step.to(rows.device, non_blocking=True), taught_by),
            coefficients,
        )

    def unroll(self, batch: FeatureBatch, rows: Tensor) -> Tensor:
        """Hidden states before the final norm of the given rows in every step, each step fed by the one before.

        Every row runs in step 0, since its keys are seen by all rows after it. Later steps see the first step's keys
        and their own row's alone, so only the rows that are asked for run there.

        Args:
            batch: tokens and features.
            rows: [B, A] positions.

        Returns:
            [S, B, A, H].
        """
        tokens = batch.tokens
        length = tokens.input_ids.shape[1]
        positions = torch.arange(length, device=rows.device)[None]
        following = nn.functional.pad(tokens.input_ids, (0, self.num_draft_tokens + 1))
        cache = GrowingPrefix()
        everywhere = self.fc(batch.features.to(self.fc.weight.dtype))
        everywhere = self.run(self._through_layer, everywhere, following[:, 1 : length + 1], positions, None, cache)
        hidden = everywhere.gather(1, rows[..., None].expand(-1, -1, everywhere.shape[-1]))
        # Padding lies to the right of every real row, so causality alone keeps it out.
        context = BlockMask(rows + 1, 1, length, self.attention_form)
        steps = [hidden]
        for step in range(1, self.num_draft_tokens):
            ids = following.gather(1, (rows + 1 + step).clamp(max=following.shape[1] - 1))
            cache = GrowingPrefix(cache)
            hidden = self.run(self._through_layer, hidden, ids, rows + step, context, cache)
            steps.append(hidden)
        return torch.stack(steps)

    def step_losses(
        self,
        hidden: Tensor,
        batch: FeatureBatch,
        weights: Tensor,
        plan: SlotPlan,
        coefficients: dict[str, Tensor],
    ) -> LossTerms:
        """Losses of unrolled steps under given row weights.

        Args:
            hidden: [S, B, A, H] from `unroll`.
            batch: tokens and teacher.
            weights: [S, B, A] weight of each row in each step; rows of weight 0 teach nothing.
            plan: the rows that may teach, as indices into the flat S * B * A, and their teachers.
            coefficients: factor of each step's loss.
        """
        chosen, taught_by = plan
        steps = len(weights)
        row_weights = weights.flatten()[chosen]
        row_steps = chosen // weights[0].numel()
        taught_here = taught_by.to(hidden.device, non_blocking=True)
        label_at = (taught_here + 1).clamp(max=batch.tokens.input_ids.numel() - 1)
        scale = torch.stack([coefficients[name].to(row_weights) for name in self.loss_weights])[row_steps]
        objective, terms = head_losses(
            self.norm(hidden.flatten(0, 2)[chosen]),
            self.draft_labels(batch.tokens.input_ids.flatten()[label_at]),
            Teacher(batch.last_hidden.flatten(0, 1), taught_by, self.draft_head_weight, None),
            RowCoefficients(None, None, row_weights * scale),
            self.student_weight,
            softcap=self.head.softcap,
        )
        totals = self._per_step(row_steps, row_weights * terms.soft_ce)
        counts = self._per_step(row_steps, row_weights)
        teaches = row_weights > 0
        seen = self._per_step(row_steps, teaches)
        accepted = self._per_step(row_steps, terms.acceptance * teaches)
        losses = {name: Ratio(totals[step], counts[step]) for step, name in enumerate(self.loss_weights)}
        # With a reduced vocabulary p is renormalised and some rows are dropped: no probability of acceptance any more.
        name = "acceptance" if self.vocab is None else "acceptance_in_vocabulary"
        metrics = {f"{name}@{step + 1}": Ratio(accepted[step], seen[step]) for step in range(steps)}
        metrics["top1"] = Ratio((terms.is_top * teaches).sum(), seen.sum())
        return LossTerms(objective, losses, metrics)

    def _per_step(self, steps: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(self.num_draft_tokens, device=values.device).index_add_(0, steps, values.detach().float())

    def _through_layer(
        self, hidden: Tensor, ids: Tensor, positions: Tensor, mask: Tensor | BlockMask | None, cache: Any
    ) -> Tensor:
        """One step of every row: token embeddings beside hidden states, attention, and the layer's own tail."""
        layer: Any = self.layers[0]
        embedded = self.head.embed(ids).to(self.fc.weight.dtype)
        normed = layer.hidden_norm(hidden)
        attended, _ = layer.self_attn(
            hidden_states=torch.cat([layer.input_layernorm(embedded), normed], dim=-1),
            position_embeddings=self.rotation(embedded, positions),
            attention_mask=mask,
            cache=cache,
            **self.family.layer_arguments(),
        )
        return self.family.after_attention(layer, normed if self.config.norm_before_residual else hidden, attended)

    # Decoding -------------------------------------------------------------------------------------------------------

    def new_state(self, batch: int) -> Eagle3State:
        """See DraftModel.new_state."""
        return Eagle3State(batch)

    def observe(self, state: Eagle3State, observation: Observation) -> None:
        """Run the layer over pairs (feature i, token i+1) of the new positions; the last real row starts the draft."""
        hidden = self.fc(observation.features.to(self.fc.weight.dtype))
        offsets = torch.arange(hidden.shape[1], device=hidden.device)
        positions = observation.starts[:, None] + offsets
        hidden = self._decode_rows(state, hidden, observation.next_tokens, positions, observation.visible)
        state.hidden = hidden[torch.arange(len(hidden), device=hidden.device), observation.counts - 1]

    def propose(
        self, state: Eagle3State, anchors: Tensor, positions: Tensor, visible: int, sampler: Sampler
    ) -> Proposal:
        """See DraftModel.propose. Rows of the proposal are overwritten by the next `observe`."""
        hidden = state.hidden
        assert hidden is not None, "observe() comes before propose()"
        drawn: list[Drawn] = []
        for step in range(self.num_draft_tokens):
            if step > 0:
                at = (positions + step - 1)[:, None]
                upto = visible - self.num_draft_tokens - 1 + step
                before = self.target_tokens(drawn[-1].ids)[:, None]
                hidden = self._decode_rows(state, hidden[:, None], before, at, upto)[:, 0]
            drawn.append(sampler.draw(self.head.logits(self.norm(hidden), self.student_weight), step))
        return self.as_proposal(drawn, None)

    def _decode_rows(self, state: Eagle3State, hidden: Tensor, ids: Tensor, positions: Tensor, visible: int) -> Tensor:
        state.cache.plan(positions, visible)
        slots = torch.arange(visible, device=positions.device)
        mask = (slots <= positions[..., None])[:, None]
        return self._through_layer(hidden, ids, positions, mask, state.cache)

    # Starting values ------------------------------------------------------------------------------------------------

    def initialise(self, target: Target, answers: Iterable[Sequence[int]], seed: int) -> None:
        """Copy a layer and the last tap of the target where `init` says so (the token half of q/k/v starts at 0)."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        reset_weights(self, float(self.layer_config.initializer_range), generator)
        with torch.no_grad():
            if self.lm_head is not None:
                self.lm_head.weight.copy_(self.draft_head_weight)
            if self.config.init == "random":
                return
            (index,) = copied_layers(self.config, target)
            source: Any = target.layer(index)
            layer: Any = self.layers[0]
            size = self.fc.weight.shape[0]
            wide = {name: getattr(layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj")}
            narrow = {name: getattr(source.self_attn, name) for name in wide}
            copy_target_layer(layer, source, index, skip=tuple(f"self_attn.{name}.weight" for name in wide))
            for name, projection in wide.items():
                if projection is not None:
                    projection.weight.zero_()
                    projection.weight[:, size:] = narrow[name].weight
            layer.hidden_norm.load_state_dict(source.input_layernorm.state_dict())
            self.norm.load_state_dict(target.final_norm.state_dict())
            self.fc.weight.zero_()
            self.fc.weight[:, -size:] = torch.eye(size)
