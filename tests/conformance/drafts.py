"""Tiny targets, their answers, and drafts overfitted to them, made by this project's own commands.

One case is one draft of one target; `Workshop` regenerates answers, trains, evaluates and exports, each once.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from chat_targets import MASK_TOKEN, SPECIAL_TOKENS, VOCABULARY, ascii_tokenizer
from helpers import STOP_TOKEN
from transformers import AutoConfig, AutoModelForCausalLM

from deepspec.config import compose_data_job, compose_eval, compose_train
from deepspec.data.jobs import write_answers
from deepspec.data.journal import read_journal
from deepspec.evaluation.evaluator import evaluate
from deepspec.interop.export import run_export
from deepspec.interop.settings import compose_export
from deepspec.training.launch import launch

K = 4
NUM_LAYERS = 6
LAYERS = (0, 2, 3)  # shifted by one they are still layers that an engine can tap
NEW_TOKENS = 40
# What readers fall back to is 10000; a base far from it makes that mistake visible within a hundred positions.
ROPE_THETA = 100.0
TEMPERATURES = [1.0, 0.9, 1.2, 0.8]
STEPS_PER_SECOND = {1: 40.0, 8: 30.0}

_SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's attention on a CPU wants multiples of 32
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": STOP_TOKEN,
    "tie_word_embeddings": False,
}
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA}}
# As gpt-oss has it; vLLM reads no other.
_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": ROPE_THETA,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
}
_WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # for those that know no head_dim
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 16}
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3": _PLAIN_ROPE,
    "llama": _PLAIN_ROPE,
    "qwen2": _PLAIN_ROPE | _WIDE_HEADS,
    "mistral": _PLAIN_ROPE,
    "phi3": _PLAIN_ROPE | _WIDE_HEADS,
    "olmo3": _PLAIN_ROPE | _WIDE_HEADS | _WINDOWS,
    "smollm3": _PLAIN_ROPE | _WIDE_HEADS | {"no_rope_layers": [1, 1, 0, 1, 1, 0]},
    "glm4": _PLAIN_ROPE | {"partial_rotary_factor": 0.5},
    "qwen3_moe": _PLAIN_ROPE
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
    "gpt_oss": _YARN | _WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Model types of targets, and what their configs need beyond the common sizes."""
FAMILIES = ("qwen2", "mistral", "phi3", "smollm3", "qwen3_moe", "olmo3", "gpt_oss")
"""Further targets that vLLM can tap, with fewer drafts each."""

_BLOCK = ("algorithm.num_layers=2",)
_DSPARK = (
    "algorithm=dspark",
    *_BLOCK,
    "algorithm.markov_rank=8",
    # The paper's losses learn nothing from a random start in a few hundred steps (shared/design/embedded.md).
    "algorithm.losses={ce: 1.0, tv: 0.0, soft_ce: 0.0, confidence: 1.0}",
)
_DFLASH = ("algorithm=dflash", *_BLOCK)
_EAGLE3 = ("algorithm=eagle3",)
_REDUCED = ("algorithm.draft_vocab_size=80",)
# So many that a fault would show, so few that rounds still end in a rejection now and then.
_STEPS = {"algorithm=dspark": 50, "algorithm=dflash": 50, "algorithm=eagle3": 250}
# These say simple things.
_SHARE_OF_STEPS = {"phi3": 0.75, "smollm3": 0.5}


class Case(NamedTuple):
    """One draft.

    Attributes:
        target: model type of its target, a key of TARGETS.
        label: what the table calls it.
        method: how vLLM calls it: dspark, dflash or eagle3.
        words: what follows `python train.py`.
    """

    target: str
    label: str
    method: str
    words: tuple[str, ...]


CASES: dict[str, Case] = {
    "dspark": Case("qwen3", "DSpark, vanilla head", "dspark", _DSPARK),
    "dspark_gated": Case("qwen3", "DSpark, gated head", "dspark", (*_DSPARK, "algorithm.markov_head=gated")),
    "dspark_rnn": Case("qwen3", "DSpark, RNN head", "dspark", (*_DSPARK, "algorithm.markov_head=rnn")),
    "dspark_reduced": Case("qwen3", "DSpark, reduced vocabulary", "dspark", (*_DSPARK, *_REDUCED)),
    "dflash": Case("qwen3", "DFlash, anchor_first", "dspark", _DFLASH),
    "fill_in": Case("qwen3", "DFlash, fill_in", "dflash", (*_DFLASH, "algorithm.layout=fill_in")),
    "fill_in_reduced": Case(
        "qwen3", "DFlash, fill_in, reduced vocabulary", "dflash", (*_DFLASH, "algorithm.layout=fill_in", *_REDUCED)
    ),
    "eagle3": Case("qwen3", "Eagle3", "eagle3", _EAGLE3),
    "eagle3_own": Case(
        "qwen3", "Eagle3, own head, reduced vocabulary", "eagle3", (*_EAGLE3, "algorithm.own_head=true", *_REDUCED)
    ),
    "eagle3_normed": Case(
        "qwen3", "Eagle3, norm_before_residual", "eagle3", (*_EAGLE3, "algorithm.norm_before_residual=true")
    ),
    "llama_dspark": Case("llama", "DSpark, vanilla head", "dspark", _DSPARK),
    "llama_fill_in": Case("llama", "DFlash, fill_in", "dflash", (*_DFLASH, "algorithm.layout=fill_in")),
    "llama_eagle3": Case("llama", "Eagle3", "eagle3", _EAGLE3),
    "llama_eagle3_llama": Case("llama", "Eagle3, Llama layer", "eagle3", (*_EAGLE3, "algorithm.draft_layers=target")),
    "llama_eagle3_reduced": Case(
        "llama",
        "Eagle3, Llama layer, own head, reduced vocabulary",
        "eagle3",
        (*_EAGLE3, "algorithm.draft_layers=target", "algorithm.own_head=true", *_REDUCED),
    ),
}
for _family in FAMILIES:
    CASES[f"{_family}_fill_in"] = Case(_family, "DFlash, fill_in", "dflash", (*_DFLASH, "algorithm.layout=fill_in"))
    CASES[f"{_family}_eagle3"] = Case(_family, "Eagle3", "eagle3", _EAGLE3)
CASES["gpt_oss_dspark"] = Case("gpt_oss", "DSpark, vanilla head", "dspark", _DSPARK)
CASES["glm4_fill_in"] = Case("glm4", "DFlash, fill_in", "dflash", (*_DFLASH, "algorithm.layout=fill_in"))


class Measured(NamedTuple):
    """What this project's evaluator says of a draft.

    Attributes:
        tokens: greedy answers, one of NEW_TOKENS ids for each prompt.
        rounds: verification rounds of each prompt.
        tau: tokens a round.
    """

    tokens: list[list[int]]
    rounds: list[int]
    tau: float


class Workshop:
    """Everything that the clients are given, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cache  # noqa: B019 - lives as long as the session
    def target(self, family: str) -> Path:
        """A random target with a tokenizer that chats; it never says a special token, which would end an answer."""
        folder = self.folder / f"target_{family}"
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(_SIZES | TARGETS[family]))).float()
        with torch.no_grad():
            model.lm_head.weight[: len(SPECIAL_TOKENS)] = 0.0
        model.save_pretrained(folder)
        ascii_tokenizer().save_pretrained(folder)
        # As released models have it: mlx-lm knows the base by the old key only.
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": ROPE_THETA}))
        return folder

    @functools.cache  # noqa: B019
    def prompts(self) -> Path:
        """Eight prompts of unlike length, as a user has them."""
        letters = "abcdefghijklmnopqrstuvwxyz 0123456789"
        generator = torch.Generator().manual_seed(5)
        path = self.folder / "prompts.jsonl"
        rows = []
        for length in (3, 12, 20, 9, 15, 31, 5, 11):
            drawn = torch.randint(len(letters), (length,), generator=generator).tolist()
            rows.append({"turns": ["x" + "".join(letters[index] for index in drawn)]})
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    @functools.cache  # noqa: B019
    def answers(self, family: str) -> Path:
        """What the target says to them, greedily: what drafts learn by heart."""
        path = self.folder / f"answers_{family}.jsonl"
        words = [f"prompts={self.prompts()}", f"answers={path}", f"max_new_tokens={NEW_TOKENS}"]
        words += ["sampling.temperature=0", "device=cpu"]
        return write_answers(compose_data_job([*self._target_words(family), *words]))

    @functools.cache  # noqa: B019
    def draft(self, name: str) -> Path:
        """The checkpoint of a case."""
        case = CASES[name]
        words = [
            *case.words,
            *self._target_words(case.target),
            f"algorithm.num_draft_tokens={K}",
            f"data.answers={self.answers(case.target)}",
            "data.max_length=128",
            "data.num_anchors=32",
            f"output_dir={self.folder / 'runs'}",
            f"exp_name={name}",
            "features.memory_gib=0.1",
            "engine.device=cpu",
            "engine.precision=fp32",
            "optimizer.epochs=null",
            f"optimizer.steps={int(_STEPS[case.words[0]] * _SHARE_OF_STEPS.get(case.target, 1))}",
            "optimizer.global_batch_size=8",
            "optimizer.micro_batch_size=8",
            "optimizer.learning_rate=5.0e-3",
            "checkpoint.every_steps=null",
        ]
        return launch(compose_train(words))

    @functools.cache  # noqa: B019
    def measured(self, name: str) -> Measured:
        """Tokens and rounds of a case by our evaluator."""
        output = self.folder / "evaluations" / name
        words = [
            *self._target_words(CASES[name].target),
            f"drafts=[{self.draft(name)}]",
            f"task.path={self.prompts()}",
            f"output_dir={output}",
            f"max_new_tokens={NEW_TOKENS}",
            "sampling.temperature=0",
            "latency_prompts=0",
            "device=cpu",
        ]
        evaluate(compose_eval(words))
        (journal,) = [path for path in (output / "rounds").glob("*.jsonl") if name in path.name]
        rows = {row["request_id"]: row for row in read_journal(journal)}
        asked = self.prompt_ids(CASES[name].target)
        ordered = [next(row for row in rows.values() if row["prompt_ids"] == prompt) for prompt in asked]
        emitted = sum(one["emitted"] for row in ordered for one in row["rounds"])
        rounds = [len(row["rounds"]) for row in ordered]
        return Measured([row["output_ids"] for row in ordered], rounds, emitted / sum(rounds))

    def prompt_ids(self, family: str) -> list[list[int]]:
        """The prompts as the target reads them."""
        return [row["prompt_ids"][0] for row in self._answered(family)]

    def plain_tokens(self, family: str) -> list[list[int]]:
        """Greedy answers without any draft."""
        return [row["answer_ids"][0] for row in self._answered(family)]

    def export(self, name: str, form: str, draft: Path | None = None) -> Path:
        """A case in a format, by `deepspec export`; each once.

        Args:
            name: the case.
            form: of config/export.yaml.
            draft: another checkpoint instead of the case's own, for broken ones.
        """
        source = draft or self.draft(name)
        output = self.folder / "exports" / (name if draft is None else draft.name) / form
        if not output.is_dir():
            # A checkpoint that is wrong on purpose decodes otherwise than the case, but as itself.
            target = self._target_words(CASES[name].target)
            made = [f"draft={source}", f"format={form}", f"output_dir={output}", "device=cpu", "verify=true", *target]
            run_export(compose_export([*made, *(self._tables() if form == "sglang" else ())]))
        return output

    @functools.cache  # noqa: B019
    def _tables(self) -> list[str]:
        """What SGLang's scheduler takes beside a draft, as files of `deepspec calibrate` and `deepspec profile`."""
        sts, cost = self.folder / "sts.json", self.folder / "cost.json"
        eces = {"ece_before": [0.1] * K, "ece_after": [0.05] * K}
        sts.write_text(json.dumps({"temperatures": TEMPERATURES, "dataset": "own", "num_samples": 8, **eces}))
        table = {
            "sample_batch_tokens": list(STEPS_PER_SECOND),
            "sample_steps_per_sec": list(STEPS_PER_SECOND.values()),
            "max_batch_tokens": max(STEPS_PER_SECOND),
        }
        cost.write_text(json.dumps(table))
        return [f"calibration={sts}", f"cost={cost}"]

    def _answered(self, family: str) -> list[dict[str, Any]]:
        rows = {row["id"]: row for row in read_journal(self.answers(family))}
        return [rows[key] for key in sorted(rows)]

    def _target_words(self, family: str) -> list[str]:
        return [
            "target=auto",
            f"target.name_or_path={self.target(family)}",
            f"target.layers=[{','.join(map(str, LAYERS))}]",
            f"target.mask_token_id={MASK_TOKEN}",
            "target.dtype=float32",
            # SDPA knows no attention sinks.
            f"target.attention={'eager' if family == 'gpt_oss' else 'sdpa'}",
        ]
