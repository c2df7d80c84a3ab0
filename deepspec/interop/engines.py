"""Which engine can serve which draft, and why not: the one place that knows what engines leave out.

Verified against vLLM 0.32, SGLang 0.5.23, dflash 0.1, SpecForge 0.2 and speculators 0.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from deepspec.config import AlgorithmConfig, DFlashConfig, DSparkConfig, Eagle3Config
from deepspec.targets.facts import TargetFacts

Format = Literal["deepspec", "zlab", "specforge", "vllm", "sglang", "speculators"]
FORMATS: tuple[Format, ...] = ("deepspec", "zlab", "specforge", "vllm", "sglang", "speculators")
SPECFORGE_TAPS = 3
_UNTAPPED_BY_VLLM = frozenset({"Gemma2ForCausalLM", "Gemma3ForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM"})
_UNTAPPED_BY_SGLANG = frozenset({"Gemma2ForCausalLM", "Glm4ForCausalLM", "Olmo3ForCausalLM", "SmolLM3ForCausalLM"})
# Of the families that we train on, the classes whose layers an engine cannot hand out, to Eagle3 or to block drafts.
# The conformance suite asks the engines' own classes.
UNTAPPED: dict[tuple[Format, Literal["eagle3", "block"]], frozenset[str]] = {
    ("vllm", "eagle3"): _UNTAPPED_BY_VLLM,
    ("vllm", "block"): _UNTAPPED_BY_VLLM,
    ("sglang", "eagle3"): _UNTAPPED_BY_SGLANG,
    ("sglang", "block"): _UNTAPPED_BY_SGLANG | {"Gemma3ForCausalLM", "Glm4MoeForCausalLM", "Qwen2ForCausalLM"},
}
# Formats of libraries that train, and the engine that serves what they write.
_SERVED_BY: dict[Format, Format] = {"speculators": "vllm", "specforge": "sglang"}
_TEXT_ONLY_GEMMA4 = "Gemma4ForCausalLM"
_WHOLE_VOCABULARY = "algorithm.draft_vocab_size=null"


class Draft(NamedTuple):
    """What decides where a draft can be served.

    Attributes:
        algorithm: its settings.
        model_type: of its layers.
        num_taps: M.
        is_reduced: whether it can propose a part of the vocabulary only.
        keys_are_values: Gemma4 layers without v_proj.
        follows_target: the target scales its embeddings or caps its logits, which plain layers of engines do not.
        target_classes: architectures of the target's config; empty where it is not known.
        beside_windows: some layers of the target see a window of the context and some all of it.
    """

    algorithm: AlgorithmConfig
    model_type: str
    num_taps: int
    is_reduced: bool
    keys_are_values: bool
    follows_target: bool
    target_classes: tuple[str, ...]
    beside_windows: bool

    @property
    def kind(self) -> str:
        """The algorithm, and for DFlash its layout: dspark, dflash_anchor_first, dflash_fill_in, eagle3."""
        config = self.algorithm
        return f"dflash_{config.layout}" if isinstance(config, DFlashConfig) else config.name


def draft_facts(
    fields: Mapping[str, Any],
    algorithm: AlgorithmConfig,
    target: TargetFacts | None,
) -> Draft:
    """The facts of a draft from its config in our words, and from its target's where that is known."""
    taps = fields["target_layer_ids"]
    return Draft(
        algorithm=algorithm,
        model_type=fields["model_type"],
        num_taps=SPECFORGE_TAPS if taps is None else len(taps),
        is_reduced=fields.get("draft_vocab_size") not in (None, fields["vocab_size"]),
        keys_are_values=bool(fields.get("attention_k_eq_v", False)),
        follows_target=target is not None and target.changes_vocabulary,
        target_classes=() if target is None else target.architectures,
        beside_windows=target is not None and target.has_windows,
    )


class _Reason(NamedTuple):
    """Why a draft and an engine do not go together.

    Attributes:
        why: a sentence.
        otherwise: what to do so that they would, in the imperative; None where no training helps.
    """

    why: str
    otherwise: str | None = None


def refusal(draft: Draft, engine: Format) -> str | None:
    """Why a draft cannot be written for an engine, with the nearest that works; None where it can."""
    found = _reason(draft, engine)
    if found is None:
        return None
    served = [f"format={one}" for one in nearest_formats(draft) if one != "deepspec" and unserved(draft, one) is None]
    nearest = " or ".join(served) or "format=deepspec, which this project decodes"
    return f"{found.why} Nearest: {nearest}{'' if found.otherwise is None else f'; or {found.otherwise}'}."


def unserved(draft: Draft, engine: Format) -> str | None:
    """Why nothing serves a draft that can be written in a format that another engine reads; None where it is served."""
    found = _reason(draft, _SERVED_BY.get(engine, engine))
    return None if found is None else found.why


def nearest_formats(draft: Draft) -> list[Format]:
    """All formats that a draft can be written in."""
    return [engine for engine in FORMATS if _reason(draft, engine) is None]


def _reason(draft: Draft, engine: Format) -> _Reason | None:
    return None if engine == "deepspec" else _draft_reason(draft, engine) or _target_reason(draft, engine)


def _draft_reason(draft: Draft, engine: Format) -> _Reason | None:
    if draft.model_type == "gemma4_text":
        return _gemma4_reason(draft, engine)
    if draft.follows_target:
        has_layers = any(name.startswith("Gemma4") and name != _TEXT_ONLY_GEMMA4 for name in draft.target_classes)
        return _Reason(
            "the target scales its embeddings or caps its logits (Gemma), and engines do neither for Qwen3 or Llama "
            "draft layers.",
            "train with algorithm.draft_layers=target, which vLLM serves" if has_layers else None,
        )
    if isinstance(draft.algorithm, Eagle3Config):
        return _eagle3_reason(draft, engine)
    return _block_reason(draft, engine)


def _target_reason(draft: Draft, engine: Format) -> _Reason | None:
    untapped = UNTAPPED.get((engine, "eagle3" if isinstance(draft.algorithm, Eagle3Config) else "block"), frozenset())
    found = [name for name in draft.target_classes if name in untapped]
    if not found:
        return None
    return _Reason(
        f"{engine} cannot hand layers of {found[0]} to a {draft.algorithm.name} draft, which then has nothing to read."
    )


def _gemma4_reason(draft: Draft, engine: Format) -> _Reason | None:
    if engine != "vllm" or isinstance(draft.algorithm, Eagle3Config):
        return _Reason("Gemma4 draft layers are read by vLLM's dspark only.")
    if not draft.keys_are_values:
        return _Reason("vLLM's Gemma4 drafts have keys that double as values; these have v_proj.")
    if _TEXT_ONLY_GEMMA4 in draft.target_classes:
        return _Reason(
            "vLLM calls the layers of a Gemma4 draft as it calls those of a text-only Gemma4 target, and stops "
            "(Duplicate layer name).",
            "export for the whole model, the one with vision, whose layers have other names",
        )
    if draft.is_reduced:
        return _Reason("vLLM's Gemma4 drafts have the whole vocabulary.", f"train with {_WHOLE_VOCABULARY}")
    if draft.kind == "dflash_fill_in":
        return _Reason(f"{engine} has no Gemma4 layers for DFlash.", "train with algorithm.layout=anchor_first")
    return _markov_reason(draft, engine)


def _block_reason(draft: Draft, engine: Format) -> _Reason | None:
    if draft.model_type != "qwen3":
        return _Reason(
            f"no engine reads block drafts with {draft.model_type} layers.",
            "train with algorithm.draft_layers=qwen3 algorithm.init=random algorithm.init_layers=null",
        )
    if draft.is_reduced and engine in ("zlab", "specforge", "sglang"):
        return _Reason(
            f"{engine} drafts use the target's own head, hence the whole vocabulary.", f"train with {_WHOLE_VOCABULARY}"
        )
    if engine == "zlab" and draft.kind == "dspark":
        return _Reason("z-lab's format has no Markov or confidence head.")
    if engine == "zlab" and draft.kind == "dflash_anchor_first":
        return _Reason(
            "z-lab's readers take slot 0 of a block for the known anchor (layout fill_in), but this draft predicts "
            "from it (anchor_first): acceptance would fall to about 1. Others serve it as a DSpark with an empty head.",
            "train with algorithm.layout=fill_in",
        )
    return _markov_reason(draft, engine)


def _markov_reason(draft: Draft, engine: Format) -> _Reason | None:
    head = draft.algorithm.markov_head if isinstance(draft.algorithm, DSparkConfig) else "vanilla"
    rank = draft.algorithm.markov_rank if isinstance(draft.algorithm, DSparkConfig) else 0
    if engine == "vllm" and rank and head != "vanilla":
        return _Reason(
            f"vLLM's dspark has the vanilla Markov head only, this draft the {head} one.",
            "train with algorithm.markov_head=vanilla",
        )
    return None


def _eagle3_reason(draft: Draft, engine: Format) -> _Reason | None:
    if engine == "zlab":
        return _Reason("z-lab's format holds DFlash only.")
    if engine in ("sglang", "specforge") and draft.model_type != "llama":
        return _Reason(
            f"{engine}'s Eagle3 has Llama layers, and SGLang would drop this draft's q/k norms without a word.",
            "train on a Llama target with algorithm.draft_layers=target",
        )
    if engine == "specforge" and draft.num_taps != SPECFORGE_TAPS:
        return _Reason(
            f"SpecForge's Eagle3 reads {SPECFORGE_TAPS} tapped layers, this draft {draft.num_taps}.",
            "train with three target.layers",
        )
    if engine in ("sglang", "specforge") and _norms_residual(draft):
        return _Reason(f"{engine}'s Eagle3 has no norm_before_residual.")
    return None


def _norms_residual(draft: Draft) -> bool:
    return isinstance(draft.algorithm, Eagle3Config) and draft.algorithm.norm_before_residual
