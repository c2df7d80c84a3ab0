"""A target without its layers: embedding, head and tokenizer, for trainings whose features were written before.

Of a checkpoint only the vocabulary weights and one layer are read, so that a target that fits no device can teach, and
further layers one by one where a draft starts from copies of them.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from collections.abc import Set as Names
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from deepspec.config import TargetConfig
from deepspec.errors import TargetError
from deepspec.targets.base import Target, check_layer_ids, default_layer_ids
from deepspec.targets.loading import load_model, read_model_config, source_of, stop_tokens


def load_head_only(config: TargetConfig, device: torch.device) -> Target:
    """Load what a draft shares with its target; `features` of the result cannot be used.

    `layer` of the result reads that layer from the checkpoint and keeps nothing of it.

    Args:
        config: what to load; `config.layers` are the taps of the features that will be read.
        device: where to put it.

    Raises:
        TargetError: the checkpoint cannot be found, or is not a plain decoder.
        ConfigError: taps or mask token do not fit the model.
    """
    try:
        whole = read_model_config(config)
        # It would list every weight that is left out.
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            model = load_model(config, _with_one_layer(whole), device)
        finally:
            transformers_logging.set_verbosity(verbosity)
        tokenizer = Target.load_tokenizer(config)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TargetError(
            f"the head of target '{config.name_or_path}' cannot be loaded: {' '.join(str(error).split())[:200]}. Give "
            "a folder or a hub id that this machine can reach in target.name_or_path."
        ) from error
    text: Any = whole.get_text_config()
    taps = config.layers or default_layer_ids(text.num_hidden_layers)
    check_layer_ids(taps, text.num_hidden_layers, config.name_or_path)
    target = _HeadOnly(
        model,
        tokenizer,
        name=config.name_or_path,
        layer_ids=(-1,),
        mask_token_id=config.mask_token_id,
        stop_token_ids=stop_tokens(source_of(config), config.revision, whole, tokenizer),
    )
    # The draft is made for the whole target.
    target.config, target.num_layers, target.layer_ids = text, text.num_hidden_layers, taps
    target.read_layer = lambda index: _read_layer(config, whole, index).to(device, target.dtype)
    return target


class _HeadOnly(Target):
    """A target whose layers stay on the disk.

    Attributes:
        read_layer: reads one.
    """

    read_layer: Callable[[int], torch.nn.Module]

    def layer(self, index: int) -> torch.nn.Module:
        """Decoder layer `index`, read anew each time.

        Raises:
            TargetError: it cannot be read.
        """
        return self.read_layer(index)


def _with_one_layer(whole: PreTrainedConfig) -> Any:
    """The config of the same model with its first layer alone: a decoder without any cannot be made."""
    cut: Any = copy.deepcopy(whole)
    text = cut.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    text.num_hidden_layers = 1
    return cut


def _read_layer(config: TargetConfig, whole: PreTrainedConfig, index: int) -> torch.nn.Module:
    """A layer with the weights that the checkpoint holds of it.

    Raises:
        TargetError: they cannot be read, or have other names there.
    """
    kind: Any = AutoModelForCausalLM
    with torch.device("meta"):
        # All layers, which take no memory here: a family may decide by the index what a layer is.
        layer: torch.nn.Module = kind.from_config(copy.deepcopy(whole.get_text_config())).get_decoder().layers[index]
    try:
        weights = _stored_layer(config, index, layer.state_dict().keys())
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise TargetError(
            f"layer {index} of target '{config.name_or_path}' cannot be read from its safetensors: "
            f"{' '.join(str(error).split())[:200]} Set algorithm.init=random, or features=online."
        ) from error
    layer.load_state_dict(weights, assign=True)
    return layer


def _stored_layer(config: TargetConfig, index: int, names: Names[str]) -> dict[str, Tensor]:
    """The tensors of a layer by their names inside it, found in whichever files of the checkpoint hold them."""

    def path_of(file: str) -> str | None:
        found: str | None = cached_file(
            str(source_of(config)), file, revision=config.revision, _raise_exceptions_for_missing_entries=False
        )
        return found

    listing = path_of(SAFE_WEIGHTS_INDEX_NAME)
    if listing is not None:
        file_of: dict[str, str] = json.loads(Path(listing).read_text(encoding="utf-8"))["weight_map"]
    else:
        with safe_open(path_of(SAFE_WEIGHTS_NAME) or "model.safetensors", framework="pt") as file:
            file_of = dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
    # A vision tower may have layers of its own.
    towers: dict[str, dict[str, str]] = {}
    for stored in file_of:
        match = re.fullmatch(rf"((?:.*\.)?layers)\.{index}\.(.+)", stored)
        if match is not None:
            towers.setdefault(match[1], {})[match[2]] = stored
    fitting = [tower for tower in towers.values() if names <= tower.keys()]
    if len(fitting) != 1:
        raise ValueError(f"it holds no weights {', '.join(sorted(names)[:3])}, ... of one layer {index}.")
    tensors = {}
    for name in names:
        stored = fitting[0][name]
        with safe_open(path_of(file_of[stored]) or file_of[stored], framework="pt") as file:
            tensors[name] = file.get_tensor(stored)
    return tensors
