"""A tiny random target that chats: an ASCII tokenizer with a ChatML template, in memory or saved as a user has it."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers import STOP_TOKEN, tiny_config
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from deepspec.attention import GROUPED_SDPA
from deepspec.config import DataConfig, TargetConfig
from deepspec.targets.base import Target

CHATML = r"""
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
SPECIAL_TOKENS = ("<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<mask>")
# The printable ASCII characters, and a space and a newline as byte-level vocabularies spell them.
VOCABULARY = (*SPECIAL_TOKENS, *map(chr, range(33, 127)), chr(0x120), chr(0x10A))
MASK_TOKEN = SPECIAL_TOKENS.index("<mask>")
LAYERS = (0, 1, 3)
MODEL = "tiny-chat"
CONFIG = TargetConfig(name_or_path=MODEL, dtype="float32", attention="sdpa", enable_thinking=False, short_name="tiny")
READING = DataConfig(
    answers="unused",
    max_length=400,
    num_anchors=1,
    min_answer_tokens=1,
    bucket_steps=1,
    on_bad_row="stop",
    allow_other_target=False,
)
"""How tests read the answers of a target that chats."""


def ascii_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; <|im_end|> is the stop token of `tiny_config`."""
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(VOCABULARY)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == STOP_TOKEN
    return tokenizer


def _model(seed: int, hidden_size: int, dtype: torch.dtype) -> torch.nn.Module:
    config = tiny_config("qwen3", vocab_size=len(VOCABULARY))
    config.hidden_size = hidden_size
    config._attn_implementation = GROUPED_SDPA
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        # Evenly random weights would let one answer in a hundred end within a few dozen tokens.
        model.lm_head.weight[STOP_TOKEN] *= 1.8
    return model.to(dtype)


def chat_target(dtype: torch.dtype = torch.float64, *, name: str = MODEL, seed: int = 11) -> Target:
    """The target in memory."""
    return Target(
        _model(seed, 32, dtype),
        ascii_tokenizer(),
        name=name,
        layer_ids=LAYERS,
        mask_token_id=MASK_TOKEN,
        stop_token_ids=(STOP_TOKEN,),
    )


def save_chat_target(folder: Path, *, seed: int = 11, hidden_size: int = 32) -> Path:
    """The target as a folder."""
    _model(seed, hidden_size, torch.float32).save_pretrained(folder)
    ascii_tokenizer().save_pretrained(folder)
    return folder


def target_overrides(folder: Path) -> list[str]:
    """Command-line words that choose a saved target."""
    return [
        "target=auto",
        f"target.name_or_path={folder}",
        "target.dtype=float32",
        f"target.layers=[{','.join(map(str, LAYERS))}]",
        f"target.mask_token_id={MASK_TOKEN}",
    ]
