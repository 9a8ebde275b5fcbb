"""Prometheus metrics and the running totals that /get_server_info reports."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One registry per server. The decoding thread and the event loop both write; each metric has its own lock."""

    def __init__(self) -> None:
        disable_created_metrics()  # a creation time per series helps nobody here and doubles the page
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "ddtree_requests",
            "Completion requests answered, by HTTP status (499: the client went away)",
            ["status"],
            registry=registry,
        )
        self.prompt_tokens = Counter("ddtree_prompt_tokens", "Prompt tokens of accepted requests", registry=registry)
        self.generated_tokens = Counter("ddtree_generated_tokens", "Tokens generated", registry=registry)
        self.verify_steps = Counter("ddtree_verify_steps", "Verify passes of the target model", registry=registry)
        self.verified_nodes = Counter(
            "ddtree_verified_nodes", "Draft nodes checked by verify passes", registry=registry
        )
        self.accepted_length = Histogram(
            "ddtree_accepted_length",
            "Tokens committed by one verify pass",
            buckets=[*range(1, 17), 24, 32],
            registry=registry,
        )
        self.running = Gauge("ddtree_running_requests", "Requests being decoded", registry=registry)
        self.waiting = Gauge("ddtree_waiting_requests", "Requests waiting for their turn", registry=registry)
        self.ready = Gauge("ddtree_ready", "1 once a real decode has succeeded and until draining", registry=registry)
        self.queue_seconds = Histogram(
            "ddtree_queue_seconds", "Time a request waited before decoding began", buckets=SECONDS, registry=registry
        )
        self.first_token_seconds = Histogram(
            "ddtree_first_token_seconds", "Time from arrival to first token", buckets=SECONDS, registry=registry
        )
        self.request_seconds = Histogram(
            "ddtree_request_seconds", "Time from arrival to last token", buckets=SECONDS, registry=registry
        )
        # Exact integers beside the floats above, for /get_server_info. Written by the decoding thread alone.
        self.generated_total = 0
        self.steps_total = 0
        self.finished_total = 0

    def step(self, tokens: int, nodes: int) -> None:
        self.generated_total += tokens
        self.steps_total += 1
        self.generated_tokens.inc(tokens)
        self.verify_steps.inc()
        self.verified_nodes.inc(nodes)
        self.accepted_length.observe(tokens)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verify pass since the start; None before the first one."""
        return round(self.generated_total / self.steps_total, 4) if self.steps_total else None

    def render(self) -> bytes:
        return generate_latest(self.registry)
