"""The light heads that DSpark puts on a parallel block: a Markov bias that walks the block, and a confidence.

A Markov head turns (token before the slot, the slot's hidden state) into a latent of r numbers; its projection W2 onto
the vocabulary is added to the slot's base logits. Shapes: N blocks, K slots, H hidden size, r rank.
Source: DSpark paper, section on the semi-autoregressive head; design formulas in docs/algorithms.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module, ABC):
    """Base: E1 [V, r] embeds the token before, W2 [Vd, r] gives the bias."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        """Make E1 and W2; V rows in E1, since any token may come before."""
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    @abstractmethod
    def step(self, embedded: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One slot: E1[prev] [N, r], hidden [N, H] and memory [N, r] to latent [N, r] and the next memory."""

    def walk(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Latents of teacher-forced blocks [N, K, r] from E1[prev] [N, K, r] and hidden [N, K, H]."""
        memory = torch.zeros_like(embedded[:, 0])
        latents = []
        for slot in range(embedded.shape[1]):
            latent, memory = self.step(embedded[:, slot], hidden[:, slot], memory)
            latents.append(latent)
        return torch.stack(latents, dim=1)


class VanillaHead(MarkovHead):
    """bias = W2 E1[prev]."""

    def step(self, embedded: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """See MarkovHead."""
        return embedded, memory

    def walk(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """See MarkovHead; no slot depends on another."""
        return embedded

    @torch.no_grad()
    def start_from_bigrams(self, answers: Iterable[Sequence[int]], draft_ids: Tensor) -> None:
        """Start W2 E1 from the leading singular vectors of the answers' positive pointwise mutual information.

        Args:
            answers: generated token ids.
            draft_ids: [V] draft id of each target id, -1 outside.
        """
        rank = self.markov_w1.weight.shape[1]
        flat = [torch.tensor(answer) for answer in answers if len(answer) > 1]
        if not flat:
            return
        before = torch.cat([answer[:-1] for answer in flat])
        after = draft_ids.cpu()[torch.cat([answer[1:] for answer in flat])]
        before, after = before[after >= 0], after[after >= 0]
        shape = (self.markov_w1.weight.shape[0], self.markov_w2.weight.shape[0])
        pairs = torch.sparse_coo_tensor(
            torch.stack([before, after]), torch.ones(len(before)), shape, check_invariants=True
        ).coalesce()
        row, column = pairs.indices()
        count = pairs.values()
        total_row = torch.zeros(shape[0]).index_add_(0, row, count)
        total_column = torch.zeros(shape[1]).index_add_(0, column, count)
        # One pseudo-count of the unigram shrinks pairs that were seen once.
        unigram = total_column / total_column.sum()
        smoothed = (count + unigram[column]) / (total_row[row] + 1.0)
        information = torch.log(smoothed / unigram[column]).clamp(min=0.0)
        matrix = torch.sparse_coo_tensor(pairs.indices(), information, shape, check_invariants=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # svd_lowrank probes with random vectors and takes no generator
            left, scale, right = torch.svd_lowrank(matrix, q=min(rank, *shape), niter=2)
        used = scale.sqrt()
        for parameter, value in ((self.markov_w1.weight, left * used), (self.markov_w2.weight, right * used)):
            parameter.zero_()
            parameter[:, : value.shape[1]] = value.to(parameter.device, parameter.dtype)


class GatedHead(MarkovHead):
    """g = sigmoid(G [h; E1[prev]] + b); bias = W2 (g * E1[prev])."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        """Add the gate G [r, H + r]."""
        super().__init__(vocab_size, draft_vocab_size, rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(self, embedded: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """See MarkovHead."""
        return self._gated(embedded, hidden), memory

    def walk(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """See MarkovHead; no slot depends on another."""
        return self._gated(embedded, hidden)

    def _gated(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded


class RnnHead(MarkovHead):
    """z = [s; E1[prev]; h]; (g, c, o) = J z + b; s <- sig(g) s + (1 - sig(g)) tanh(c); bias = W2 tanh(o)."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        """Add the joint projection J [3r, 2r + H]."""
        super().__init__(vocab_size, draft_vocab_size, rank)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(self, embedded: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """See MarkovHead."""
        joint = self.joint_proj(torch.cat([memory, embedded, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * memory + (1.0 - keep) * torch.tanh(candidate)


def make_markov_head(kind: str, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> MarkovHead:
    """The Markov head that the configuration names."""
    if kind == "vanilla":
        return VanillaHead(vocab_size, draft_vocab_size, rank)
    head = GatedHead if kind == "gated" else RnnHead
    return head(vocab_size, draft_vocab_size, rank, hidden_size)


class ConfidenceHead(nn.Module):
    """Logit z_k of the probability that slot k is accepted given that all before were; always fp32."""

    def __init__(self, input_size: int) -> None:
        """Make the projection w [1, input_size] and its bias."""
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., input_size] -> [...]."""
        with torch.autocast(inputs.device.type, enabled=False):
            exact = torch.promote_types(inputs.dtype, torch.float32)
            weight, bias = self.proj.weight.to(exact), self.proj.bias.to(exact)
            return nn.functional.linear(inputs.to(exact), weight, bias).squeeze(-1)
