"""A frozen target model behind one interface: features for training, cached forwards for decoding, head and tokens.

Any decoder-only transformers model with full, sliding-window or linear attention works, also as the text part of a
vision-language model. The class knows neither drafts nor losses.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from deepspec.attention import GROUPED_SDPA, Packing
from deepspec.config import TargetConfig
from deepspec.decoding.kv_cache import RaggedCache
from deepspec.errors import ConfigError, TargetError
from deepspec.targets.head import FrozenHead
from deepspec.targets.loading import load_model, read_model_config, source_of, stop_tokens, text_body

# A layer whose logits or embeddings differ more than rounding does is of a family with factors that we do not know.
_TOLERANCE = 0.05


def default_layer_ids(num_layers: int, num_taps: int = 5) -> tuple[int, ...]:
    """Tapped layers spread over a target: round(1 + i * (N - 4) / (M - 1)), half to even.

    Args:
        num_layers: N, decoder layers of the target.
        num_taps: M.

    Raises:
        ConfigError: the rule has no answer for one tap or for fewer than M + 3 layers.
    """
    if num_taps < 2 or num_layers < num_taps + 3:
        raise ConfigError(
            f"target.layers is not set, and the default rule needs at least {num_taps + 3} layers for {num_taps} taps; "
            f"this target has {num_layers}. Set target.layers, for example target.layers=[0,{max(num_layers - 2, 1)}]."
        )
    return tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))


def check_layer_ids(layer_ids: Sequence[int], num_layers: int, name: str) -> tuple[int, ...]:
    """Refuse taps that no engine can capture or that are out of order.

    Raises:
        ConfigError: naming the layer.
    """
    ids = tuple(layer_ids)
    allowed = f"Use -1..{num_layers - 2}, strictly increasing."
    if not ids:
        raise ConfigError(f"target.layers is empty. {allowed}")
    for layer in ids:
        if layer == num_layers - 1:
            raise ConfigError(
                f"target.layers {list(ids)}: layer {layer} is the last layer of {name}; engines cannot capture it. "
                f"{allowed}"
            )
        if not -1 <= layer < num_layers:
            raise ConfigError(
                f"target.layers {list(ids)}: {name} has no layer {layer} (it has {num_layers}). {allowed}"
            )
    if any(second <= first for first, second in itertools.pairwise(ids)):
        raise ConfigError(f"target.layers {list(ids)} are not strictly increasing. {allowed}")
    return ids


class Target:
    """A frozen target.

    Attributes:
        config: the text part of the model's config.
        name: what the user called it.
        layer_ids: tapped layers (output of decoder layer i; -1 is the embedding output).
        head: vocabulary weights.
        mask_token_id: id that fills the unknown slots of a block, or None where nobody asked for one.
        stop_token_ids: ids that end an answer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        layer_ids: Sequence[int] | None = None,
        mask_token_id: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """Wrap a loaded causal language model; see `load` for the usual way in."""
        self.model = model.eval().requires_grad_(False)
        self.name = name
        self.config: PreTrainedConfig = model.config.get_text_config()
        self._body = text_body(model, name)
        self.num_layers = len(self._body.layers)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self._body.embed_tokens.weight.shape[0]
        self.mask_token_id = self._checked_mask_token(mask_token_id)
        self.stop_token_ids = tuple(sorted(set(stop_token_ids)))
        self._tokenizer = tokenizer
        self.head = FrozenHead(
            embedding=self._body.embed_tokens.weight.detach(),
            embedding_scale=float(getattr(self._body.embed_tokens, "scalar_embed_scale", 1.0)),
            weight=model.get_output_embeddings().weight.detach(),
            softcap=getattr(self.config, "final_logit_softcapping", None),
        )
        self._captured: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self.tap(default_layer_ids(self.num_layers) if layer_ids is None else layer_ids)
        self._layer_kinds = frozenset(getattr(self.config, "layer_types", None) or ())
        for index, layer in enumerate(self._body.layers):
            if hasattr(layer, "linear_attn"):
                hook = functools.partial(_continue_rows, index)
                layer.linear_attn.register_forward_pre_hook(hook, with_kwargs=True)

    @classmethod
    def load(cls, config: TargetConfig, device: torch.device, layer_ids: Sequence[int] | None = None) -> Target:
        """Load a target from a folder, a hub id, or the embedded model's name.

        Args:
            config: what to load; `config.layers` are the taps.
            device: where to put it.
            layer_ids: taps that override the config's (a draft checkpoint brings its own).

        Raises:
            TargetError: the model or its tokenizer cannot be found, or is not a plain decoder.
            ConfigError: taps or mask token do not fit the model.
        """
        source = source_of(config)
        wanted = layer_ids if layer_ids is not None else config.layers
        try:
            model_config = read_model_config(config)
            text = model_config.get_text_config()
            if wanted is not None:
                check_layer_ids(wanted, text.num_hidden_layers, config.name_or_path)
            transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            model = load_model(config, model_config, device)
            tokenizer = cls.load_tokenizer(config)
        except ImportError as error:
            raise TargetError(
                f"target '{config.name_or_path}' cannot be loaded: {_first_line(error)} Install that beside this "
                "project, or use a checkpoint that is not quantised."
            ) from error
        except (OSError, ValueError, KeyError) as error:
            raise TargetError(
                f"target '{config.name_or_path}' cannot be loaded: {_first_line(error)} "
                "Give a folder or a hub id that this machine can reach in target.name_or_path, or try "
                "target=smollm2_135m, which needs no network."
            ) from error
        target = cls(
            model,
            tokenizer,
            name=config.name_or_path,
            layer_ids=wanted,
            mask_token_id=config.mask_token_id,
            stop_token_ids=stop_tokens(source, config.revision, model_config, tokenizer),
        )
        target.check()
        return target

    @staticmethod
    def load_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
        """The target's tokenizer with the configured chat template, without the model.

        Raises:
            TargetError: it cannot be found.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(source_of(config), revision=config.revision)
            if config.chat_template is not None:
                tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError, KeyError) as error:
            raise TargetError(
                f"the tokenizer of '{config.name_or_path}' cannot be loaded: {_first_line(error)}"
            ) from error
        return tokenizer

    def check(self) -> None:
        """Compare embeddings and logits with the model's own over a few tokens.

        Raises:
            TargetError: the family scales or biases them in a way that drafts would not follow, or keeps several hidden
                states for each token.
        """
        ids = torch.arange(4, device=self.device)[None] % self.vocab_size
        taps = self.layer_ids
        self.tap((-1,))
        embedded_ids, last_hidden = self.features(ids)
        self.tap(taps)
        with torch.inference_mode():
            logits = self.model(input_ids=ids, use_cache=False).logits.float()
        self._captured.clear()
        for what, mine, theirs in (
            ("embeddings", self.head.embed(ids).float(), embedded_ids.float()),
            ("logits", self.logits(last_hidden).float(), logits),
        ):
            if theirs.isfinite().all() and not (mine - theirs).abs().max() <= _TOLERANCE * theirs.abs().max():
                raise TargetError(
                    f"target '{self.name}' ({self.config.model_type}) scales its {what} in a way that is not known "
                    f"here: largest {theirs.abs().max():.3g}, expected {mine.abs().max():.3g}. Use another target."
                )

    def tap(self, layer_ids: Sequence[int]) -> None:
        """Choose which layers' outputs become the features.

        Raises:
            ConfigError: a layer does not exist, is the last one, or the order is not ascending.
        """
        self.layer_ids = check_layer_ids(layer_ids, self.num_layers, self.name)
        for hook in self._hooks:
            hook.remove()
        self._captured.clear()
        self._hooks = [self._hook(layer) for layer in self.layer_ids]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            TargetError: this target was built without one.
        """
        if self._tokenizer is None:
            raise TargetError(f"target '{self.name}' has no tokenizer.")
        return self._tokenizer

    @property
    def device(self) -> torch.device:
        """Where the head lives."""
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.head.weight.dtype

    @property
    def context_length(self) -> int:
        """Longest sequence that the model's positions allow.

        Longrope rotates all rows of a batch by the longest. Past the original length a short request would depend on
        its neighbours, and keys in the cache would be of another rotation: such targets end there.
        """
        rope = getattr(self.config, "rope_parameters", None) or {}
        by_kind = [rope] if "rope_type" in rope else list(rope.values())
        limits = [one["original_max_position_embeddings"] for one in by_kind if one.get("rope_type") == "longrope"]
        return int(min([self.config.max_position_embeddings, *limits]))

    @property
    def packs(self) -> bool:
        """Whether tokens of several requests can be run side by side: attention layers only, and our own attention."""
        has_attention_only = set(self._layer_kinds) <= {"full_attention", "sliding_attention"}
        return has_attention_only and bool(self.config._attn_implementation == GROUPED_SDPA)

    def features(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Run over right-padded sequences; causal attention keeps padding out of the real positions.

        Args:
            input_ids: [B, L].

        Returns:
            Tapped features [B, L, M*H] and the last hidden states [B, L, H], as ordinary tensors.

        Raises:
            TargetError: there are more tokens than positions.
        """
        if input_ids.shape[1] > self.context_length:
            raise TargetError(
                f"a sequence of {input_ids.shape[1]:,} tokens is longer than the {self.context_length:,} positions of "
                f"{self.name}. Lower data.max_length."
            )
        with torch.inference_mode():
            last_hidden = self._body(input_ids=input_ids, use_cache=False).last_hidden_state
        return self._collect(last_hidden)

    def forward_cached(
        self, input_ids: Tensor, positions: Tensor, cache: RaggedCache, visible: int, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run new tokens of every row behind what the cache holds.

        Args:
            input_ids: [B, Q].
            positions: [B, Q] position of each, which is also its cache slot.
            cache: written at these positions.
            visible: upper bound of positions plus one, known to the caller without a device sync.
            packing: which of the B x Q tokens are real; only they are run. Needs `packs`.

        Returns:
            Features [B, Q, M*H] and last hidden states [B, Q, H]; [1, N, ...] where the tokens were packed.
        """
        ids, places, packed = input_ids, positions, {}
        if packing is None:
            cache.plan(positions, visible)
        else:
            ids, places, packed = packing.flat(ids)[None], packing.flat(positions)[None], {"packing": packing}
            cache.plan(places[0], visible, rows=packing.rows)
        slots = torch.arange(visible, device=positions.device)
        causal = (slots <= positions[..., None])[:, None]
        with torch.inference_mode():
            output = self._body(
                input_ids=ids,
                position_ids=places,
                attention_mask=self._mask_by_kind(causal, slots, positions),
                cache=cache,
                use_cache=True,
                **packed,
            )
        return self._collect(output.last_hidden_state)

    def layer(self, index: int) -> torch.nn.Module:
        """Decoder layer `index`, for drafts that start from a copy."""
        layer: torch.nn.Module = self._body.layers[index]
        return layer

    @property
    def final_norm(self) -> torch.nn.Module:
        """The norm before the head."""
        norm: torch.nn.Module = self._body.norm
        return norm

    def logits(self, last_hidden: Tensor) -> Tensor:
        """Next-token logits [..., V], fp32 and capped where the family caps."""
        return self.head.logits(last_hidden)

    def _mask_by_kind(self, causal: Tensor, slots: Tensor, positions: Tensor) -> Any:
        window = getattr(self.config, "sliding_window", None)
        near = causal
        if window is not None:
            near = causal & (slots > positions[..., None] - window)[:, None]
        if not self._layer_kinds:
            # Without kinds of layers a window is every layer's (Mistral, Phi3).
            return self._as_mask(near)
        masks: dict[str, Tensor | None] = {"full_attention": self._as_mask(causal)}
        if "sliding_attention" in self._layer_kinds:
            masks["sliding_attention"] = self._as_mask(near)
        if "linear_attention" in self._layer_kinds:
            masks["linear_attention"] = None
        return masks

    def _as_mask(self, is_visible: Tensor) -> Tensor:
        """Eager attention adds its mask to the scores, where True and False would be 1 and 0."""
        if self.config._attn_implementation != "eager":
            return is_visible
        added = torch.zeros(is_visible.shape, dtype=self.dtype, device=is_visible.device)
        return added.masked_fill_(~is_visible, torch.finfo(self.dtype).min)

    def _collect(self, last_hidden: Tensor) -> tuple[Tensor, Tensor]:
        # Outside inference mode on purpose: cat and clone give tensors that autograd may save.
        taps = [self._captured.pop(layer) for layer in self.layer_ids]
        if taps[0].dim() != last_hidden.dim():
            raise TargetError(
                f"target '{self.name}' ({self.config.model_type}) carries hidden states of shape "
                f"{tuple(taps[0].shape)} between its layers, several for each token. Drafts read one: use another "
                "target."
            )
        return torch.cat(taps, dim=-1), last_hidden.clone()

    def _hook(self, layer: int) -> Any:
        def capture_output(module: Any, arguments: Any, output: Any) -> None:
            self._captured[layer] = output[0] if isinstance(output, tuple) else output

        def capture_input(module: Any, arguments: tuple[Tensor, ...]) -> None:
            self._captured[layer] = arguments[0]

        if layer == -1:
            return self._body.layers[0].register_forward_pre_hook(capture_input)
        return self._body.layers[layer].register_forward_hook(capture_output)

    def _checked_mask_token(self, mask_token_id: int | None) -> int | None:
        if mask_token_id is not None and not 0 <= mask_token_id < self.vocab_size:
            raise ConfigError(
                f"target.mask_token_id {mask_token_id} has no embedding row: {self.name} has ids "
                f"0..{self.vocab_size - 1}. Use an id that the target never emits."
            )
        return mask_token_id


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _continue_rows(
    index: int, module: torch.nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a linear-attention layer runs on a ragged cache: hand it the states that its rows continue from."""
    cache = given.get("cache")
    if isinstance(cache, RaggedCache):
        given = given | {"cache": cache.recurrent_state(index, module, given["hidden_states"])}
    return arguments, given
