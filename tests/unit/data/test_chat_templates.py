"""Masks over what public templates wrote: exactly the generated tokens, whatever the template does around them."""

from __future__ import annotations

from typing import Any

import pytest
from recorded_templates import CONVERSATIONS, FAMILIES, MARKERS, Family, RecordedTokenizer, recorded_tokenizer

from deepspec.data.chat import TokenSample, render_prompt, samples_from_answers
from deepspec.data.chat_template import ChatTemplate
from deepspec.data.prompts import Message
from deepspec.errors import DataError

TOKENIZERS = {name: recorded_tokenizer(name) for name in FAMILIES}


def ids(tokenizer: RecordedTokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def recorded_prompts(tokenizer: RecordedTokenizer, turns: list[dict[str, str]], thinking: bool) -> list[list[int]]:
    messages = [Message(turn["role"], turn["content"], turn.get("reasoning_content")) for turn in turns]
    return [
        render_prompt(tokenizer, messages[:end], enable_thinking=thinking, system_prompt=None)
        for end, message in enumerate(messages)
        if message.role == "assistant"
    ]


def generated(family: Family, turn: dict[str, str]) -> str:
    """What the target generated for a turn, by the family's own marks."""
    reasoning = turn.get("reasoning_content")
    if reasoning is None:
        return family.answer.format(turn["content"]) + family.end
    assert family.thought is not None
    return family.thought.format(turn["content"], reasoning=reasoning) + family.end


def joined(prompts: list[list[int]], answers: list[list[int]]) -> list[TokenSample]:
    """The rule of the masks, written as loops: a turn joins the sample before if its prompt begins with all of it."""
    found: list[TokenSample] = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), start=1):
        before = found[-1] if found else TokenSample("x", [], [])
        if found and prompt[: len(before.input_ids)] == before.input_ids:
            found.pop()
        elif found:
            before = TokenSample(f"x#{number}", [], [])
        context = [False] * (len(prompt) - len(before.input_ids))
        found.append(TokenSample(before.id, prompt + answer, before.answer_mask + context + [True] * len(answer)))
    return found


def read(name: str, row: dict[str, Any], thinking: bool, **options: bool) -> list[TokenSample]:
    return samples_from_answers(
        {"id": "x", **row}, TOKENIZERS[name], enable_thinking=thinking, system_prompt=None, **options
    )


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_are_supervised_exactly_where_the_target_would_have_generated_them_or_refused(
    name: str, conversation: str, thinking: bool
) -> None:
    family, tokenizer, turns = FAMILIES[name], TOKENIZERS[name], CONVERSATIONS[conversation]
    has_reasoning = conversation == "reasoning"
    if family.is_open or (has_reasoning and (family.thought is None or not thinking)):
        with pytest.raises(DataError, match=r"turn 1: .*(does not write|does not begin with|enable_thinking is false)"):
            read(name, {"messages": turns}, thinking)
        return
    answers = [ids(tokenizer, generated(family, turn)) for turn in turns if turn["role"] == "assistant"]
    prompts = recorded_prompts(tokenizer, turns, thinking)
    if thinking and not has_reasoning:
        prompts = [prompt + ids(tokenizer, family.block) for prompt in prompts]
    assert read(name, {"messages": turns}, thinking) == joined(prompts, answers)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_generated_ids_are_supervised_whatever_the_template_makes_of_their_text(name: str, thinking: bool) -> None:
    """Also where a template shows none of it: reasoning that the prompt opens, thinking taken out of histories."""
    tokenizer = TOKENIZERS[name]
    for conversation in CONVERSATIONS.values():
        prompts = recorded_prompts(tokenizer, conversation, thinking)
        answers = [ids(tokenizer, f"hm\n</think>\n\n{number}{FAMILIES[name].end}") for number in range(len(prompts))]
        row = {"prompt_ids": prompts, "answer_ids": answers, "finish_reason": ["stop"] * len(answers)}
        samples = read(name, row, thinking)
        assert samples == joined(prompts, answers)
        supervised = [
            token for sample in samples for token, on in zip(sample.input_ids, sample.answer_mask, strict=True) if on
        ]
        assert supervised == [token for answer in answers for token in answer]
        (last,) = read(name, row, thinking, last_turn_only=True)
        assert last.input_ids == prompts[-1] + answers[-1]
        assert last.answer_mask == [False] * len(prompts[-1]) + [True] * len(answers[-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_markers_in_messages_stand_in_the_context_and_never_in_the_supervised_part(name: str) -> None:
    family, tokenizer = FAMILIES[name], TOKENIZERS[name]
    if family.is_open:
        pytest.skip("this template supervises no text, see the test of refusals")
    samples = read(name, {"messages": CONVERSATIONS["hostile"]}, False)
    supervised = [
        token for sample in samples for token, on in zip(sample.input_ids, sample.answer_mask, strict=True) if on
    ]
    expected = [family.answer.format(text) + family.end for text in ("No.", "Never.")]
    assert tokenizer.decode(supervised) == "".join(expected)
    context = tokenizer.decode(
        [token for token, on in zip(samples[-1].input_ids, samples[-1].answer_mask, strict=True) if not on]
    )
    assert context.count(MARKERS) >= 1


QWEN3_FIRST = (
    "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n",
    "Fine.\n\nAnd you?<|im_end|>",
)
QWEN3_SECOND = (
    "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    "Fine.\n\nAnd you?<|im_end|>\n<|im_start|>user\nWell, thanks.<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n",
    "Good.<|im_end|>",
)
# The system message stands before the last user message only, so the history of the second turn is written anew.
NEMO_FIRST = ("<s>[INST]Be kind.\n\nHow are you?[/INST]", "Fine.\n\nAnd you?</s>")
NEMO_SECOND = ("<s>[INST]How are you?[/INST]Fine.\n\nAnd you?</s>[INST]Be kind.\n\nWell, thanks.[/INST]", "Good.</s>")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("qwen3", [QWEN3_FIRST, QWEN3_SECOND]), ("mistral_nemo", [NEMO_FIRST, NEMO_SECOND])],
)
def test_turns_that_the_template_rewrites_become_samples_of_their_own(
    name: str, expected: list[tuple[str, str]]
) -> None:
    """Written out, so that a reader sees what the other tests compare."""
    samples = read(name, {"messages": CONVERSATIONS["plain"]}, False)
    found = []
    for sample in samples:
        split = sample.answer_mask.index(True)
        assert all(sample.answer_mask[split:])
        decode = TOKENIZERS[name].decode
        found.append((decode(sample.input_ids[:split]), decode(sample.input_ids[split:])))
    assert found == expected


def test_one_sample_holds_both_turns_where_the_template_only_appends() -> None:
    appending = {
        name
        for name in FAMILIES
        if not FAMILIES[name].is_open and len(read(name, {"messages": CONVERSATIONS["plain"]}, False)) == 1
    }
    assert appending == {"qwen2_5", "llama3_1", "gemma3", "smollm2", "phi3_5", "deepseek_v3_1", "glm4_6"}


def test_a_cut_text_has_no_end_of_turn_under_any_template() -> None:
    for name, family in FAMILIES.items():
        if family.is_open:
            continue
        row = {"messages": CONVERSATIONS["plain"], "finish_reason": ["stop", "length"]}
        last = read(name, row, False, last_turn_only=True)[0]
        whole = read(name, {"messages": CONVERSATIONS["plain"]}, False, last_turn_only=True)[0]
        assert last.input_ids == whole.input_ids[:-1], name
        assert TOKENIZERS[name].decode(whole.input_ids[-1:]) == family.end


def test_templates_say_how_they_write_reasoning() -> None:
    marks = {name: ChatTemplate(tokenizer, False, None).reasoning_marks() for name, tokenizer in TOKENIZERS.items()}
    assert {name: found for name, found in marks.items() if found is not None} == {
        "qwen3": ("<think>\n", "\n</think>\n\n"),
        "gpt_oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
        "glm4_6": ("\n<think>", "</think>\n"),
    }
