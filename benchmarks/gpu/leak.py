"""A thousand requests with random lengths, stops, aborts and sampling settings: the server must end as it began."""

from __future__ import annotations

import http.client
import json
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from client import Prompt, Server, as_input


def _request(rng: random.Random, prompts: Sequence[Prompt]) -> tuple[dict[str, Any], float | None]:
    """Body and, for requests that are aborted, after how many seconds."""
    prompt = rng.choice(prompts)
    prompt = prompt[: rng.choice([1, 5, 40, 200, len(prompt)])]
    sampling: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, 7, 16, 40, 100, 200])}
    sampling["temperature"] = rng.choice([0, 0, 0.3, 0.7, 1.0])
    if sampling["temperature"]:
        sampling.update(rng.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.95, "min_p": 0.05}]))
    sampling["ignore_eos"] = rng.random() < 0.5
    if rng.random() < 0.2:
        sampling["stop"] = rng.choice([["\n"], ["def "], ["self"], [")", ":"]])
    if rng.random() < 0.1:
        sampling["stop_token_ids"] = [rng.randrange(4, 300)]
    if rng.random() < 0.1:
        sampling["frequency_penalty"] = 0.5
    stream = rng.random() < 0.3
    return {**as_input(prompt), "sampling_params": sampling, "stream": stream}, (
        rng.uniform(0.0, 0.15) if stream and rng.random() < 0.6 else None
    )


def _send(server: Server, body: dict[str, Any], abort_after: float | None) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        if abort_after is not None:
            time.sleep(abort_after)
            return "aborted"  # closing the connection aborts the request
        reply = connection.getresponse()
        reply.read()
        return f"http {reply.status}"
    finally:
        connection.close()


def hammer(
    server: Server, prompts: Sequence[Prompt], requests: int, seed: int, concurrency: int = 24
) -> dict[str, Any]:
    """Counters before and after; `leaked` is empty when every counter is back at its start."""
    server.flush()
    before = server.internal_state()["ddtree"]
    rng = random.Random(seed)
    work: queue.Queue[tuple[dict[str, Any], float | None]] = queue.Queue()
    for _ in range(requests):
        work.put(_request(rng, prompts))
    outcomes: Counter[str] = Counter()
    lock = threading.Lock()

    def loop() -> None:
        while True:
            try:
                body, abort_after = work.get_nowait()
            except queue.Empty:
                return
            try:
                outcome = _send(server, body, abort_after)
            except OSError as error:
                outcome = f"error {type(error).__name__}"
            with lock:
                outcomes[outcome] += 1

    start = time.perf_counter()
    threads = [threading.Thread(target=loop) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    time.sleep(2.0)  # aborts are noticed by the scheduler's next rounds
    alive = server.alive()
    after: dict[str, Any] = {}
    if alive:
        server.flush()
        after = server.internal_state()["ddtree"]
    counters = [name for name in ("free_kv_slots", "free_recurrent_states") if name in before]
    leaked = {name: before[name] - after.get(name, -1) for name in counters if before[name] != after.get(name)}
    return {
        "requests": requests,
        "seconds": round(seconds, 2),
        "outcomes": dict(outcomes),
        "alive": alive,
        "before": {name: before[name] for name in counters},
        "after": {name: after.get(name) for name in counters},
        "leaked": leaked,
    }
