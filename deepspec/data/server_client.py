"""Requests to one or several OpenAI-compatible servers: shared out, timed, repeated with growing pauses, and checked.

The module knows HTTP and what a broken reply looks like; what is asked and what an answer means is known to server.py.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from deepspec import console
from deepspec.config import ServerConfig
from deepspec.errors import ConfigError, DataError

Parsed = TypeVar("Parsed")
_CONNECT_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 60.0
_LONGEST_ASKED_PAUSE_SECONDS = 600.0
# So many requests in a row without one good reply: it is the server, not the requests.
_MOST_GIVEN_UP = 8
# Statuses that a later try may change; all other refusals are about the request itself.
_PASSING_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
_REQUEST_STATUSES = frozenset({400, 413, 422})


class RefusedRequestError(DataError):
    """The servers work, but will not answer this one request; `is_final` where they say so themselves."""

    def __init__(self, reason: str, *, is_final: bool) -> None:
        """Say why."""
        super().__init__(reason)
        self.is_final = is_final


class PassingError(Exception):
    """A try failed in a way that another may not.

    Attributes:
        has_reply: a server is there and said something.
        pause_seconds: the pause that it asked for.
    """

    def __init__(self, reason: str, *, has_reply: bool = True, pause_seconds: float = 0.0) -> None:
        """Say why."""
        super().__init__(reason)
        self.has_reply = has_reply
        self.pause_seconds = pause_seconds


class _Address:
    """One server and how it has been doing."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.in_flight = 0
        self.failures = 0
        self.rests_until = 0.0


class ServerPool:
    """The servers of one job; use it as an async context."""

    def __init__(self, config: ServerConfig) -> None:
        """Prepare the addresses; nothing is sent yet.

        Raises:
            ConfigError: the key cannot be sent.
        """
        self._config = config
        self._addresses = [_Address(url) for url in config.urls]
        self._last_success = 0.0
        self._given_up = 0  # requests in a row, with no good reply to any other between them
        key = os.environ.get(config.api_key_variable)
        if key and not (key.isascii() and key.isprintable()):
            raise ConfigError(
                f"the key in ${config.api_key_variable} holds a line break or letters that no header may hold. Set it "
                "anew."
            )
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(config.timeout_seconds, connect=min(_CONNECT_SECONDS, config.timeout_seconds)),
            limits=httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency),
        )

    async def __aenter__(self) -> ServerPool:
        """Nothing to open: connections are made as they are needed."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def check(self, model: str) -> None:
        """Ask every server whether it is there and has the model.

        Raises:
            ConfigError: a server says that it serves other models only.
            DataError: no server answers.
        """
        found = await asyncio.gather(*map(self._served_models, self._addresses))
        problems = [
            f"{address.url}: {one}" for address, one in zip(self._addresses, found, strict=True) if type(one) is str
        ]
        if len(problems) == len(self._addresses):
            raise DataError(f"no server answers ({'; '.join(problems)}). Start one, or set server.urls.")
        for problem in problems:
            console.info(f"no answer from {problem}; the other servers do its work until it is there")
        for address, served in zip(self._addresses, found, strict=True):
            if type(served) is list and served and model not in served:
                raise ConfigError(
                    f"{address.url} does not serve model '{model}'. It serves: {', '.join(served)}. "
                    "Set server.model to one of these, if it is the target."
                )

    async def post(self, path: str, body: Mapping[str, Any], parse: Callable[[Any], Parsed]) -> Parsed:
        """Send a request until one server gives a reply that `parse` takes.

        Args:
            path: end of the URL, such as /chat/completions.
            body: JSON object.
            parse: turns the reply into a value; raises PassingError where it is not what was asked for.

        Raises:
            RefusedRequestError: the servers answer others, but not this request.
            ConfigError: they want another key, path or model.
            DataError: no server has given any good reply since the request was made.
        """
        failures: list[float] = []
        try:
            async for attempt in AsyncRetrying(
                stop=stop_after_attempt(self._config.attempts),
                wait=self._pause,
                retry=retry_if_exception_type(PassingError),
                reraise=True,
            ):
                with attempt:
                    return await self._try(path, body, parse, failures)
        except PassingError as error:
            tries = f"{self._config.attempts} tries, the last one: {error}"
            self._given_up += 1
            others_fare_well = self._last_success >= failures[-2:][0]  # since the try before the last one
            is_about_request = others_fare_well or (error.has_reply and self._given_up < _MOST_GIVEN_UP)
            if is_about_request:
                raise RefusedRequestError(tries, is_final=False) from error
            urls = ", ".join(address.url for address in self._addresses)
            raise DataError(
                f"no good reply from {urls} ({tries}). Look after the servers and run the same command again: all "
                "answers so far are kept."
            ) from error
        raise AssertionError("tenacity returns or raises")

    def _pause(self, state: RetryCallState) -> float:
        longest = wait_random_exponential(multiplier=self._config.backoff_seconds, max=_LONGEST_PAUSE_SECONDS)
        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.pause_seconds if isinstance(error, PassingError) else 0.0
        return max(longest(state), min(asked, _LONGEST_ASKED_PAUSE_SECONDS))

    async def _try(
        self, path: str, body: Mapping[str, Any], parse: Callable[[Any], Parsed], failures: list[float]
    ) -> Parsed:
        now = time.monotonic()
        # A server that failed rests for a while; where all rest, the one that has rested longest is tried.
        address = min(self._addresses, key=lambda one: (max(one.rests_until - now, 0.0), one.in_flight))
        address.in_flight += 1
        try:
            parsed = parse(await self._exchange(address, path, body))
        except PassingError as error:
            failures.append(time.monotonic())
            if not error.pause_seconds:
                self._rest(address)
            raise PassingError(
                f"{address.url}: {error}", has_reply=error.has_reply, pause_seconds=error.pause_seconds
            ) from error
        finally:
            address.in_flight -= 1
        address.failures, address.rests_until = 0, 0.0
        self._last_success, self._given_up = time.monotonic(), 0
        return parsed

    async def _exchange(self, address: _Address, path: str, body: Mapping[str, Any]) -> Any:
        timeout = self._config.timeout_seconds
        try:
            # httpx times single reads: a server that sends a byte now and then would never be given up.
            response = await asyncio.wait_for(self._client.post(address.url + path, json=body), timeout)
        except (asyncio.TimeoutError, httpx.TimeoutException) as error:
            raise PassingError(f"no reply within {timeout:g} s", has_reply=False) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PassingError(_described(error), has_reply=False) from error
        if response.status_code in _PASSING_STATUSES:
            raise PassingError(f"status {response.status_code} {_said(response)}", pause_seconds=_asked_pause(response))
        if response.status_code in _REQUEST_STATUSES:
            raise RefusedRequestError(f"{address.url}: status {response.status_code} {_said(response)}", is_final=True)
        if not response.is_success:
            raise ConfigError(
                f"{address.url}{path} replies with status {response.status_code} {_said(response)}. Look at "
                "server.urls (they end in /v1), server.model, server.api and the key in "
                f"${self._config.api_key_variable}."
            )
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise PassingError(f"the reply is no JSON ({error})") from error

    async def _served_models(self, address: _Address) -> list[str] | str:
        """Names of its models, none where the server does not tell; or why there is no server."""
        try:
            response = await asyncio.wait_for(self._client.get(f"{address.url}/models"), _CONNECT_SECONDS)
        except (asyncio.TimeoutError, httpx.HTTPError, httpx.InvalidURL) as error:
            self._rest(address)
            return _described(error)
        try:
            return [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            return []

    def _rest(self, address: _Address) -> None:
        address.failures += 1
        pause = min(self._config.backoff_seconds * 2.0 ** min(address.failures, 10), _LONGEST_PAUSE_SECONDS)
        address.rests_until = time.monotonic() + pause


def _described(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()


def _said(response: httpx.Response) -> str:
    """The server's own words on an error, shortened."""
    try:
        body = response.json()
        error = body.get("error", body)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        text = response.text
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def _asked_pause(response: httpx.Response) -> float:
    """Seconds of a Retry-After header; dates and nonsense are read as none."""
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0
