"""Answers from servers: nothing lost and nothing doubled, whatever servers, networks and kills do on the way."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_targets import CONFIG, MODEL, READING, ascii_tokenizer, save_chat_target, target_overrides
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interrupted import finish, kill_after, lines, start
from stub_server import FAULTS, STOP, StubServer, encode, rule, stub_server

from deepspec.config import ServerConfig, compose_data_job
from deepspec.data.chat import render_prompt
from deepspec.data.dialogues import AnswerSettings
from deepspec.data.jobs import write_answers
from deepspec.data.journal import read_journal
from deepspec.data.prompts import Conversation, Message, conversation_from_row
from deepspec.data.samples import read_token_samples
from deepspec.data.server import ServerCounts, answer_prompts_by_server, describe_counts
from deepspec.decoding.sampling import Sampling
from deepspec.errors import ConfigError, DataError

SETTINGS = AnswerSettings(Sampling(temperature=0.7), max_new_tokens=40, seed=3, batch_size=1)
SERVER = ServerConfig(
    urls=("http://127.0.0.1:9",),
    api="chat",
    concurrency=4,
    timeout_seconds=20.0,
    attempts=8,
    backoff_seconds=0.004,
    api_key_variable="DEEPSPEC_TEST_KEY",
    extensions=True,
)


def conversations(count: int = 12) -> list[Conversation]:
    """Every third one has three user turns, every fourth a system message, every fifth an answer that is cut."""
    made = []
    for index in range(count):
        turns = [Message("system", "Be brief.")] if index % 4 == 1 else []
        turns += [Message("user", f"question {index} " + ("why " * 12 if index % 5 == 4 else ""))]
        if index % 3 == 2:
            turns += [Message("assistant", "of another"), Message("user", "go on"), Message("user", f"and {index}")]
        made.append(Conversation(f"row/{index}", tuple(turns), "chat" if index % 2 else ""))
    return made


def ask(
    server: StubServer | str,
    path: Path,
    prompts: list[Conversation] | None = None,
    *,
    on_bad_row: Any = "stop",
    **options: Any,
) -> ServerCounts:
    url = server if isinstance(server, str) else server.url
    config = SERVER.model_copy(update={"urls": (url,), **options})
    prompts = conversations() if prompts is None else prompts
    return answer_prompts_by_server(ascii_tokenizer(), CONFIG, config, prompts, SETTINGS, path, on_bad_row)


def rows_by_id(path: Path) -> dict[str, dict[str, Any]]:
    rows = read_journal(path)
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows), "a row stands there twice"
    return found


@pytest.fixture
def server() -> Iterator[StubServer]:
    with stub_server() as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("undisturbed") / "answers.jsonl"
    with stub_server() as running:
        assert ask(running, path).rows == 12
    return rows_by_id(path)


def test_every_turn_is_what_the_server_said_to_the_history_before_it(undisturbed: dict[str, Any]) -> None:
    for conversation in conversations():
        row = undisturbed[conversation.id]
        history = [turn for turn in conversation.turns if turn.role == "system"]
        prompts, answers, reasons = [], [], []
        for question in (turn for turn in conversation.turns if turn.role == "user"):
            history.append(question)
            prompts.append(render_prompt(ascii_tokenizer(), history, enable_thinking=False, system_prompt=None))
            said = [*encode(question.content.upper()), STOP]
            answers.append(said[:40])
            reasons.append("stop" if len(said) <= 40 else "length")
            text = ascii_tokenizer().decode(said[:-1] if len(said) <= 40 else said[:40])
            history.append(Message("assistant", str(text)))
            if reasons[-1] == "length":
                break
        assert (row["prompt_ids"], row["answer_ids"], row["finish_reason"]) == (prompts, answers, reasons)
        assert row["messages"] == [{"role": turn.role, "content": turn.content} for turn in history]
        assert row["num_tokens"] == [len(answer) for answer in answers]
    assert {reason for row in undisturbed.values() for reason in row["finish_reason"]} == {"stop", "length"}
    assert max(len(row["answer_ids"]) for row in undisturbed.values()) == 3


def test_a_row_says_how_it_was_made_and_trains_exactly_its_ids(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    row = undisturbed["row/0"]
    assert (row["target"], row["source"], row["api"], row["revision"], row["dtype"]) == (
        MODEL,
        "server",
        "chat",
        None,
        None,
    )
    assert row["sampling"] == {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_new_tokens": 40}
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in undisturbed.values()))
    samples, counts = read_token_samples(path, ascii_tokenizer(), READING, enable_thinking=False, system_prompt=None)
    assert counts.answer_tokens == sum(len(ids) for one in undisturbed.values() for ids in one["answer_ids"])
    cut = next(sample for sample in samples if sample.id == "row/4")
    assert cut.answer_mask[-1]
    assert STOP not in cut.input_ids[-40:]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_any_kind_is_tried_again_and_leaves_no_trace(
    fault: str, server: StubServer, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    server.fault = lambda number, request: fault if number in (0, 3) else None
    path = tmp_path / "answers.jsonl"
    is_late = fault in ("hang", "drip")
    assert ask(server, path, timeout_seconds=0.3 if is_late else 20.0).rows == 12
    assert rows_by_id(path) == undisturbed
    needed = 2 + sum(len(row["answer_ids"]) for row in undisturbed.values())
    # On a busy machine good replies may be late as well.
    assert len(server.requests) >= needed if is_late else len(server.requests) == needed


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_faults_of_all_kinds_at_once_change_nothing(
    seed: int, api: str, server: StubServer, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    draw = random.Random(seed)
    quick = [fault for fault in FAULTS if fault not in ("hang", "drip")]
    server.fault = lambda number, request: draw.choice(quick) if draw.random() < 0.4 else None
    path = tmp_path / "answers.jsonl"
    ask(server, path, api=api, attempts=30, backoff_seconds=0.001, concurrency=1 + 5 * seed)
    assert {key: {**row, "api": "chat"} for key, row in rows_by_id(path).items()} == undisturbed


def test_a_pause_that_the_server_asks_for_is_kept(server: StubServer, tmp_path: Path) -> None:
    server.fault = lambda number, request: "status_429" if number < 2 else None
    ask(server, tmp_path / "answers.jsonl", conversations(1))
    times = [request["_time"] for request in server.requests]
    assert len(times) == 3
    assert all(later - earlier >= 0.05 for earlier, later in itertools.pairwise(times))


def test_work_is_shared_out_and_a_dead_address_costs_nothing_but_time(
    server: StubServer, tmp_path: Path, undisturbed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_server() as other:
        dead = StubServer()
        dead.stop()
        urls = (dead.url, server.url, other.url)
        path = tmp_path / "answers.jsonl"
        ask(server, path, urls=urls)
        assert rows_by_id(path) == undisturbed
        assert min(len(server.requests), len(other.requests)) > 3
    assert f"no answer from {dead.url}: ConnectError" in capsys.readouterr().out


def test_where_no_server_listens_the_addresses_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    dead = StubServer()
    dead.stop()
    path = tmp_path / "answers.jsonl"
    with pytest.raises(DataError, match=rf"no server answers \({dead.url}: ConnectError.*server\.urls"):
        ask(dead.url, path)
    assert lines(path) == 0


def test_a_server_that_dies_in_the_middle_ends_the_run_and_the_next_run_goes_on(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    path = tmp_path / "answers.jsonl"
    with stub_server() as server:

        def dying(request: dict[str, Any]) -> dict[str, Any]:
            if len(server.requests) > 9:
                server.fault = lambda number, request: "reset"
            return rule(request)

        server.answer = dying
        with pytest.raises(DataError, match=r"no good reply from .* \(4 tries, .*\).*answers so far are kept"):
            ask(server, path, attempts=4, concurrency=1)
    before = rows_by_id(path)
    assert 0 < len(before) < 12
    with stub_server() as server:
        assert ask(server, path).rows == 12
        asked = sum(len(row["answer_ids"]) for key, row in undisturbed.items() if key not in before)
        assert len(server.requests) == asked, "what stands in the file is not asked for again"
    assert rows_by_id(path) == undisturbed


@given(cut=st.integers(0, 1_000_000), concurrency=st.integers(1, 6))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_at_any_byte_is_completed_without_losing_or_doubling_a_row(
    cut: int, concurrency: int, server: StubServer, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """A kill leaves a beginning of what would have been written."""
    whole = "".join(json.dumps(row) + "\n" for row in undisturbed.values()).encode()
    path = tmp_path / "answers.jsonl"
    path.write_bytes(whole[: cut % (len(whole) + 1)])
    kept = len(read_journal(path))
    server.requests.clear()
    assert ask(server, path, concurrency=concurrency).rows == 12
    assert rows_by_id(path) == undisturbed
    asked = {request["messages"][0]["content"] + request["messages"][-1]["content"] for request in server.requests}
    assert len(server.requests) == len(asked)
    missing = list(undisturbed.values())[kept:]
    assert len(asked) == sum(len(row["answer_ids"]) for row in missing), "what stands in the file is asked for again"


def test_runs_that_are_killed_lose_and_double_nothing(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    path = tmp_path / "answers.jsonl"
    draw = random.Random(1)
    killed = 0
    with stub_server() as server:
        server.answer = lambda request: rule(request)
        for _ in range(2):
            before = lines(path)
            process = start(ask, server.url, path)
            killed += kill_after(process, lambda: lines(path) > before, draw.random() * 0.01)  # noqa: B023
            assert lines(path) >= before
        assert killed > 0
        finish(start(ask, server.url, path))
    assert rows_by_id(path) == undisturbed


def refusing(word: str, status: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if word in request["messages"][-1]["content"]:
            return {"status": status, "error": {"message": "This is too long."}}
        return rule(request)

    return answer


def test_a_refused_prompt_stops_by_name_or_is_left_out_and_counted(server: StubServer, tmp_path: Path) -> None:
    server.answer = refusing("question 3", 400)
    path = tmp_path / "answers.jsonl"
    with pytest.raises(DataError, match=r"prompt 'row/3' gets no answer: .*status 400 This is too long\. .*skip"):
        ask(server, path)
    counts = ask(server, path, on_bad_row="skip")
    assert (counts.rows, counts.left_out) == (11, 1)
    assert "row/3" not in rows_by_id(path)
    assert "1 prompts got no answer" in next(describe_counts(counts))


def test_a_later_turn_that_is_refused_ends_the_conversation_before_it(server: StubServer, tmp_path: Path) -> None:
    server.answer = refusing("and 2", 400)
    path = tmp_path / "answers.jsonl"
    ask(server, path, conversations(3))
    row = rows_by_id(path)["row/2"]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "user", "assistant"]
    assert len(row["answer_ids"]) == 2


def test_a_prompt_that_always_fails_does_not_take_the_others_with_it(server: StubServer, tmp_path: Path) -> None:
    server.fault = lambda number, request: "status_500" if "question 1 " in str(request["messages"]) else None
    path = tmp_path / "answers.jsonl"
    counts = ask(server, path, on_bad_row="skip", attempts=3)
    assert (counts.rows, counts.left_out) == (11, 1)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_path_or_model_ends_the_run_at_once(status: int, server: StubServer, tmp_path: Path) -> None:
    server.answer = lambda request: {"status": status, "error": "no such thing"}
    with pytest.raises(ConfigError, match=rf"status {status} no such thing.*server\.model"):
        ask(server, tmp_path / "answers.jsonl", concurrency=1)
    assert len(server.requests) == 1


def test_a_server_whose_list_of_models_comes_too_slowly_counts_as_absent(
    server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspec.data.server_client._CONNECT_SECONDS", 0.3)
    server.drips_models = True
    with pytest.raises(DataError, match="no server answers"):
        ask(server, tmp_path / "answers.jsonl", conversations(1))


@pytest.mark.parametrize("key", ["abc\n", "k\u00e9y"])
def test_a_key_that_no_header_may_hold_is_named_by_its_variable_and_never_shown(
    server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("DEEPSPEC_TEST_KEY", key)
    with pytest.raises(ConfigError, match=r"\$DEEPSPEC_TEST_KEY") as refused:
        ask(server, tmp_path / "answers.jsonl", conversations(1))
    assert key not in str(refused.value)
    assert not server.requests


@pytest.mark.parametrize("url", ["http://localhost:99999/v1", "http://[::1/v1", "http://", "ftp://localhost/v1"])
def test_an_address_that_cannot_be_one_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        compose_data_job([f"server.urls=['{url}']"])


def test_a_server_of_other_models_is_refused_before_it_is_asked(server: StubServer, tmp_path: Path) -> None:
    server.models = {"data": [{"id": "other"}, {"id": "third"}]}
    with pytest.raises(
        ConfigError, match=r"does not serve model 'tiny-chat'. It serves: other, third\. Set server\.mo"
    ):
        ask(server, tmp_path / "answers.jsonl")
    assert ask(server, tmp_path / "answers.jsonl", conversations(1), model="third").rows == 1
    assert server.requests[0]["model"] == "third"


def test_a_request_says_all_that_decides_about_its_answer(
    server: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSPEC_TEST_KEY", "secret")
    path = tmp_path / "answers.jsonl"
    ask(server, path, conversations(3))
    by_text = {request["messages"][-1]["content"]: request for request in server.requests}
    request = by_text["question 0 "]
    assert (request["model"], request["max_tokens"], request["temperature"], request["top_p"]) == (MODEL, 40, 0.7, 1.0)
    assert request["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert request["return_token_ids"] is True
    assert request["_headers"]["Authorization"] == "Bearer secret"
    assert "secret" not in path.read_text()
    assert len({request["seed"] for request in server.requests}) == len(server.requests) == 5
    again = tmp_path / "again.jsonl"
    server.requests.clear()
    ask(server, again, conversations(3)[::-1])
    assert {text: one["seed"] for text, one in by_text.items()} == {
        one["messages"][-1]["content"]: one["seed"] for one in server.requests
    }


def test_only_openais_own_fields_are_sent_where_extensions_are_off(server: StubServer, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    counts = ask(server, path, conversations(3), extensions=False)
    sent = {key for request in server.requests for key in request if not key.startswith("_")}
    assert sent == {"model", "messages", "max_tokens", "temperature", "top_p", "seed"}
    config = SERVER.model_copy(update={"urls": (server.url,), "extensions": False})
    top_k = SETTINGS._replace(sampling=Sampling(temperature=1.0, top_k=5))
    with pytest.raises(ConfigError, match=r"sampling\.top_k 5 .*server\.extensions=true"):
        answer_prompts_by_server(ascii_tokenizer(), CONFIG, config, conversations(1), top_k, path)
    assert (counts.without_ids, counts.changed, counts.unlocated) == (5, 0, 0)


def test_answers_without_ids_are_supervised_as_their_text_and_the_share_that_differs_is_said(
    server: StubServer, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    def without_ids(request: dict[str, Any]) -> dict[str, Any]:
        reply = rule({**request, "return_token_ids": False})
        if "go on" in request["messages"][-1]["content"]:
            reply["usage"]["completion_tokens"] += 2  # generated in smaller pieces than its text is tokenised in
        return reply

    server.answer = without_ids
    path = tmp_path / "answers.jsonl"
    counts = ask(server, path)
    turns = sum(len(row["answer_ids"]) for row in undisturbed.values())
    assert (counts.without_ids, counts.changed, counts.unlocated) == (turns, 4, 0)
    assert f"{turns} answers came without token ids: at least {4 / turns:.1%} of them" in next(describe_counts(counts))
    by_text = read_token_samples(path, ascii_tokenizer(), READING, enable_thinking=False, system_prompt=None)[0]
    ids_path = tmp_path / "ids.jsonl"
    ids_path.write_text("".join(json.dumps(row) + "\n" for row in undisturbed.values()))
    by_ids = read_token_samples(ids_path, ascii_tokenizer(), READING, enable_thinking=False, system_prompt=None)[0]
    assert sorted(by_text) == sorted(by_ids)
    assert "answer_ids" not in rows_by_id(path)["row/0"]


def test_ids_without_the_token_that_ended_the_turn_are_not_kept(server: StubServer, tmp_path: Path) -> None:
    def stripped(request: dict[str, Any]) -> dict[str, Any]:
        reply = rule(request)
        reply["choices"][0]["token_ids"].pop()
        reply["usage"]["completion_tokens"] -= 1
        return reply

    server.answer = stripped
    path = tmp_path / "answers.jsonl"
    assert ask(server, path, conversations(1)).without_ids == 1
    (sample,) = read_token_samples(path, ascii_tokenizer(), READING, enable_thinking=False, system_prompt=None)[0]
    assert sample.input_ids[-1] == STOP


def test_a_template_of_the_servers_own_is_noticed(server: StubServer, tmp_path: Path) -> None:
    def other(request: dict[str, Any]) -> dict[str, Any]:
        reply = rule(request)
        reply["prompt_token_ids"] = [7, *reply["prompt_token_ids"]]
        return reply

    server.answer = other
    path = tmp_path / "answers.jsonl"
    counts = ask(server, path, conversations(2))
    assert counts.other_prompt == 2
    assert "in another way than by the target's template" in next(describe_counts(counts))
    assert rows_by_id(path)["row/0"]["prompt_ids"][0][0] == 7, "what the target read is what counts"


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def test_reasoning_tools_and_calls_are_kept(server: StubServer, tmp_path: Path) -> None:
    """A call whose result stands in the prompt stays; a new call ends the conversation."""
    prompt = conversation_from_row(
        {
            "id": "t",
            "tools": [TOOL],
            "messages": [
                {"role": "user", "content": "one and one"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
                {"role": "assistant", "content": "of another"},
                {"role": "user", "content": "once more"},
                {"role": "assistant", "content": "of another"},
                {"role": "user", "content": "never asked"},
            ],
        }
    )

    def reasoning(request: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "So.", "reasoning_content": "hm"}
        reason = "stop"
        if request["messages"][-1]["content"] == "once more":
            message, reason = {"role": "assistant", "content": None, "tool_calls": [CALL]}, "tool_calls"
        return {"choices": [{"message": message, "finish_reason": reason}]}

    server.answer = reasoning
    path = tmp_path / "answers.jsonl"
    ask(server, path, [prompt])
    row = rows_by_id(path)["t"]
    assert row["tools"] == [TOOL] == server.requests[0]["tools"]
    assert row["messages"] == [
        {"role": "user", "content": "one and one"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "So.", "reasoning_content": "hm"},
        {"role": "user", "content": "once more"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
    assert (row["answer_turns"], row["finish_reason"]) == ([3, 5], ["stop", "tool_calls"])
    assert [len(request["messages"]) for request in server.requests] == [3, 5]
    assert ask(server, path, [prompt]).rows == 1, "the very same prompt is known again"


def test_an_answer_of_nothing_but_cut_reasoning_is_left_out_where_no_ids_say_what_it_was(
    server: StubServer, tmp_path: Path
) -> None:
    cut = {"message": {"content": "", "reasoning": "hm hm"}, "finish_reason": "length"}
    server.answer = lambda request: {"choices": [cut]}
    counts = ask(server, tmp_path / "answers.jsonl", conversations(2))
    assert (counts.rows, counts.left_out) == (0, 2)


def test_the_job_asks_servers_by_the_words_of_the_command_line(
    server: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_chat_target(tmp_path / "target")
    words = [*target_overrides(folder), f"output_dir={tmp_path}", "limit=5", "max_new_tokens=16", "source=server"]
    config = compose_data_job([*words, f"server.urls=[{server.url}]", f"server.model={MODEL}"])
    path = write_answers(config)
    assert Counter(row["source"] for row in read_journal(path)) == {"server": 5}
    assert "5 answered prompts" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"'localhost:8000' is no address"):
        compose_data_job([*words, "server.urls=['localhost:8000']"])
