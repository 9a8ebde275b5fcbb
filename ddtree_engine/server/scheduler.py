"""The decoding thread: takes requests in order, decodes up to `max_concurrent` of them in turn, one step each.

An exception while decoding ends one request with HTTP 500. Whether the engine itself is broken (a GPU that fell over
fails every request from then on) is settled at once by `self_check`: if that fails too, the thread ends and says so.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from .errors import ApiError, invalid
from .generation import Delta, Generation
from .metrics import Metrics

logger = logging.getLogger("ddtree.server")

Event = Delta | ApiError


@dataclasses.dataclass(eq=False)
class Job:
    """A request on its way through the scheduler. `start` and `deliver` are called on the decoding thread."""

    id: str
    start: Callable[[], Generation]
    deliver: Callable[[Event], None]
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    cancelled: bool = False
    generation: Generation | None = None


class Scheduler:
    """Bounded queue plus round robin. One thread owns the model; everything else only hands over and waits."""

    def __init__(self, max_concurrent: int, max_queue: int, metrics: Metrics, self_check: Callable[[], None]) -> None:
        self._max_concurrent = max_concurrent
        self._max_queue = max_queue
        self._metrics = metrics
        self._self_check = self_check
        self._condition = threading.Condition()
        self._waiting: collections.deque[Job] = collections.deque()
        self._active: collections.deque[Job] = collections.deque()
        self._stopping = False
        self._step_began: float | None = None
        self._broken: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._main, name="decoder", daemon=True)

    # -- called from the event loop ------------------------------------------------------------------------------

    def start(self, broken: Callable[[], object]) -> None:
        """Starts decoding. `broken` is called on the decoding thread if the engine turns out to be beyond use."""
        self._broken = broken
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queues `job`. Raises ApiError (429) when the queue is full."""
        with self._condition:
            # A free place in the batch counts too: the queue is for those who really have to wait.
            free = self._max_concurrent - len(self._active)
            if len(self._waiting) >= self._max_queue + max(free, 0):
                raise ApiError(
                    429,
                    f"the server is full: {len(self._active)} requests are decoded and {len(self._waiting)} wait; "
                    "try again later",
                    code="queue_full",
                    headers={"Retry-After": "1"},
                )
            self._waiting.append(job)
            self._gauges()
            self._condition.notify()

    def cancel(self, job: Job) -> None:
        """Forgets `job`: at once while it waits, else before its next step. Nothing more is delivered for it."""
        with self._condition:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)
            self._gauges()
            self._condition.notify()

    def stop(self) -> None:
        """Ends the thread after the step in progress. Sessions still open are closed."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    @property
    def running(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def unfinished(self) -> int:
        with self._condition:
            return len(self._active) + len(self._waiting)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def step_seconds(self) -> float:
        """How long the step in progress has been running; 0 between steps."""
        began = self._step_began
        return time.monotonic() - began if began is not None else 0.0

    # -- the decoding thread -------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._run()
        except Exception:
            logger.exception("the start-up decode fails now too")
            logger.critical("the engine is broken: a request failed and so does the start-up decode; stopping")
            with self._condition:
                left = [*self._active, *self._waiting]
                self._active.clear()
                self._waiting.clear()
            for job in left:
                job.deliver(ApiError(500, "the engine broke and is being stopped", code="engine_broken"))
            self._broken()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._waiting or self._active or self._stopping):
                    self._condition.wait()
                if self._stopping:
                    break
                while self._waiting and len(self._active) < self._max_concurrent:
                    self._active.append(self._waiting.popleft())
                self._gauges()
                job = self._active[0]
            finished = self._turn(job)
            with self._condition:
                self._active.popleft()
                if not finished:
                    self._active.append(job)
                self._gauges()
        for job in self._active:
            self._close(job)

    def _turn(self, job: Job) -> bool:
        """One step of one request; true when it is over. Raises only where the engine is broken."""
        if job.cancelled:
            self._close(job)
            self._metrics.finished_total += 1
            return True
        event: Event
        self._step_began = time.monotonic()
        try:
            if job.generation is None:
                job.generation = job.start()
                self._metrics.queue_seconds.observe(self._step_began - job.arrived)
            event = job.generation.advance()
        except ValueError as error:
            if job.generation is None:  # the engine refuses the request itself
                event = invalid(str(error))
            else:
                event = self._internal_error(job)
        except Exception:
            event = self._internal_error(job)
        else:
            self._metrics.step(len(event.tokens), job.generation.nodes)
            if event.verify_steps == 1:
                self._metrics.first_token_seconds.observe(time.monotonic() - job.arrived)
        finally:
            self._step_began = None
        finished = isinstance(event, ApiError) or event.finish is not None
        if finished:
            self._close(job)
            self._metrics.finished_total += 1
        if not job.cancelled:
            job.deliver(event)
        if isinstance(event, ApiError) and event.status == 500:
            self._self_check()
        return finished

    def _internal_error(self, job: Job) -> ApiError:
        logger.exception("request %s failed while decoding", job.id)
        return ApiError(500, f"decoding failed; the server's log has the reason under {job.id}", code="decode_failed")

    def _close(self, job: Job) -> None:
        generation, job.generation = job.generation, None
        if generation is None:
            return
        try:
            generation.close()
        except Exception:
            logger.exception("closing the session of request %s failed", job.id)

    def _gauges(self) -> None:
        self._metrics.running.set(len(self._active))
        self._metrics.waiting.set(len(self._waiting))
