"""Asks the engine over loopback HTTP, in a thread of its own so that a slow answer never delays the supervisor."""

from __future__ import annotations

import dataclasses
import http.client
import json
import threading
import time
from typing import Any

from .environment import Settings

POLL_S = 0.5
# SGLang looks for a second before it says yes and for twenty before it says no; a shorter patience never sees either.
TIMEOUT_S = {"standalone": 5.0, "sglang": 30.0}
WATCH_S = {"standalone": 1.0, "sglang": 5.0}
# Kernels may be compiled for the first completion.
FIRST_COMPLETION_TIMEOUT_S = 600.0
MAX_REFUSALS = 5
PROMPTS = ("def main():\n", "The capital of France is", "1, 2, 3, 4,")
MAX_TOKENS = 8


class NoAnswer(Exception):
    """No usable answer; the text says what happened instead."""


@dataclasses.dataclass(frozen=True)
class Pulse:
    """One look at a serving engine. Progress is: not busy, or another `marker` than before."""

    busy: bool
    marker: object
    text: str


class Client:
    """HTTP to one address, whatever proxy the environment names."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.timeout = TIMEOUT_S[settings.engine]

    def request(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> tuple[int, bytes]:
        settings = self._settings
        connection = http.client.HTTPConnection(settings.probe_host, settings.port, timeout=timeout or self.timeout)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if settings.api_key:
            headers["Authorization"] = f"Bearer {settings.api_key}"
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            return response.status, response.read(1 << 20)
        except TimeoutError as error:
            raise NoAnswer(f"{path} gave no answer within {timeout or self.timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"{path}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def health(self) -> tuple[int, str]:
        status, body = self.request("GET", "/health")
        try:
            stage = json.loads(body)["stage"]
        except (ValueError, KeyError, TypeError):
            stage = ""
        return status, stage if isinstance(stage, str) else ""

    def complete(self, prompt: str) -> None:
        """One real completion. Raises NoAnswer unless it holds text."""
        body = {"model": self._settings.served_model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        status, raw = self.request("POST", "/v1/completions", body, FIRST_COMPLETION_TIMEOUT_S)
        shown = raw[:300].decode(errors="replace")
        if status != 200:
            raise NoAnswer(f"the completion was refused with HTTP {status}: {shown}")
        try:
            text = json.loads(raw)["choices"][0]["text"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise NoAnswer(f"the completion is not in the expected form: {shown}") from error
        if not isinstance(text, str) or not text:
            raise NoAnswer("the completion is empty")

    def pulse(self) -> Pulse:
        """SGLang: /health_generate is 200 only when a token came out, so a 200 is progress. Ours: the counters."""
        path = "/health_generate" if self._settings.engine == "sglang" else "/get_server_info"
        status, raw = self.request("GET", path)
        if status != 200:
            raise NoAnswer(f"{path} answers HTTP {status}: {raw[:200].decode(errors='replace')}")
        if self._settings.engine == "sglang":
            return Pulse(False, None, "tokens come")
        try:
            info = json.loads(raw)
            running, waiting = int(info["running_requests"]), int(info["waiting_requests"])
            tokens, finished = int(info["generated_tokens_total"]), int(info.get("finished_requests_total", 0))
        except (ValueError, KeyError, TypeError) as error:
            raise NoAnswer(f"{path} lacks the counters: {raw[:200].decode(errors='replace')}") from error
        load = f"{running} running, {waiting} waiting" if running + waiting else "idle"
        return Pulse(running + waiting > 0, (tokens, finished), f"{load}, {tokens} tokens since the start")


class Prober(threading.Thread):
    """Follows the engine from its start on. The supervisor reads the attributes; each is replaced as a whole."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(name="prober", daemon=True)
        self._client = Client(settings)
        self._settings = settings
        self.stage = "waiting for the port to open"
        self.ready = False
        self.refused = ""  # why the engine will never be ready
        self.pulse: Pulse | None = None
        self.trouble = ""  # why the last look at a serving engine failed
        self.progress_at = time.monotonic()

    def run(self) -> None:
        refusals = 0
        while not self.ready:
            try:
                status, stage = self._client.health()
                if status == 200:
                    self.stage = "first completion"
                    self._client.complete(PROMPTS[refusals % len(PROMPTS)])
                    self.progress_at = time.monotonic()
                    self.ready = True
                    break
                self.stage = stage or f"/health answers HTTP {status}"
            except NoAnswer as error:
                if self.stage == "first completion":
                    refusals += 1
                    if refusals >= MAX_REFUSALS:
                        self.refused = str(error)
                        return
            time.sleep(POLL_S)
        self._watch()

    def _watch(self) -> None:
        marker: object = None
        # Several looks must fit into the time after which no progress means a hang.
        interval = min(WATCH_S[self._settings.engine], self._settings.no_progress_s / 4)
        while True:
            time.sleep(interval)
            try:
                pulse = self._client.pulse()
            except NoAnswer as error:
                self.trouble = str(error)
                continue
            self.trouble = ""
            self.pulse = pulse
            if not pulse.busy or pulse.marker != marker:
                self.progress_at = time.monotonic()
            marker = pulse.marker
