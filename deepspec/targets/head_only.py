"""A target without its layers: embedding, head and tokenizer, for trainings whose features were written before.

Of a checkpoint only the vocabulary weights and one layer are read, so that a target that fits no device can teach.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from deepspec.config import TargetConfig
from deepspec.errors import TargetError
from deepspec.targets.base import Target, check_layer_ids, default_layer_ids
from deepspec.targets.loading import load_model, read_model_config, source_of, stop_tokens


def load_head_only(config: TargetConfig, device: torch.device) -> Target:
    """Load what a draft shares with its target; `features` and `layer` of the result cannot be used.

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
    target = Target(
        model,
        tokenizer,
        name=config.name_or_path,
        layer_ids=(-1,),
        mask_token_id=config.mask_token_id,
        stop_token_ids=stop_tokens(source_of(config), config.revision, whole, tokenizer),
    )
    # The draft is made for the whole target.
    target.config, target.num_layers, target.layer_ids = text, text.num_hidden_layers, taps
    return target


def _with_one_layer(whole: Any) -> Any:
    """The config of the same model with its first layer alone: a decoder without any cannot be made."""
    cut = copy.deepcopy(whole)
    text = cut.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    text.num_hidden_layers = 1
    return cut
