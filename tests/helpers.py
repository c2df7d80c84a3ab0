"""Tiny models and naive references that several tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Gemma4TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from deepspec.algorithms.base import DraftModel, build_draft
from deepspec.attention import GROUPED_SDPA
from deepspec.config import AlgorithmConfig, DFlashConfig, DSparkConfig, Eagle3Config
from deepspec.data.anchors import draw_anchors
from deepspec.data.prompt_file import PromptFile
from deepspec.data.prompts import Conversation
from deepspec.decoding.kv_cache import RaggedCache
from deepspec.targets.base import Target
from deepspec.types import FeatureBatch, TokenBatch

VOCAB_SIZE = 96
MASK_TOKEN = VOCAB_SIZE - 1
STOP_TOKEN = 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "eos_token_id": STOP_TOKEN,
}
"""What the config of any tiny target says."""


def read_conversations(
    path: str | Path, on_bad_row: Literal["stop", "skip"]
) -> tuple[list[Conversation], dict[str, int]]:
    """All conversations of a file, and how many rows were left out for each reason."""
    file = PromptFile(path, on_bad_row)
    return list(file), file.skipped


def tiny_config(family: str, num_layers: int = 5, vocab_size: int = VOCAB_SIZE) -> PreTrainedConfig:
    """A config of the family with a hidden size of 32."""
    common = SIZES | {"vocab_size": vocab_size, "num_hidden_layers": num_layers}
    if family == "gemma4":
        kinds = ["sliding_attention", "full_attention"] * num_layers
        return Gemma4TextConfig(
            **common,
            global_head_dim=16,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            layer_types=[*kinds[: num_layers - 1], "full_attention"],
            sliding_window=8,
            hidden_size_per_layer_input=0,
            # Tied to scaled embeddings, random weights would only repeat their last token.
            tie_word_embeddings=False,
            final_logit_softcapping=30.0,
            vocab_size_per_layer_input=vocab_size,
        )
    return {"qwen3": Qwen3Config, "llama": LlamaConfig}[family](**common, tie_word_embeddings=family == "llama")


def tiny_target(
    family: str = "qwen3",
    *,
    num_layers: int = 5,
    layer_ids: tuple[int, ...] = (0, 1, 3),
    vocab_size: int = VOCAB_SIZE,
    stop_token_ids: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    seed: int = 11,
) -> Target:
    """A random target; its weights are large enough that its distributions are far from uniform."""
    torch.manual_seed(seed)
    config = tiny_config(family, num_layers, vocab_size)
    config._attn_implementation = GROUPED_SDPA
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    return Target(
        model,
        None,
        name=f"tiny-{family}",
        layer_ids=layer_ids,
        mask_token_id=vocab_size - 1,
        stop_token_ids=stop_token_ids,
    )


_BLOCK: dict[str, Any] = {
    "num_draft_tokens": 4,
    "num_layers": 2,
    "draft_layers": "qwen3",
    "init": "random",
    "layout": "anchor_first",
    "position_decay": 4.0,
}
_SETTINGS: dict[str, tuple[type[AlgorithmConfig], dict[str, Any]]] = {
    "dspark": (
        DSparkConfig,
        _BLOCK
        | {
            "markov_head": "vanilla",
            "markov_rank": 6,
            "markov_init": "random",
            "confidence_head": True,
            "confidence_reads_markov": True,
            "detach_confidence_input": False,
            "losses": {"ce": 0.1, "tv": 0.9, "soft_ce": 0.0, "confidence": 1.0},
        },
    ),
    "dflash": (DFlashConfig, _BLOCK | {"losses": {"ce": 1.0, "tv": 0.0, "soft_ce": 0.0}}),
    "eagle3": (
        Eagle3Config,
        {
            "num_draft_tokens": 4,
            "num_layers": 1,
            "draft_layers": "qwen3",
            "init": "random",
            "step_decay": 0.8,
            "own_head": False,
            "normalise": "token",
            "losses": {"soft_ce": 1.0},
        },
    ),
}


def tiny_draft(target: Target, algorithm: str, **overrides: Any) -> DraftModel:
    """A draft of a tiny target in the target's dtype, with random weights everywhere and K = 4.

    Heads that a real run starts at zero are drawn too, so that every part takes part. With `draft_vocab_size` the low
    ids form the vocabulary. `seed` seeds the weights.
    """
    seed = overrides.pop("seed", 5)
    kind, settings = _SETTINGS[algorithm]
    draft = build_draft(kind(name=algorithm, **(settings | overrides)), target, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.startswith(("markov_head", "confidence_head")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return draft.to(target.dtype)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dspark-vanilla": ("dspark", {}),
    "dspark-gated": ("dspark", {"markov_head": "gated"}),
    "dspark-rnn": ("dspark", {"markov_head": "rnn"}),
    "dspark-bare": (
        "dspark",
        {"confidence_head": False, "losses": {"ce": 1.0, "tv": 0, "soft_ce": 1.0, "confidence": 0}},
    ),
    "dspark-no_markov": ("dspark", {"markov_rank": 0, "confidence_reads_markov": False}),
    "dflash-anchor_first": ("dflash", {}),
    "dflash-fill_in": ("dflash", {"layout": "fill_in"}),
    "eagle3": ("eagle3", {}),
    "eagle3-own_head": ("eagle3", {"own_head": True, "normalise": "sequence"}),
}
"""Every algorithm, layout and head that tests run over: name to (algorithm, overrides)."""


def kind_of_draft(target: Target, kind: str, **overrides: Any) -> DraftModel:
    """A tiny draft of one of KINDS."""
    algorithm, settings = KINDS[kind]
    return tiny_draft(target, algorithm, **(settings | overrides))


def with_features(target: Target, tokens: TokenBatch) -> FeatureBatch:
    """A token batch with all that a draft may learn from."""
    features, last_hidden = target.features(tokens.input_ids)
    return FeatureBatch(tokens, features, last_hidden, target.logits(last_hidden).logsumexp(dim=-1).float())


def random_batch(target: Target, lengths: Sequence[int], prompts: Sequence[int], anchors: int = 3) -> FeatureBatch:
    """Random samples with features; sample b answers from position prompts[b] on, its anchors are drawn from there."""
    generator = torch.Generator().manual_seed(len(lengths))
    longest = max(lengths)
    ids = torch.randint(4, target.vocab_size - 1, (len(lengths), longest), generator=generator)
    positions = torch.arange(longest)
    size = torch.tensor(lengths)
    answer = (positions >= torch.tensor(prompts)[:, None]) & (positions < size[:, None])
    drawn = [draw_anchors(row.tolist(), anchors, 1, 0, index) for index, row in enumerate(answer)]
    held = torch.zeros(len(lengths), anchors, dtype=torch.int64)
    mask = torch.zeros(len(lengths), anchors, dtype=torch.bool)
    for row, found in enumerate(drawn):
        held[row, : len(found)] = torch.from_numpy(found)
        mask[row, : len(found)] = True
    tokens = TokenBatch(
        ids.masked_fill(positions >= size[:, None], 0), size, answer, held, mask, torch.arange(len(lengths))
    )
    return with_features(target, tokens)


def assert_ragged_forwards_equal_one(
    target: Target, ids: torch.Tensor, steps: Sequence[tuple[int, Sequence[int]]], **tolerance: float
) -> None:
    """Compare cached forwards with one over whole rows.

    Args:
        target: runs the tokens.
        ids: [B, L] the rows.
        steps: of each forward, how many tokens of each row it takes, and how many each row keeps. The others are no
            tokens of the row, and the next forward overwrites them.
        tolerance: rtol and atol.
    """
    whole, whole_last = target.features(ids)
    cache = RaggedCache.for_batch(len(ids))
    starts = torch.zeros(len(ids), dtype=torch.int64)
    for queries, kept in steps:
        positions = starts[:, None] + torch.arange(queries)
        tokens = ids.gather(1, positions).clone()
        for row, count in enumerate(kept):
            tokens[row, count:] = 7
        features, last_hidden = target.forward_cached(tokens, positions, cache, int(positions.max()) + 1)
        for row, count in enumerate(kept):
            own = slice(int(starts[row]), int(starts[row]) + count)
            torch.testing.assert_close(features[row, :count], whole[row, own], **tolerance)
            torch.testing.assert_close(last_hidden[row, :count], whole_last[row, own], **tolerance)
        starts = starts + torch.tensor(kept)
    assert cache.nbytes > 0


def coefficients_for(draft: DraftModel, batch: FeatureBatch) -> dict[str, torch.Tensor]:
    """Loss weights over the batch's own counts, as the trainer makes them."""
    counts = draft.loss_counts(batch.tokens)
    return {name: weight / counts[name].clamp(min=1e-9) for name, weight in draft.loss_weights.items()}


def overfit(draft: DraftModel, batch: FeatureBatch, steps: int, learning_rate: float = 1e-2) -> list[float]:
    """Train on one batch with AdamW; returns the objective before each step."""
    parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    coefficients = coefficients_for(draft, batch)
    history = []
    for _ in range(steps):
        optimizer.zero_grad()
        objective = draft(batch, coefficients).objective
        objective.backward()
        optimizer.step()
        history.append(objective.item())
    return history


def batch_of(target: Target, samples: Sequence[tuple[Sequence[int], Sequence[int]]], anchors: int = 8) -> FeatureBatch:
    """A batch of (prompt, answer) pairs with features and up to `anchors` anchors a sample."""
    lengths = [len(prompt) + len(answer) for prompt, answer in samples]
    batch = random_batch(target, lengths, [len(prompt) for prompt, _ in samples], anchors)
    ids = torch.zeros_like(batch.tokens.input_ids)
    for row, (prompt, answer) in enumerate(samples):
        ids[row, : lengths[row]] = torch.tensor([*prompt, *answer])
    return with_features(target, batch.tokens._replace(input_ids=ids))


def most_bytes_during(job: Callable[[], Any]) -> int:
    """The most bytes that torch's allocator handed out during a job beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        job()
    recorded = profiler.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), order, event.nbytes()) for order, event in enumerate(recorded) if event.name() == "[memory]"
    )
    held = most = 0
    for _, _, change in changes:
        held += change
        most = max(most, held)
    return most


def all_rows(batch: FeatureBatch) -> torch.Tensor:
    """Every position of every sample [B, L], as rows of Eagle3's unrolling."""
    count, length = batch.tokens.input_ids.shape
    return torch.arange(length).expand(count, -1)
