"""A running SGLang server seen by the test kit: requests at a concurrency, counters, cache flush (standard library)."""

from __future__ import annotations

import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Prompt = str | list[int]


def as_input(prompt: Prompt) -> dict[str, Any]:
    return {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}


@dataclass(frozen=True)
class Server:
    name: str
    port: int

    def get(self, path: str, timeout: float = 20.0) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=timeout) as reply:
            body = reply.read()
        return json.loads(body) if body else None

    def post(self, path: str, body: dict[str, Any] | None, timeout: float = 120.0) -> bytes:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return bytes(reply.read())

    def generate(self, prompt: Prompt, timeout: float = 240.0, **sampling: Any) -> dict[str, Any]:
        reply = self.post("/generate", {**as_input(prompt), "sampling_params": sampling}, timeout)
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def margin(self, token_ids: list[int]) -> float:
        """The log-probability gap between the server's two best tokens after `token_ids`."""
        body = {
            "input_ids": token_ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        best, second = json.loads(self.post("/generate", body))["meta_info"]["output_top_logprobs"][0][:2]
        return float(best[0]) - float(second[0])

    def flush(self) -> None:
        """Empty the prefix cache; the server refuses while requests run, so try until it is idle."""
        for _ in range(40):
            try:
                self.post("/flush_cache", None, timeout=20)
                return
            except urllib.error.HTTPError:
                time.sleep(0.25)
        raise RuntimeError(f"{self.name}: the cache could not be flushed within 10 s; requests still run")

    def internal_state(self) -> dict[str, Any]:
        states = self.get("/get_server_info")["internal_states"]
        state: dict[str, Any] = states[0]
        return state

    def alive(self) -> bool:
        try:
            self.get("/health", timeout=10)
        except OSError:
            return False
        return True


@dataclass(frozen=True)
class Batch:
    """What one pass over the prompts at a concurrency gave."""

    token_ids: list[list[int]]
    verify_steps: list[int]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)

    @property
    def acceptance(self) -> float:
        """Tokens per verify step over all requests (prefill's own token is not a verify step's)."""
        steps = sum(self.verify_steps)
        return sum(len(ids) - 1 for ids in self.token_ids) / steps if steps else 1.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 4),
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "acceptance": round(self.acceptance, 4),
            "acceptance_per_request": [
                round((len(ids) - 1) / steps, 4)
                for ids, steps in zip(self.token_ids, self.verify_steps, strict=True)
                if steps
            ],
        }


def run_prompts(server: Server, prompts: Sequence[Prompt], max_new_tokens: int, concurrency: int) -> Batch:
    """Greedy continuations of all prompts, `concurrency` requests in flight."""
    server.flush()
    waiting: queue.Queue[int] = queue.Queue()
    for number in range(len(prompts)):
        waiting.put(number)
    answers: list[dict[str, Any] | None] = [None] * len(prompts)
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                answers[number] = server.generate(
                    prompts[number], temperature=0, max_new_tokens=max_new_tokens, ignore_eos=True
                )
            except (OSError, ValueError) as error:
                errors.append(error)

    start = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if errors:
        raise RuntimeError(f"{server.name} at concurrency {concurrency}: {errors[0]!r}")
    done = [answer for answer in answers if answer is not None]
    return Batch(
        [list(answer["output_ids"]) for answer in done],
        [int(answer["meta_info"].get("spec_verify_ct") or 0) for answer in done],
        seconds,
    )
