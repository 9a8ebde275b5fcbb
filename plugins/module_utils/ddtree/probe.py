"""HTTP to an engine on this host: loopback only, never through a proxy, never following what the environment says."""

from __future__ import annotations

import dataclasses
import http.client
import json
import socket
from typing import Any


class ProbeError(Exception):
    """No usable answer: connection refused, time-out, broken reply. The text says which."""


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise ProbeError(f"the answer is not JSON: {self.body[:120]!r}") from error

    def brief(self) -> str:
        return f"HTTP {self.status} {self.body[:160].decode(errors='replace').strip()}"


@dataclasses.dataclass(frozen=True)
class Engine:
    """An engine's address on this host. `timeout` (s) bounds one request."""

    port: int
    host: str = "127.0.0.1"
    api_key: str = ""
    timeout: float = 10.0

    def listening(self) -> bool:
        """Whether anything accepts connections on the port. Raises ProbeError, saying why, where nothing does."""
        try:
            with socket.create_connection((self.host, self.port), timeout=2.0):
                return True
        except OSError as error:
            raise ProbeError(f"connecting to {self.host}:{self.port}: {error}") from error

    def request(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout or self.timeout)
        headers = {"Accept": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            return Answer(response.status, response.read(4 << 20))
        except TimeoutError as error:
            raise ProbeError(f"{method} {path}: no answer within {timeout or self.timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ProbeError(f"{method} {path}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def get(self, path: str, timeout: float | None = None) -> Answer:
        return self.request("GET", path, timeout=timeout)

    def complete(self, model: str, prompt: str, max_tokens: int, timeout: float | None = None) -> str:
        """Text of one greedy completion. Raises ProbeError where the engine gives none."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        answer = self.request("POST", "/v1/completions", body, timeout)
        if answer.status != 200:
            raise ProbeError(f"completion refused: {answer.brief()}")
        value = answer.json()
        try:
            text = value["choices"][0]["text"]
        except (KeyError, IndexError, TypeError) as error:
            raise ProbeError(f"completion without text: {answer.brief()}") from error
        if not isinstance(text, str):
            raise ProbeError(f"completion without text: {answer.brief()}")
        return text
