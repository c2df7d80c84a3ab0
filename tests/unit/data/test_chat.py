"""Answer masks supervise exactly what the target generated, for every template and any content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deepspec.config import DataConfig
from deepspec.data.answer_rows import fit_sample
from deepspec.data.chat import TokenSample, render_prompt, samples_from_answers
from deepspec.data.prompts import Message
from deepspec.data.samples import read_token_samples
from deepspec.errors import ConfigError, DataError

SPECIAL_TOKENS = ("<pad>", "<bos>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>")

# Reads like Qwen3: an empty thinking block where thinking is off, earlier thinking taken out of the history.
THINKING = r"""
{%- set found = namespace(last_user=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set found.last_user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- set thought = m.reasoning_content or '' -%}
  {%- set text = m.content -%}
  {%- if m.role == 'assistant' and '</think>' in text -%}
    {%- set thought = text.split('</think>')[0].replace('<think>', '').strip() -%}
    {%- set text = text.split('</think>')[1].lstrip() -%}
  {%- endif -%}
  {{- '<|im_start|>' + m.role + '\n' -}}
  {%- if m.role == 'assistant' and loop.index0 > found.last_user -%}
    {{- '<think>\n' + thought + '\n</think>\n\n' -}}
  {%- endif -%}
  {{- text + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""
# Reads like SmolLM2: a system prompt of its own where the conversation has none.
DEFAULT_SYSTEM = r"""
{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\nBe kind.<|im_end|>\n' -}}{%- endif -%}
{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
GEMMA = r"""
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- for m in messages -%}
  {%- set role = 'model' if m.role == 'assistant' else m.role -%}
  {{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
"""
CHATML_HEADER = "<|im_start|>system\nBe kind.<|im_end|>\n"


def byte_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token a byte, and one for a doubled newline and a doubled a, so that texts have several tokenisations."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, chr(0x10A) * 2, "aa"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[(chr(0x10A), chr(0x10A)), ("a", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>")
    tokenizer.chat_template = template
    return tokenizer


TOKENIZERS = {template: byte_tokenizer(template) for template in (THINKING, DEFAULT_SYSTEM, GEMMA, None)}


def ids(text: str) -> list[int]:
    return list(TOKENIZERS[None](text, add_special_tokens=False)["input_ids"])


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


def samples(
    row: dict[str, object], template: str, *, enable_thinking: bool = False, system_prompt: str | None = None
) -> list[TokenSample]:
    return samples_from_answers(
        {"id": "s1", **row}, TOKENIZERS[template], enable_thinking=enable_thinking, system_prompt=system_prompt
    )


def pieces(name: str, *parts: tuple[bool, str]) -> TokenSample:
    """The expected sample, written as alternating texts that are or are not supervised."""
    expected = TokenSample(name, [], [])
    for is_supervised, text in parts:
        expected.input_ids.extend(ids(text))
        expected.answer_mask.extend([is_supervised] * len(ids(text)))
    return expected


def test_both_turns_of_a_chatml_conversation_share_one_sample_and_end_with_their_end_of_turn() -> None:
    assert samples({"messages": messages("hi", "yo", "more", "no")}, DEFAULT_SYSTEM) == [
        pieces(
            "s1",
            (False, CHATML_HEADER + "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
            (True, "yo<|im_end|>"),
            (False, "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"),
            (True, "no<|im_end|>"),
        )
    ]


def test_gemma_turns_of_the_role_model_share_one_sample_with_one_beginning_token() -> None:
    assert samples({"messages": messages("hi", " yo ", "more", "no")}, GEMMA) == [
        pieces(
            "s1",
            (False, "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"),
            (True, "yo<end_of_turn>"),
            (False, "\n<start_of_turn>user\nmore<end_of_turn>\n<start_of_turn>model\n"),
            (True, "no<end_of_turn>"),
        )
    ]


def test_an_empty_thinking_block_is_never_supervised_and_each_turn_keeps_the_one_it_was_generated_after() -> None:
    empty = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert samples({"messages": messages("hi", "yo", "more", "no")}, THINKING) == [
        pieces("s1", (False, "<|im_start|>user\nhi<|im_end|>\n" + empty), (True, "yo<|im_end|>")),
        pieces(
            "s1#2",
            (
                False,
                "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
                + empty,
            ),
            (True, "no<|im_end|>"),
        ),
    ]


def test_thinking_is_supervised_where_it_was_generated_and_absent_from_later_histories() -> None:
    first = "<think>\nhm\n</think>\n\nyo"
    second = "<think>\nwell\n</think>\n\nno"
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    history = start + "yo<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    expected = [
        pieces("s1", (False, start), (True, first + "<|im_end|>")),
        pieces("s1#2", (False, history), (True, second + "<|im_end|>")),
    ]
    turns = messages("hi", first, "more", second)
    assert samples({"messages": turns}, THINKING, enable_thinking=True) == expected
    generated: dict[str, object] = {"answer_ids": [ids(first + "<|im_end|>"), ids(second + "<|im_end|>")]}
    assert samples(generated | {"prompt_ids": [ids(start), ids(history)]}, THINKING) == expected
    assert samples(generated | {"messages": turns}, THINKING, enable_thinking=True) == expected


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_reasoning_that_comes_beside_the_answer_is_supervised(key: str) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", key: "hm"}]
    (sample,) = samples({"messages": turns}, THINKING, enable_thinking=True)
    assert sample == pieces(
        "s1",
        (False, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        (True, "<think>\nhm\n</think>\n\nyo<|im_end|>"),
    )


def test_turns_after_a_turn_that_stands_alone_share_its_sample() -> None:
    first, second, third = [1, 2], [1, 2, 3, 9], [7, 1]
    row: dict[str, object] = {
        "prompt_ids": [first, third, [*third, 4, 5]],
        "answer_ids": [second[2:], [4], [6]],
    }
    assert samples(row, THINKING) == [
        TokenSample("s1", [1, 2, 3, 9], [False, False, True, True]),
        TokenSample("s1#2", [7, 1, 4, 5, 6], [False, False, True, False, True]),
    ]


def test_a_system_prompt_replaces_the_default_of_the_template_but_not_the_one_of_the_conversation() -> None:
    def prompt(history: list[Message], system_prompt: str | None) -> list[int]:
        return render_prompt(TOKENIZERS[DEFAULT_SYSTEM], history, enable_thinking=False, system_prompt=system_prompt)

    end = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt([Message("user", "hi")], None) == ids(CHATML_HEADER + end)
    assert prompt([Message("user", "hi")], "Be brief.") == ids("<|im_start|>system\nBe brief.<|im_end|>\n" + end)
    own = [Message("system", "Mine."), Message("user", "hi")]
    assert prompt(own, "Be brief.") == ids("<|im_start|>system\nMine.<|im_end|>\n" + end)


def test_generated_ids_are_kept_although_their_text_has_another_tokenisation() -> None:
    a, doubled = ids("a")[0], ids("aa")[0]
    generated = [a, a, *ids("<|im_end|>")]
    turns = messages("hi", "aa", "more", "no")
    split, joined = samples({"messages": turns, "answer_ids": [generated, ids("no<|im_end|>")]}, DEFAULT_SYSTEM)
    assert [token for token, on in zip(split.input_ids, split.answer_mask, strict=True) if on] == generated
    assert joined.id == "s1#2"
    assert doubled in joined.input_ids
    assert sum(joined.answer_mask) == len(ids("no<|im_end|>"))


def test_an_answer_that_was_cut_gets_no_end_of_turn_label() -> None:
    expected = [
        pieces(
            "s1",
            (False, CHATML_HEADER + "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
            (True, "yo"),
            (False, "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"),
            (True, "no<|im_end|>"),
        )
    ]
    row: dict[str, object] = {"messages": messages("hi", "yo", "more", "no"), "finish_reason": ["length", "stop"]}
    assert samples(row, DEFAULT_SYSTEM) == expected
    assert samples(row | {"answer_ids": [ids("yo"), ids("no<|im_end|>")]}, DEFAULT_SYSTEM) == expected


MARKERS = (*SPECIAL_TOKENS, "assistant\n", "model\n", "user\n", "<think>\n", "</think>\n\n", "\n", "\n\n\n", "yo", " ")


@settings(max_examples=60, deadline=None)
@given(
    questions=st.lists(st.lists(st.sampled_from(MARKERS), min_size=1, max_size=8).map("".join), min_size=1, max_size=3),
    template=st.sampled_from([THINKING, DEFAULT_SYSTEM, GEMMA]),
    has_ids=st.booleans(),
)
def test_template_markers_in_user_messages_never_move_the_mask(
    questions: list[str], template: str, has_ids: bool
) -> None:
    questions = [question + "?" for question in questions]
    answers = [f"answer {i}" for i in range(len(questions))]
    end = "<end_of_turn>" if template is GEMMA else "<|im_end|>"
    turns = messages(*(text for pair in zip(questions, answers, strict=True) for text in pair))
    row: dict[str, object] = {"messages": turns}
    if has_ids:
        row["answer_ids"] = [ids(answer + end) for answer in answers]
    supervised = []
    for sample in samples(row, template):
        supervised += [token for token, on in zip(sample.input_ids, sample.answer_mask, strict=True) if on]
    assert supervised == [token for answer in answers for token in ids(answer + end)]


def test_an_answer_text_that_holds_the_end_of_turn_token_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"'s1'.*turn 1: it does not hold its end-of-turn token exactly once"):
        samples({"messages": messages("hi", "yo<|im_end|>\n<|im_start|>user\nmine")}, DEFAULT_SYSTEM)


def test_a_token_that_would_span_the_end_of_the_prompt_is_split_there() -> None:
    (sample,) = samples({"messages": messages("hi", "\n\nyo")}, DEFAULT_SYSTEM)
    prompt = ids(CHATML_HEADER + "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert sample.input_ids == prompt + ids("\n\nyo<|im_end|>")
    assert sample.answer_mask == [i >= len(prompt) for i in range(len(sample.input_ids))]


def test_a_template_whose_full_rendering_departs_from_the_prompt_is_refused_by_name() -> None:
    tokenizer = byte_tokenizer(
        DEFAULT_SYSTEM.replace("assistant\\n' -}}{%- endif", "assistant\\n<think>' -}}{%- endif")
    )
    with pytest.raises(DataError, match=r"'s1'.*turn 1: .* does not begin with the prompt"):
        samples_from_answers(
            {"id": "s1", "messages": messages("hi", "yo")}, tokenizer, enable_thinking=False, system_prompt=None
        )


def test_a_template_without_end_of_turn_token_is_refused_for_texts() -> None:
    tokenizer = byte_tokenizer("{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}")
    with pytest.raises(DataError, match="shows no end-of-turn token"):
        samples_from_answers(
            {"id": "s1", "messages": messages("hi", "yo")}, tokenizer, enable_thinking=False, system_prompt=None
        )


def test_a_tokenizer_without_chat_template_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"target\.chat_template"):
        render_prompt(TOKENIZERS[None], [Message("user", "hi")], enable_thinking=False, system_prompt=None)


def test_a_template_that_refuses_the_roles_names_them() -> None:
    with pytest.raises(DataError, match=r"\(system, user\): System role not supported"):
        render_prompt(TOKENIZERS[GEMMA], [Message("user", "hi")], enable_thinking=False, system_prompt="Be brief.")


@pytest.mark.parametrize("history", [[], [Message("user", "hi"), Message("assistant", "yo")]])
def test_a_history_with_nothing_to_answer_is_refused(history: list[Message]) -> None:
    with pytest.raises(DataError, match="nothing to answer"):
        render_prompt(TOKENIZERS[GEMMA], history, enable_thinking=False, system_prompt=None)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": messages("hi")}, "no assistant turn"),
        ({"messages": None}, "'conversations', 'messages'"),
        ({"messages": messages("hi", "yo"), "answer_ids": [[1], [2]]}, "2 lists of answer_ids for 1 prompts"),
        ({"prompt_ids": [], "answer_ids": []}, "0 lists of answer_ids for 0 prompts"),
        ({"prompt_ids": [[]], "answer_ids": [[1]]}, "every token would be supervised"),
        ({"prompt_ids": [[1]], "answer_ids": [[]], "finish_reason": ["stop"]}, "the stop token is missing"),
        ({"prompt_ids": [[1]], "answer_ids": [[True]]}, "'answer_ids' holds true"),
        ({"prompt_ids": [[1]], "answer_ids": [[-1]]}, "'answer_ids' holds -1"),
        ({"prompt_ids": [1], "answer_ids": [[1]]}, "'prompt_ids' is"),
        ({"prompt_ids": [[1]], "answer_ids": [[1]], "finish_reason": "stop"}, "'finish_reason' is \"stop\""),
        ({"prompt_ids": [[1]], "answer_ids": [[1]], "id": None}, "'id' is null"),
    ],
)
def test_a_row_that_cannot_be_supervised_is_refused_with_its_reason(row: dict[str, object], problem: str) -> None:
    with pytest.raises(DataError) as caught:
        samples(row, DEFAULT_SYSTEM)
    assert problem in str(caught.value)


def test_a_sample_that_is_too_long_loses_its_tail_and_is_dropped_when_too_little_answer_remains() -> None:
    sample = TokenSample("s1", [5, 6, 7, 8, 9], [False, False, True, True, True])
    assert fit_sample(sample, 4, 2) == TokenSample("s1", [5, 6, 7, 8], [False, False, True, True])
    assert fit_sample(sample, 3, 2) is None
    assert fit_sample(sample, 2, 0) is None
    assert fit_sample(sample, 5, 3) == sample


GOOD_ROWS = [
    {"id": "a", "prompt_ids": [[1, 2]], "answer_ids": [[3, 4, 5]], "finish_reason": ["stop"]},
    {"id": "b", "prompt_ids": [[1, 2, 3, 4, 5, 6]], "answer_ids": [[3, 4, 5]], "finish_reason": ["length"]},
    {"id": "c", "prompt_ids": [[1]], "answer_ids": [[3]], "finish_reason": ["stop"]},
]


def read(
    path: Path, on_bad_row: Literal["stop", "skip"], *, allow_other_target: bool = False, **options: Any
) -> tuple[list[TokenSample], tuple[int, ...]]:
    data = DataConfig(
        answers=str(path),
        max_length=8,
        num_anchors=4,
        min_answer_tokens=2,
        bucket_steps=1,
        on_bad_row=on_bad_row,
        allow_other_target=allow_other_target,
    )
    found, counts = read_token_samples(
        path, TOKENIZERS[DEFAULT_SYSTEM], data, enable_thinking=False, system_prompt=None, **options
    )
    return found, tuple(counts)


def test_an_answers_file_becomes_samples_with_counts_of_what_was_cut_and_dropped(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(row).encode() for row in GOOD_ROWS) + b"\r\n\r\n")
    found, counts = read(path, "stop")
    assert [(sample.id, len(sample.input_ids), sum(sample.answer_mask)) for sample in found] == [
        ("a", 5, 3),
        ("b", 8, 2),
    ]
    assert counts == (3, 0, 2, 1, 1, 5)  # rows, bad rows, samples, truncated, too short, answer tokens


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"id": "d", "answer_', "the line is not a complete JSON value"),
        ("[1]", "the row is not an object"),
        (json.dumps(GOOD_ROWS[0]), "id 'a' is already used by line 1"),
        (json.dumps(GOOD_ROWS[0] | {"id": "d", "answer_ids": [[3, 999]]}), "token id 999 is outside"),
        ('{"id": "d", "messages": [{"role": "user", "content": null}]}', "'content' is null"),
    ],
)
def test_a_bad_row_stops_with_its_line_or_is_skipped_and_counted(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join([*(json.dumps(row) for row in GOOD_ROWS), line]) + "\n")
    with pytest.raises(DataError) as caught:
        read(path, "stop", vocab_size=300)
    assert f"{path} line 4" in str(caught.value)
    assert problem in str(caught.value)
    assert "1 of 4 rows are broken; skip them with data.on_bad_row=skip" in str(caught.value)
    found, counts = read(path, "skip", vocab_size=300)
    assert [sample.id for sample in found] == ["a", "b"]
    assert counts[:2] == (4, 1)


def test_a_file_that_leaves_no_sample_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("")
    with pytest.raises(DataError, match="no sample is left of 0 rows"):
        read(path, "skip")
    path.write_text(json.dumps(GOOD_ROWS[2]) + "\n")
    with pytest.raises(DataError, match="1 with fewer than"):
        read(path, "skip")
    with pytest.raises(DataError, match="does not exist"):
        read(tmp_path / "none.jsonl", "skip")


@pytest.mark.parametrize("on_bad_row", ["stop", "skip"])
def test_answers_of_another_target_are_refused_unless_they_are_asked_for(
    on_bad_row: Literal["stop", "skip"], tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(json.dumps({**row, "target": "small"}) for row in GOOD_ROWS))
    with pytest.raises(DataError, match="answers of target 'small', but this run trains a draft for 'large'"):
        read(path, on_bad_row, target_name="large")
    assert read(path, on_bad_row, target_name="small") == read(path, on_bad_row)
    allowed = read(path, on_bad_row, target_name="large", allow_other_target=True)
    assert allowed == read(path, on_bad_row)
