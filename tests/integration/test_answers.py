"""Answers: exactly what the target generated is kept and supervised, whatever kills the run on the way."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_targets import CHATML, CONFIG, READING, ascii_tokenizer, chat_target, save_chat_target, target_overrides
from helpers import STOP_TOKEN, read_conversations
from interrupted import finish, kill_after, lines, start

from deepspec.config import DataJobConfig, compose_data_job
from deepspec.data import regenerate
from deepspec.data.chat import TokenSample, render_prompt
from deepspec.data.features import FeatureMemory, TargetPass
from deepspec.data.jobs import show_samples, write_answers, write_prompts
from deepspec.data.journal import read_journal
from deepspec.data.prompts import Conversation, Message
from deepspec.data.regenerate import AnswerSettings, answer_prompts
from deepspec.data.samples import read_token_samples
from deepspec.decoding.decoder import Request, generate
from deepspec.decoding.sampling import Sampling
from deepspec.errors import ConfigError, DataError
from deepspec.targets.base import Target

SETTINGS = AnswerSettings(Sampling(temperature=0.9), max_new_tokens=24, seed=3, batch_size=4)


def conversations(count: int = 12) -> list[Conversation]:
    """Every third one has two user turns, every fourth a system message."""
    made = []
    for index in range(count):
        turns = [Message("system", "Be brief.")] if index % 4 == 1 else []
        turns += [Message("user", f"question {index} " + "why " * (index % 5))]
        if index % 3 == 2:
            turns += [Message("assistant", "not the target's words"), Message("user", "go on")]
        made.append(Conversation(f"row/{index}", tuple(turns), "chat" if index % 2 else ""))
    return made


def answer(path: Path, target: Target | None = None, settings: AnswerSettings = SETTINGS, count: int = 12) -> int:
    return answer_prompts(target or chat_target(), CONFIG, conversations(count), settings, path)


def rows_by_id(path: Path) -> dict[str, dict[str, Any]]:
    rows = read_journal(path)
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows), "a row is doubled"
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("undisturbed") / "answers.jsonl"
    assert answer(path) == 12
    return rows_by_id(path)


def test_every_turn_is_the_targets_own_answer_to_the_ids_that_are_kept(undisturbed: dict[str, Any]) -> None:
    target = chat_target()
    for conversation in conversations():
        row = undisturbed[conversation.id]
        questions = [turn for turn in conversation.turns if turn.role == "user"]
        turns = len(row["answer_ids"])
        assert len(row["prompt_ids"]) == len(row["finish_reason"]) == turns
        # A cut answer ends the conversation, and nothing else does.
        reasons = row["finish_reason"]
        assert reasons[:-1] == ["stop"] * (turns - 1)
        assert turns == len(questions) or reasons[-1] == "length"
        history = [turn for turn in conversation.turns if turn.role == "system"]
        for turn in range(turns):
            history.append(questions[turn])
            prompt = render_prompt(target.tokenizer, history, enable_thinking=False, system_prompt=None)
            assert row["prompt_ids"][turn] == prompt
            alone = generate(
                target,
                None,
                [Request(f"{conversation.id}#{turn}", prompt)],
                SETTINGS.sampling,
                max_new_tokens=SETTINGS.max_new_tokens,
                seed=SETTINGS.seed,
            )
            (finished,) = alone
            assert row["answer_ids"][turn] == finished.output_ids
            assert row["finish_reason"][turn] == finished.finish_reason
            said = finished.output_ids[: -1 if finished.finish_reason == "stop" else None]
            history.append(Message("assistant", str(target.tokenizer.decode(said))))
        assert row["messages"] == [{"role": turn.role, "content": turn.content} for turn in history]
        assert row["domain"] == conversation.domain
    two = [undisturbed[one.id]["finish_reason"] for one in conversations() if one.turns[-1].content == "go on"]
    assert {len(reasons) for reasons in two} == {1, 2}, "the seed must give follow-ups and a cut first answer"


def test_a_row_says_how_it_was_made(undisturbed: dict[str, Any]) -> None:
    row = undisturbed["row/0"]
    assert row["target"] == "tiny-chat"
    assert row["seed"] == 3
    assert row["sampling"] == {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_new_tokens": 24}
    assert (row["enable_thinking"], row["system_prompt"]) == (False, None)
    assert len(row["template_hash"]) == 16
    assert (row["revision"], row["dtype"], row["source"]) == (None, "float64", "in_process")


def test_masks_mark_exactly_the_generated_ids(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in undisturbed.values()))
    samples, counts = read_token_samples(
        path, ascii_tokenizer(), READING, enable_thinking=False, system_prompt=None, vocab_size=101
    )
    assert counts.rows == 12
    by_row: dict[str, list[tuple[list[int], list[bool]]]] = {}
    for sample in samples:
        by_row.setdefault(sample.id.split("#")[0], []).append((sample.input_ids, sample.answer_mask))
    shared = 0
    for key, row in undisturbed.items():
        expected: list[tuple[list[int], list[bool]]] = []
        for prompt, ids in zip(row["prompt_ids"], row["answer_ids"], strict=True):
            before, mask = expected[-1] if expected else ([], [])
            if before and prompt[: len(before)] == before:
                shared += 1
                expected.pop()
            else:
                before, mask = [], []
            mask = mask + [False] * (len(prompt) - len(before)) + [True] * len(ids)
            expected.append((prompt + ids, mask))
        assert by_row[key] == expected
    assert shared > 0, "no second turn continues the sample of the first: the test shows too little"


def test_a_cut_answer_has_no_end_of_turn_and_a_whole_one_ends_with_it(undisturbed: dict[str, Any]) -> None:
    reasons = set()
    for row in undisturbed.values():
        for ids, reason in zip(row["answer_ids"], row["finish_reason"], strict=True):
            reasons.add(reason)
            assert STOP_TOKEN not in ids[:-1]
            assert (ids[-1] == STOP_TOKEN) == (reason == "stop")
            assert reason == "stop" or len(ids) == SETTINGS.max_new_tokens
    assert reasons == {"stop", "length"}


def test_a_killed_run_continues_without_losing_or_doubling_a_row(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    path = tmp_path / "answers.jsonl"
    draw = random.Random(0)
    killed = 0
    for attempt in range(6):
        before = lines(path)
        wanted = before + draw.randint(0, 3)
        process = start(answer, path)
        killed += kill_after(process, lambda: lines(path) >= wanted, draw.random() * 0.02)  # noqa: B023
        assert lines(path) >= before, f"attempt {attempt} lost rows"
    assert killed > 0
    finish(start(answer, path))
    assert rows_by_id(path) == undisturbed
    content = path.read_bytes()
    assert answer(path) == 12
    assert path.read_bytes() == content, "a finished file is answered again"


def test_a_half_written_row_is_answered_again(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    path = tmp_path / "answers.jsonl"
    answer(path)
    path.write_bytes(path.read_bytes()[:-200])
    answer(path)
    assert rows_by_id(path) == undisturbed


def test_more_prompts_are_added_to_the_same_file_and_do_not_change_the_others(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    path = tmp_path / "answers.jsonl"
    assert answer(path, count=5) == 5
    assert answer(path) == 12
    assert rows_by_id(path) == undisturbed


def test_answers_do_not_depend_on_the_batch_size(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    for batch_size in (1, 12):
        path = tmp_path / f"{batch_size}.jsonl"
        answer(path, settings=SETTINGS._replace(batch_size=batch_size))
        assert rows_by_id(path) == undisturbed


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (SETTINGS._replace(sampling=Sampling(temperature=0.0)), "sampling"),
        (SETTINGS._replace(max_new_tokens=25), "sampling"),
        (SETTINGS._replace(seed=4), "seed 3, but this run asks for 4"),
    ],
)
def test_other_settings_on_the_same_file_are_refused_before_anything_is_written(
    tmp_path: Path, settings: AnswerSettings, words: str
) -> None:
    path = tmp_path / "answers.jsonl"
    answer(path, count=3)
    before = path.read_bytes()
    with pytest.raises(DataError, match=rf"answers\.jsonl was made with {words}.*Write to another file"):
        answer(path, settings=settings)
    assert path.read_bytes() == before


def test_another_template_on_the_same_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answer(path, count=3)
    target = chat_target()
    target.tokenizer.chat_template = CHATML + " "
    with pytest.raises(DataError, match="made with template_hash"):
        answer(path, target)


def test_a_follow_up_that_no_longer_fits_the_context_ends_the_conversation_like_a_cut_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours of first turns must not end in an error that a rerun meets again."""
    target = chat_target()
    # 512 positions: the first prompt fits, the second one does not.
    long = Conversation("long", (Message("user", "a" * 300), Message("user", "b" * 300)), "")
    short = Conversation("short", (Message("user", "a"), Message("user", "b")), "")
    path = tmp_path / "answers.jsonl"
    settings = AnswerSettings(Sampling(), max_new_tokens=60, seed=0, batch_size=2)
    assert answer_prompts(target, CONFIG, [long, short], settings, path) == 2
    row = rows_by_id(path)["long"]
    assert row["finish_reason"] == ["stop"], "this seed must give a whole first answer"
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert len(row["prompt_ids"]) == len(row["answer_ids"]) == 1
    assert "1 conversations end before turn 2" in capsys.readouterr().out


def test_a_first_prompt_that_does_not_fit_is_named_before_anything_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    long = Conversation("far too long", (Message("user", "a" * 600),), "")
    with pytest.raises(DataError, match=r"'far too long.*512 positions"):
        answer_prompts(chat_target(), CONFIG, [*conversations(2), long], SETTINGS, path)
    assert lines(path) == 0


def test_prompts_are_taken_and_written_portion_by_portion(
    tmp_path: Path, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed job of several turns loses a portion, not all first turns; and only a portion is in memory."""
    monkeypatch.setattr(regenerate, "_PORTION", 1)
    path = tmp_path / "answers.jsonl"
    written = []

    class Watched(list[Conversation]):
        def __iter__(self) -> Iterator[Conversation]:
            for conversation in super().__iter__():
                written.append(lines(path))
                yield conversation

    assert answer_prompts(chat_target(), CONFIG, Watched(conversations()), SETTINGS, path) == 12
    assert written == [number // SETTINGS.batch_size * SETTINGS.batch_size for number in range(12)]
    assert rows_by_id(path) == undisturbed


def test_prompts_that_cannot_be_asked_are_left_out_and_counted_if_the_job_may(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answers.jsonl"
    target = chat_target()
    target.tokenizer.chat_template = (
        "{% if 'tools' in messages[0].content %}{{ raise_exception('no') }}{% endif %}" + CHATML
    )
    texts = {"long": "a" * 600, "refused": "tools", "fine": "hello"}
    prompts = [Conversation(key, (Message("user", text),), "") for key, text in texts.items()]
    for prompt in prompts[:2]:
        with pytest.raises(DataError, match=rf"prompt '{prompt.id}' cannot be asked.*on_bad_row=skip"):
            answer_prompts(target, CONFIG, [prompt], SETTINGS, path)
    assert lines(path) == 0
    assert answer_prompts(target, CONFIG, prompts, SETTINGS, path, on_bad_row="skip") == 1
    assert list(rows_by_id(path)) == ["fine"]
    assert "2 prompts were left out" in capsys.readouterr().out


@pytest.fixture(scope="module")
def saved_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_target(tmp_path_factory.mktemp("target"))


def job(folder: Path, target: Path, *more: str) -> DataJobConfig:
    return compose_data_job(
        [*target_overrides(target), f"output_dir={folder}", "max_new_tokens=16", "batch_size=4", "device=cpu", *more]
    )


def test_prompts_of_any_layout_become_one_file_of_conversations(
    tmp_path: Path, saved_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "given.jsonl"
    rows = [
        {"prompt": "one"},
        {"turns": ["two", "three"], "domain": "maths"},
        {"prompt": ""},
        {"id": "x", "prompt": "y"},
    ]
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"given\.jsonl line 3: 'prompt' is empty.*with on_bad_row=skip"):
        write_prompts(job(tmp_path / "out", saved_target, f"prompts={given}"))
    path = write_prompts(job(tmp_path / "out", saved_target, f"prompts={given}", "on_bad_row=skip"))
    assert path == tmp_path / "out" / "prompts.jsonl"
    expected, _ = read_conversations(given, "skip")
    assert read_conversations(path, "stop") == (expected, {})
    assert f"{given}: 1 left out ('prompt' is empty)" in capsys.readouterr().out
    assert write_prompts(job(tmp_path / "built_in", saved_target, "limit=5")).read_bytes().count(b"\n") == 5


def test_the_job_answers_and_shows_what_a_draft_will_learn(
    tmp_path: Path, saved_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = job(tmp_path, saved_target, "limit=6", "samples=2")
    path = write_answers(config)
    assert lines(path) == 6
    capsys.readouterr()
    show_samples(config)
    shown = capsys.readouterr().out
    samples, counts = read_token_samples(path, ascii_tokenizer(), READING, enable_thinking=False, system_prompt=None)
    tokens = sum(len(sample.input_ids) for sample in samples)
    for sample in samples[:2]:
        assert f"{sample.id}: {len(sample.input_ids)} tokens, {sum(sample.answer_mask)} supervised" in shown
    assert samples[2].id not in shown
    share = f"{counts.answer_tokens / tokens:.1%} supervised, 0 bad rows"
    assert f"6 rows, {counts.samples} samples, {tokens:,} tokens, {share}" in shown


def test_prompts_that_change_while_the_last_ones_are_answered_end_the_job_after_their_answers(
    tmp_path: Path, saved_target: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "x", "prompt": "hello"}\n{"id": "y", "prompt": "there"}\n')

    class Meddling(FeatureMemory):
        """Adds a prompt when an answer has been given, long after the file was read to its end."""

        def keep(self, sample: TokenSample, one: TargetPass) -> None:
            if prompts.read_bytes().count(b"\n") == 2:
                with prompts.open("a") as file:
                    file.write('{"id": "z", "prompt": "too late"}\n')

    config = job(tmp_path, saved_target, f"prompts={prompts}")
    with pytest.raises(DataError, match=r"prompts\.jsonl was changed.*Run the same command again"):
        write_answers(config, Meddling(1.0))
    assert lines(Path(config.answers)) == 2
    assert lines(write_answers(config)) == 3


def test_no_job_writes_over_its_own_prompts_or_to_a_name_that_training_cannot_read(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "x", "prompt": "hello"}\n{"id": "y", "prompt": "there"}', encoding="utf-8")
    before = prompts.read_bytes()
    words = [f"prompts={prompts}", f"output_dir={tmp_path}", "limit=1", *target_overrides(tmp_path / "no target")]
    with pytest.raises(DataError, match="over the prompts themselves"):
        write_prompts(compose_data_job(words))
    for answers, reason in ((prompts, "is the file of prompts"), (tmp_path / "answers.json", r"End it in \.jsonl")):
        with pytest.raises(ConfigError, match=reason):
            write_answers(compose_data_job([*words, f"answers={answers}"]))
    assert prompts.read_bytes() == before


def test_a_prompt_that_changed_behind_its_id_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answer(path, count=2)
    changed = [one._replace(turns=(*one.turns[:-1], Message("user", "something else"))) for one in conversations(2)]
    with pytest.raises(DataError, match=r"line \d answers another prompt with the id 'row/"):
        answer_prompts(chat_target(), CONFIG, changed, SETTINGS, path)
