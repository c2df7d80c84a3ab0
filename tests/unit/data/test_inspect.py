"""A shown sample names its counts, colours what is supervised and hides nothing."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deepspec.data.chat import TokenSample
from deepspec.data.inspect import (
    CONTEXT_STYLE,
    SPECIAL_STYLE,
    SUPERVISED_SPECIAL_STYLE,
    SUPERVISED_STYLE,
    render_sample,
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZER = byte_tokenizer()


def sample_of(prompt: str, answer: str) -> TokenSample:
    ids = [TOKENIZER(text)["input_ids"] for text in (prompt, answer)]
    return TokenSample("s1", ids[0] + ids[1], [False] * len(ids[0]) + [True] * len(ids[1]))


def styled_body(sample: TokenSample) -> list[tuple[str, str]]:
    text = render_sample(TOKENIZER, sample)
    legend_end = text.plain.index("\n") + 1
    return [(text.plain[s.start : s.end], str(s.style)) for s in text.spans if s.start >= legend_end]


def joined(parts: list[tuple[str, str]], style: str) -> str:
    return "".join(text for text, own in parts if own == style)


def test_the_first_line_gives_the_id_and_the_counts_and_explains_the_colours() -> None:
    legend = render_sample(TOKENIZER, sample_of("abc", "d<|im_end|>")).plain.splitlines()[0]
    assert legend.startswith("s1: 5 tokens, 2 supervised (40%)")
    assert legend.endswith("supervised  supervised special token  special token  context")


def test_supervised_and_special_tokens_have_their_own_styles() -> None:
    parts = styled_body(sample_of("ab<|im_end|>", "cd<|im_end|>"))
    assert joined(parts, CONTEXT_STYLE) == "ab"
    assert joined(parts, SPECIAL_STYLE) == "<|im_end|>"
    assert joined(parts, SUPERVISED_STYLE) == "cd"
    assert joined(parts, SUPERVISED_SPECIAL_STYLE) == "<|im_end|>"


def test_newlines_are_visible_and_other_control_characters_cannot_reach_the_terminal() -> None:
    assert joined(styled_body(sample_of("x", "a\n\tb\x1b[2J [bold]")), SUPERVISED_STYLE) == "a\\n\n\\tb\\x1b[2J [bold]"


def test_a_part_of_a_character_is_shown_in_the_spelling_of_the_vocabulary() -> None:
    sample = sample_of("x", "\u00e9")
    spelled = "".join(TOKENIZER.convert_ids_to_tokens(sample.input_ids[1:]))
    assert joined(styled_body(sample), SUPERVISED_STYLE) == spelled
    assert len(spelled) == 2


def test_an_id_outside_the_vocabulary_is_shown_as_a_number() -> None:
    for token in (len(TOKENIZER), 2**40, 10**40):
        sample = TokenSample("s1", [*TOKENIZER("a")["input_ids"], token], [False, True])
        assert styled_body(sample)[-1] == (f"<no token {token}>", SUPERVISED_STYLE)
