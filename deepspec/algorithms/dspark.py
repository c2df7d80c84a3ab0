"""DSpark: the parallel block, a light head that walks it token by token, and a confidence in every slot.

Source: DSpark paper (2026), "Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deepspec.algorithms.backbone import BlockDraft, SlotInputs
from deepspec.algorithms.base import DraftSpec, Proposal, Sampler, VocabMap
from deepspec.algorithms.heads import ConfidenceHead, VanillaHead, make_markov_head
from deepspec.config import DSparkConfig
from deepspec.targets.base import Target


class Draft(BlockDraft):
    """The block draft with a Markov head and, where configured, a confidence head."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig, spec: DraftSpec, target: Target, vocab: VocabMap | None) -> None:
        """Add the heads to the backbone."""
        super().__init__(config, spec, target, vocab)
        size = int(self.layer_config.hidden_size)
        draft_vocab_size = self.draft_head_weight.shape[0]
        self.markov_head = (
            make_markov_head(config.markov_head, target.vocab_size, draft_vocab_size, config.markov_rank, size)
            if config.markov_rank
            else None
        )
        reads = size + (config.markov_rank if config.confidence_reads_markov else 0)
        self.confidence_head = ConfidenceHead(reads) if config.confidence_head else None

    @property
    def has_confidence(self) -> bool:
        """See DraftModel.has_confidence."""
        return self.confidence_head is not None

    @property
    def latent_weight(self) -> Tensor | None:
        """W2 [Vd, r], or None without a Markov head."""
        return None if self.markov_head is None else self.markov_head.markov_w2.weight

    def head_inputs(self, hidden: Tensor, previous: Tensor, rows: Tensor) -> SlotInputs:
        """Latents of the Markov head and confidence logits of the supervised rows."""
        embedded = self._embedded(previous)
        latent = None
        if self.markov_head is not None and embedded is not None:
            latent = self.markov_head.walk(embedded, hidden).flatten(0, 1)[rows]
        if self.confidence_head is None:
            return SlotInputs(latent, None)
        before = None if embedded is None else embedded.flatten(0, 1)[rows]
        return SlotInputs(latent, self._confidence(hidden.flatten(0, 1)[rows], before))

    def draw_block(self, hidden: Tensor, anchors: Tensor, sampler: Sampler) -> Proposal:
        """Walk the block: each slot's bias reads the token drawn just before it."""
        base = self.head.logits(hidden, self.draft_head_weight)
        previous, memory = anchors, hidden.new_zeros(hidden.shape[0], self.config.markov_rank)
        drawn, confidence = [], []
        for slot in range(self.num_draft_tokens):
            embedded = self._embedded(previous)
            logits = base[:, slot]
            if self.markov_head is not None and embedded is not None:
                latent, memory = self.markov_head.step(embedded, hidden[:, slot], memory)
                logits = logits + self.markov_head.markov_w2(latent)
            drawn.append(sampler.draw(logits, slot))
            previous = self.target_tokens(drawn[-1].ids)
            if self.confidence_head is not None:
                confidence.append(self._confidence(hidden[:, slot], embedded))
        return self.as_proposal(drawn, torch.stack(confidence, dim=1) if confidence else None)

    def initialise(self, target: Target, answers: Iterable[Sequence[int]], seed: int) -> None:
        """The backbone's starting values, and a bias that is zero or the answers' bigrams."""
        super().initialise(target, answers, seed)
        with torch.no_grad():
            if self.markov_head is not None:
                self.markov_head.markov_w2.weight.zero_()
            if self.confidence_head is not None:
                self.confidence_head.proj.weight.zero_()
        if self.config.markov_init == "bigram":
            assert isinstance(self.markov_head, VanillaHead)
            identity = torch.arange(self.head.weight.shape[0])
            self.markov_head.start_from_bigrams(answers, identity if self.vocab is None else self.vocab.draft_ids)

    def _embedded(self, previous: Tensor) -> Tensor | None:
        """E1[prev] [..., r], or None without a Markov head."""
        return None if self.markov_head is None else self.markov_head.markov_w1(previous)

    def _confidence(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        assert self.confidence_head is not None
        inputs = hidden
        if self.config.confidence_reads_markov and embedded is not None:
            inputs = torch.cat([hidden, embedded], dim=-1)
        logits: Tensor = self.confidence_head(inputs.detach() if self.config.detach_confidence_input else inputs)
        return logits
