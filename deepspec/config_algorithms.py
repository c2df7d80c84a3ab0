"""The settings of each draft algorithm, and which of them do not go together.

Values live in config/algorithm/, and in config.json beside the weights of every draft; this module knows neither.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from typing_extensions import Self

from deepspec.config_base import Count, Settings, Weight

# The paper's published pairs of K and position decay.
DECAY_BY_BLOCK = {7: 4.0, 9: 5.0, 15: 7.0}


def default_position_decay(num_draft_tokens: int) -> float:
    """Return the position decay of the published block size that lies nearest to K (the smaller one on a tie)."""
    nearest = min(DECAY_BY_BLOCK, key=lambda block: (abs(block - num_draft_tokens), block))
    return DECAY_BY_BLOCK[nearest]


class TokenLosses(Settings):
    """Weights of the losses on the draft's distribution q.

    Attributes:
        ce: cross-entropy with the label.
        tv: full L1 distance to the target's p.
        soft_ce: cross-entropy with p; its gradient is that of the KL divergence from p to q.
    """

    ce: Weight
    tv: Weight
    soft_ce: Weight

    @model_validator(mode="after")
    def _something_is_learned(self) -> Self:
        if self.ce + self.tv + self.soft_ce == 0:
            raise ValueError("ce, tv and soft_ce are all 0, so nothing trains the draft. Make one of them positive.")
        return self


class LossWeights(TokenLosses):
    """The token losses and the binary cross-entropy of the confidence head."""

    confidence: Weight


class Eagle3Losses(Settings):
    """Eagle3 learns from one loss, the soft cross-entropy against the target."""

    soft_ce: Annotated[float, Field(gt=0.0)]


class AlgorithmConfig(Settings):
    """What all draft algorithms share.

    Attributes:
        name: the algorithm, also the name of its module.
        num_draft_tokens: K, draft tokens per round.
        num_layers: decoder layers of the draft.
        draft_layers: Qwen3-style layers at the target's sizes, or layers of the target's own family.
        init: start from random layers or from copies of the target's.
        init_layers: which layers of the target are copied, one for each draft layer; None takes the last ones.
        draft_vocab_size: how many tokens the draft can propose, None for all; which ones follows from the answers.
    """

    name: str
    num_draft_tokens: Count
    num_layers: Count
    draft_layers: Literal["qwen3", "target"]
    init: Literal["random", "target_layers"]
    init_layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] | None = None
    draft_vocab_size: Annotated[int, Field(ge=2)] | None = None

    @model_validator(mode="after")
    def _copies_need_the_same_kind_of_layer(self) -> Self:
        if self.init == "target_layers" and self.draft_layers != "target":
            raise ValueError(
                "init 'target_layers' copies layers of the target's family, but draft_layers is "
                f"'{self.draft_layers}'. Set draft_layers=target or init=random."
            )
        if self.init_layers is not None:
            if self.init != "target_layers":
                raise ValueError(f"init_layers {list(self.init_layers)} needs init=target_layers, not '{self.init}'.")
            if len(self.init_layers) != self.num_layers:
                raise ValueError(
                    f"init_layers {list(self.init_layers)} names {len(self.init_layers)} layers, but num_layers is "
                    f"{self.num_layers}. Name one for each draft layer."
                )
        return self


class BlockAlgorithmConfig(AlgorithmConfig):
    """Algorithms that draft a block in one pass.

    Attributes:
        position_decay: slot k weighs exp(-k / position_decay); null in YAML takes the value of the nearest published K.
        losses_at_start: token losses at the first step, from where the mix moves evenly to `losses` at the last; None
            keeps one mix.
    """

    position_decay: Annotated[float, Field(gt=0.0)]
    losses_at_start: TokenLosses | None = None

    @field_validator("position_decay", mode="before")
    @classmethod
    def _decay_follows_block(cls, value: object, info: ValidationInfo) -> object:
        if value is not None:
            return value
        # K is absent from the data when it was refused itself; one complaint about it is enough.
        return default_position_decay(info.data["num_draft_tokens"]) if "num_draft_tokens" in info.data else 1.0


class DSparkConfig(BlockAlgorithmConfig):
    """DSpark: a parallel block, a light sequential head and a confidence head."""

    name: Literal["dspark"]
    layout: Literal["anchor_first"]
    markov_head: Literal["vanilla", "gated", "rnn"]
    markov_rank: Annotated[int, Field(ge=0)]
    markov_init: Literal["random", "bigram"]
    confidence_head: bool
    confidence_reads_markov: bool
    detach_confidence_input: bool
    losses: LossWeights

    @model_validator(mode="after")
    def _heads_and_losses_agree(self) -> Self:
        if self.markov_init == "bigram" and self.markov_head != "vanilla":
            raise ValueError(
                f"markov_init 'bigram' needs markov_head 'vanilla', not '{self.markov_head}': only there is the bias a "
                "function of the token before. Set markov_init=random or markov_head=vanilla."
            )
        if self.markov_rank == 0 and self.markov_init == "bigram":
            raise ValueError("markov_init 'bigram' needs a Markov head, but markov_rank is 0. Set markov_init=random.")
        if self.markov_rank == 0 and self.confidence_head and self.confidence_reads_markov:
            raise ValueError(
                "confidence_reads_markov is true, but markov_rank is 0: there is no Markov head to read. "
                "Set confidence_reads_markov=false or give markov_rank."
            )
        if self.losses.confidence > 0 and not self.confidence_head:
            raise ValueError(
                f"losses.confidence is {self.losses.confidence:g}, but confidence_head is false. "
                "Set losses.confidence=0 or confidence_head=true."
            )
        return self


class DFlashConfig(BlockAlgorithmConfig):
    """DFlash: a parallel block, slots independent of each other; `fill_in` feeds K + 1 inputs for K drafts."""

    name: Literal["dflash"]
    layout: Literal["anchor_first", "fill_in"]
    losses: TokenLosses


class Eagle3Config(AlgorithmConfig):
    """Eagle3: one layer unrolled over K steps.

    Attributes:
        step_decay: step s weighs step_decay ** s.
        own_head: train an own output head instead of sharing the target's.
        norm_before_residual: the layer's residual is the normed hidden state, as in drafts of the speculators library.
        normalise: every supervised token weighs the same, or every sequence.
    """

    name: Literal["eagle3"]
    num_layers: Literal[1]
    step_decay: Annotated[float, Field(gt=0.0, le=1.0)]
    own_head: bool
    norm_before_residual: bool = False
    normalise: Literal["token", "sequence"]
    losses: Eagle3Losses


AnyAlgorithmConfig = Annotated[DSparkConfig | DFlashConfig | Eagle3Config, Field(discriminator="name")]
