"""Made-up targets, drafts and batches of real shapes, and how a piece of work on them is measured and written down.

Nothing here runs a target: features, last hidden states and head are random numbers of the right sizes.
"""

from __future__ import annotations

import argparse
import datetime
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks.clocks import peak_bytes, seconds, seconds_and_peak
from deepspec.algorithms.base import build_draft
from deepspec.algorithms.dspark import Draft
from deepspec.attention import GROUPED_SDPA
from deepspec.config import DSparkConfig
from deepspec.config_algorithms import LossWeights
from deepspec.data.anchors import draw_anchors
from deepspec.runtime import available_cpus, provenance
from deepspec.targets.base import Target
from deepspec.types import FeatureBatch, TokenBatch

__all__ = ["peak_bytes", "seconds", "seconds_and_peak"]

RESULTS = Path(__file__).parent / "results"
NUM_TAPS = 5
PROMPT_TOKENS = 60


def results_folder(chosen: argparse.Namespace) -> Path:
    """Where a run writes: as asked for; a tiny one never among the results."""
    if chosen.results is not None:
        return Path(chosen.results)
    return Path(tempfile.mkdtemp(prefix="deepspec-bench-")) if chosen.tiny else RESULTS


class Shape(NamedTuple):
    """Sizes of a target."""

    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


SMOLLM2 = Shape(49152, 576, 1536, 9, 3, 64)
SMOLLM2_152K = SMOLLM2._replace(vocab=151936)
QWEN3_4B = Shape(151936, 2560, 9728, 32, 8, 128)
TINY = Shape(320, 32, 48, 4, 2, 8)


def make_target(
    shape: Shape, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", *, is_runnable: bool = False
) -> Target:
    """A random target; its layers hold no memory unless they are to run."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=NUM_TAPS + 3,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    config._attn_implementation = GROUPED_SDPA
    torch.manual_seed(0)
    with torch.device(device if is_runnable else "meta"):
        model: Any = AutoModelForCausalLM.from_config(config).to(dtype)
    # Logits of unit-normal states then spread by about 3, so that distributions are neither flat nor certain.
    weight = nn.Parameter(torch.randn(shape.vocab, shape.hidden, device=device).mul_(3 * shape.hidden**-0.5).to(dtype))
    model.model.embed_tokens.weight, model.lm_head.weight = weight, weight
    return Target(model, None, name="made-up", mask_token_id=shape.vocab - 1)


def make_draft(
    target: Target, *, num_draft_tokens: int = 7, draft_vocab_size: int | None = None, rank: int = 256
) -> Draft:
    """A DSpark draft of two layers with the paper's losses and all its heads drawn at random."""
    config = DSparkConfig(
        name="dspark",
        num_draft_tokens=num_draft_tokens,
        num_layers=2,
        draft_layers="target",
        init="random",
        draft_vocab_size=draft_vocab_size,
        layout="anchor_first",
        position_decay=4.0,
        markov_head="vanilla",
        markov_rank=rank,
        markov_init="random",
        confidence_head=True,
        confidence_reads_markov=True,
        detach_confidence_input=False,
        losses=LossWeights(ce=0.1, tv=0.9, soft_ce=0.0, confidence=1.0),
    )
    draft = build_draft(config, target)
    assert isinstance(draft, Draft)
    assert draft.markov_head is not None
    assert draft.confidence_head is not None
    for weight in (draft.markov_head.markov_w2.weight, draft.confidence_head.proj.weight):
        nn.init.normal_(weight, std=0.1)
    for parameter in draft.parameters():
        parameter.data = parameter.data.to(torch.promote_types(target.dtype, torch.float32))
    return draft.train()


def answer_lengths(mean: float, count: int, spread: float = 0.5) -> list[int]:
    """Lengths at the quantiles of a log-normal distribution of this mean, without the luck of a small draw."""
    drawn = [2.718281828 ** (spread * NormalDist().inv_cdf((index + 0.5) / count)) for index in range(count)]
    return [max(2, round(mean * count * one / sum(drawn))) for one in drawn]


def make_batch(
    target: Target, answers: Sequence[int], num_anchors: int, *, prompt: int = PROMPT_TOKENS, draft: Draft | None = None
) -> FeatureBatch:
    """One micro-batch of sequences with the given answer lengths, unit-normal features and last hidden states.

    With a draft of a reduced vocabulary, 95 % of the tokens lie in it and the teacher's normaliser is made.
    """
    generator, device = torch.Generator().manual_seed(0), target.device
    lengths = torch.tensor([prompt + answer for answer in answers])
    positions = torch.arange(int(lengths.max()))
    is_answer = (positions >= prompt) & (positions < lengths[:, None])
    common = target.vocab_size - 1 if draft is None or draft.vocab is None else len(draft.vocab.target_ids)
    is_common = torch.rand(is_answer.shape, generator=generator) < 0.95
    ids = torch.where(
        is_common,
        torch.randint(0, common, is_answer.shape, generator=generator),
        torch.randint(0, target.vocab_size - 1, is_answer.shape, generator=generator),
    )
    drawn = [draw_anchors(row.tolist(), num_anchors, 0, 0, index) for index, row in enumerate(is_answer)]
    anchors = torch.zeros(len(answers), max(map(len, drawn)), dtype=torch.int64)
    is_anchor = torch.zeros(anchors.shape, dtype=torch.bool)
    for row, found in enumerate(drawn):
        anchors[row, : len(found)] = torch.from_numpy(found)
        is_anchor[row, : len(found)] = True
    tokens = TokenBatch(ids, lengths, is_answer, anchors, is_anchor, torch.arange(len(answers)))

    def draw(size: int) -> Tensor:
        return torch.randn(*ids.shape, size, generator=generator).to(device, target.dtype)

    last_hidden = draw(target.hidden_size)
    needs_normaliser = draft is not None and draft.needs_log_normaliser
    normaliser = target.logits(last_hidden).logsumexp(dim=-1).float() if needs_normaliser else None
    tokens = TokenBatch(*(tensor.to(device) for tensor in tokens))
    return FeatureBatch(tokens, draw(NUM_TAPS * target.hidden_size), last_hidden, normaliser)


def needed_flops(draft: Draft, batch: FeatureBatch) -> dict[str, float]:
    """FLOPs that a train step cannot do without, by part.

    Only real positions, anchors and supervised rows count; a product with trainable weights counts three times (forward
    and two gradients), with frozen ones only what is asked of it; the teacher's logits count once per position.
    """
    tokens, block, layers = batch.tokens, draft.inputs_per_block, len(draft.layers)
    shape = draft.layer_config
    positions, anchors = int(tokens.lengths.sum()), tokens.anchors[tokens.anchor_mask]
    supervised = draft.supervised(tokens)
    rows = int(supervised.sum())
    sequence = torch.arange(len(tokens.lengths), device=supervised.device)[:, None, None] * tokens.input_ids.shape[1]
    taught = len((draft.label_positions(tokens) - 1 + sequence)[supervised].unique())
    vocab, hidden = draft.draft_head_weight.shape
    rank = 0 if draft.latent_weight is None else draft.latent_weight.shape[1]
    matrices = sum(weight.numel() for weight in draft.layers.parameters() if weight.dim() == 2)
    keys = 2 * shape.num_key_value_heads * shape.head_dim
    return {
        "context": 2.0 * positions * hidden * (2 * draft.feature_size + 3 * layers * keys),
        "layers": 6.0 * len(anchors) * block * matrices,
        "attention": 12.0 * layers * block * int((anchors + block).sum()) * shape.num_attention_heads * shape.head_dim,
        "head forward": 2.0 * rows * vocab * (hidden + rank),
        "head gradient": 2.0 * rows * vocab * (hidden + 2 * rank),
        "teacher": 2.0 * taught * vocab * hidden,
    }


# Measuring ------------------------------------------------------------------------------------------------------------


def forget_peak_of_process() -> None:
    """Let `peak_of_process` count from now on (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_of_process() -> int:
    """Most bytes of memory that this process has held: weights, libraries and all (Linux)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]


def matrix_rate(dtype: torch.dtype, device: torch.device, size: int = 2048, repeats: int = 8) -> float:
    """FLOP per second of the fastest of several square products: what this machine can do at most."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    left @ right
    return 2.0 * size**3 / min(seconds(lambda: left @ right, device) for _ in range(repeats))


# Writing down ---------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def hardware(device: torch.device) -> tuple[str, str]:
    """Short name for files, and words."""
    found = provenance()["hardware"]
    name = found["gpus"][0] if device.type == "cuda" else found["processor"]
    words = [word for word in re.findall("[a-z0-9]+", name.lower()) if word not in _VENDORS]
    if device.type == "cuda":
        return "-".join(words[:2]), name
    return f"{words[0] if words else 'cpu'}-{available_cpus()}-cores", f"{name}, {available_cpus()} cores"


_VENDORS = {"nvidia", "amd", "intel", "r", "tm", "cpu", "processor"}


def write_result(what: str, title: str, body: str, device: torch.device, *, folder: Path = RESULTS) -> Path:
    """Write results/<what>_<hardware>_<date>.md, with what it was measured on and by."""
    today = datetime.date.today().isoformat()
    short, words = hardware(device)
    made = provenance()
    git = made["git"] or {"commit": "unknown", "dirty": False}
    state = git["commit"][:12] + (" with uncommitted changes" if git["dirty"] else "")
    stamp = f"{words}. torch {made['packages']['torch']}, Python {made['python']}, commit {state}. "
    stamp += f"{made['hardware']['threads']}."
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{what}_{short}_{today}.md"
    path.write_text(f"# {title}, {today}\n\n{stamp}\n\n{body}\n", encoding="utf-8")
    return path
