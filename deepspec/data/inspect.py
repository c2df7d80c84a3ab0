"""Show a token sample as coloured text, so that a person can check which tokens are supervised.

This module knows tokens and masks; where the text is printed, and which samples are shown, is the caller's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from deepspec.data.chat import TokenSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUPERVISED_STYLE = "black on green"
SUPERVISED_SPECIAL_STYLE = "bold black on bright_green"
SPECIAL_STYLE = "bold magenta"
CONTEXT_STYLE = "dim"

_REPLACEMENT_CHARACTER = chr(0xFFFD)
_SENTENCEPIECE_SPACE = chr(0x2581)


def render_sample(tokenizer: PreTrainedTokenizerBase, sample: TokenSample) -> Text:
    r"""Render a sample with its supervised tokens coloured, under a line with its counts and what the colours mean.

    Special tokens are written out, newlines are written as "\n" and break the line, other control characters are
    escaped, ids that the tokenizer does not have are written as numbers, and a token that is only a part of a
    character is written in the vocabulary's own spelling.
    """
    text = Text()
    num_tokens, num_supervised = len(sample.input_ids), sum(sample.answer_mask)
    text.append(
        f"{sample.id}: {num_tokens} tokens, {num_supervised} supervised ({num_supervised / max(1, num_tokens):.0%})"
    )
    for label, style in (
        ("supervised", SUPERVISED_STYLE),
        ("supervised special token", SUPERVISED_SPECIAL_STYLE),
        ("special token", SPECIAL_STYLE),
        ("context", CONTEXT_STYLE),
    ):
        text.append("  ")
        text.append(label, style=style)
    text.append("\n")
    special = tokenizer.added_tokens_decoder
    for token, is_supervised in zip(sample.input_ids, sample.answer_mask, strict=True):
        if token in special:
            style = SUPERVISED_SPECIAL_STYLE if is_supervised else SPECIAL_STYLE
        else:
            style = SUPERVISED_STYLE if is_supervised else CONTEXT_STYLE
        text.append(_visible(_token_text(tokenizer, token)), style=style)
    return text


def _token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    if token >= len(tokenizer):
        return f"<no token {token}>"
    decoded = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if not decoded or _REPLACEMENT_CHARACTER in decoded:
        return piece
    # Some decoders drop the space in front of a text, which here would join two words.
    return " " + decoded if piece.startswith(_SENTENCEPIECE_SPACE) and not decoded.startswith(" ") else decoded


def _visible(text: str) -> str:
    return "".join(
        "\\n\n" if char == "\n" else char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
