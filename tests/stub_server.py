"""An OpenAI-compatible server in the test process that answers by a rule, and misbehaves when it is told to."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from chat_targets import MODEL, ascii_tokenizer

TOKENIZER = ascii_tokenizer()
STOP = int(TOKENIZER.eos_token_id)
HANG_SECONDS = 0.6
FAULTS = (
    "status_500",
    "status_503",
    "status_429",
    "hang",
    "drip",
    "half_json",
    "no_json",
    "short_body",
    "reset",
    "no_choice",
    "two_choices",
    "wrong_count",
    "too_many_tokens",
    "no_message",
    "bad_ids",
    "aborted",
    "a_list",
    "deep_json",
    "half_surrogate",
)


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def rule(request: dict[str, Any]) -> dict[str, Any]:
    """The good reply: the last user message in capitals, cut at max_tokens, with ids and counts."""
    is_chat = "messages" in request
    if is_chat:
        asked = request["messages"][-1]["content"]
        prompt = encode(TOKENIZER.apply_chat_template(request["messages"], tokenize=False, add_generation_prompt=True))
    else:
        prompt = request["prompt"]
        asked = TOKENIZER.decode(prompt).split("<|im_start|>")[-2].removeprefix("user\n").removesuffix("<|im_end|>\n")
    ids = [*encode(asked.upper()), STOP]
    reason = "stop"
    if len(ids) > request["max_tokens"]:
        ids, reason = ids[: request["max_tokens"]], "length"
    text = TOKENIZER.decode(ids if reason == "length" else ids[:-1])
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    reply: dict[str, Any] = {"choices": [choice], "usage": {"completion_tokens": len(ids)}}
    if request.get("return_token_ids"):
        choice["token_ids"] = ids
        reply["prompt_token_ids"] = prompt
    return reply


class StubServer:
    """A running stub.

    Attributes:
        requests: bodies in the order in which they came, with `_path`, `_headers` and `_time` added.
        answer: what a good reply is.
        fault: name of what goes wrong with a request, by its number and body; None for nothing.
        drips_models: whether the list of models comes byte by byte.
    """

    def __init__(self, port: int = 0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.answer: Callable[[dict[str, Any]], dict[str, Any]] = rule
        self.fault: Callable[[int, dict[str, Any]], str | None] = lambda number, request: None
        self.models: Any = {"data": [{"id": MODEL}]}
        self.drips_models = False
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(stub) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                body = json.dumps(stub.models).encode()
                with contextlib.suppress(OSError):
                    self._send_slowly("drip", body * 9) if stub.drips_models else self._send(200, body)

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                body = self.rfile.read(length)
                if len(body) < length:  # the client was killed
                    self.close_connection = True
                    return
                request = json.loads(body)
                with stub._lock:
                    number = len(stub.requests)
                    seen = {"_path": self.path, "_headers": dict(self.headers), "_time": time.monotonic()}
                    stub.requests.append({**request, **seen})
                with contextlib.suppress(OSError):
                    self._reply(stub.fault(number, request), request)

            def _reply(self, fault: str | None, request: dict[str, Any]) -> None:
                reply = stub.answer(request)
                if "status" in reply:
                    return self._send(reply["status"], json.dumps(reply).encode())
                if fault is None:
                    return self._send(200, json.dumps(reply).encode())
                if fault.startswith("status_"):
                    headers = {"Retry-After": "0.05"} if fault == "status_429" else {}
                    return self._send(int(fault[-3:]), b'{"error": {"message": "not now"}}', headers)
                body = json.dumps(broken(fault, reply)).encode()
                if fault == "hang":
                    time.sleep(HANG_SECONDS)
                elif fault == "half_json":
                    body = body[: len(body) // 2]
                elif fault == "deep_json":
                    body = b"[" * 100_000
                elif fault == "no_json":
                    body = b"<html>bad gateway</html>"
                elif fault in ("short_body", "reset", "drip"):
                    return self._send_slowly(fault, body)
                return self._send(200, body)

            def _send_slowly(self, fault: str, body: bytes) -> None:
                self.close_connection = True
                if fault == "reset":
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if fault == "short_body":
                    self.wfile.write(body[:-5])
                    return
                for place in range(len(body)):
                    self.wfile.write(body[place : place + 1])
                    time.sleep(HANG_SECONDS / 20)

            def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        return Handler


def broken(fault: str, reply: dict[str, Any]) -> Any:
    """A reply that is JSON, but not an answer."""
    choice = reply["choices"][0]
    if fault == "no_choice":
        reply["choices"] = []
    elif fault == "two_choices":
        reply["choices"] = [choice, choice]
    elif fault == "wrong_count":
        reply["usage"]["completion_tokens"] += 1
    elif fault == "too_many_tokens":
        choice["token_ids"] = [5] * 10_000
        del reply["usage"]
    elif fault == "no_message":
        choice.pop("message", None)
        choice.pop("text", None)
    elif fault == "bad_ids":
        choice["token_ids"] = ["7", None, -1]
    elif fault == "aborted":
        choice["finish_reason"] = "abort"
    elif fault == "half_surrogate":
        for key in ("message", "text"):
            if key in choice:
                choice[key] = {"content": "half \ud83d"} if key == "message" else "half \ud83d"
        choice.pop("token_ids", None)
    elif fault == "a_list":
        return [reply]
    return reply


@contextlib.contextmanager
def stub_server(port: int = 0) -> Iterator[StubServer]:
    """A stub for the length of a test."""
    server = StubServer(port)
    try:
        yield server
    finally:
        server.stop()
