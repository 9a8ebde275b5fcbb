"""One completion request from its first byte to its last, with the client watched all the while."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError
from .generation import Delta
from .replies import Reply, event
from .scheduler import Event, Job
from .schema import Request, parse, parse_json
from .service import Service

logger = logging.getLogger("ddtree.server")

MAX_BODY = 16 << 20
MAX_DISCARDED = 128 << 20
CLIENT_GONE = 499
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def read_body(request: HttpRequest) -> bytes:
    """The body. Beyond MAX_BODY nothing is kept, and what is still to come is read only up to MAX_DISCARDED: a client
    that is cut off while it sends sees a broken connection instead of the error."""
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size <= MAX_BODY:
            pieces.append(piece)
        elif size > MAX_DISCARDED:
            break
        else:
            pieces.clear()
    if size > MAX_BODY:
        message = f"the body is larger than {MAX_BODY} bytes"
        raise ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
    return b"".join(pieces)


def _headers(job_id: str, ignored: tuple[str, ...]) -> dict[str, str]:
    headers = {"X-Request-Id": job_id}
    if ignored:
        names = ", ".join(name[:60] for name in ignored[:20])
        # The names come from the client: nothing but printable ASCII may reach a header.
        headers["X-DDTree-Ignored"] = "".join(letter if " " <= letter <= "~" else "?" for letter in names)
    return headers


class Exchange:
    """Submits one job and hands out its events; leaving the context cancels whatever is still to come."""

    def __init__(self, service: Service, request: HttpRequest, job_id: str) -> None:
        self._service = service
        self._request = request
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._job: Job | None = None
        self._gone: asyncio.Task[None] | None = None
        self.id = job_id

    def submit(self, request: Request, prompt: list[int]) -> None:
        job = self._service.job(self.id, request, prompt, self._deliver)
        self._service.scheduler.submit(job)
        self._job = job
        self._gone = asyncio.create_task(self._watch_client())

    def _deliver(self, item: Event) -> None:
        """Called on the decoding thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is ending anyway
            self._loop.call_soon_threadsafe(self._events.put_nowait, item)

    async def _watch_client(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass

    async def next(self) -> Delta:
        """The next delta. Raises ApiError where decoding failed and ClientGone as soon as nobody listens."""
        assert self._gone is not None
        item = asyncio.create_task(self._events.get())
        try:
            await asyncio.wait({item, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if self._gone.done():
                raise ClientGone
        finally:
            if not item.done():
                item.cancel()
        result = item.result()
        if isinstance(result, ApiError):
            raise result
        return result

    def close(self) -> None:
        if self._gone is not None:
            self._gone.cancel()
        if self._job is not None:
            self._service.scheduler.cancel(self._job)


class Stream(Response):
    """Server-sent events. `finish` runs in the end, whatever ended the connection, even before the first event."""

    def __init__(self, events: AsyncIterator[bytes], headers: dict[str, str], finish: Callable[[], None]) -> None:
        super().__init__(None, media_type="text/event-stream", headers=headers | SSE_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._finish = finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for piece in self._events:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._finish()


class Completions:
    """Handler of both completion endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, http: HttpRequest, *, chat: bool) -> Response:
        began = time.monotonic()
        service = self._service
        job_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        exchange = Exchange(service, http, job_id)
        record = _Record(service, job_id, began)
        handed_over = False

        def finish() -> None:
            exchange.close()
            record.write()

        try:
            decoder = service.require_ready()
            body = parse_json(await read_body(http))
            name = service.options.served_model_name
            request = parse(body, chat=chat, model=name, vocab_size=decoder.vocab_size)
            prompt = await asyncio.to_thread(service.encode, request)
            reply = Reply(job_id, chat, name, prompt, request.return_token_ids, request.include_usage)
            record.reply = reply
            exchange.submit(request, prompt)
            service.metrics.prompt_tokens.inc(len(prompt))
            headers = _headers(job_id, request.ignored)
            # The first delta is awaited before the status line goes out, so that what fails early fails as an error.
            first = await exchange.next()
            reply.count(first)
            if request.stream:
                handed_over = True
                return Stream(self._stream(exchange, reply, first, record), headers, finish)
            deltas = [first]
            while deltas[-1].finish is None:
                deltas.append(await exchange.next())
            reply.count(deltas[-1])
            record.status = 200
            return JSONResponse(reply.whole(deltas), headers=headers)
        except ClientGone:
            record.status = CLIENT_GONE
            return Response(status_code=CLIENT_GONE)  # nobody reads it
        except ApiError as error:
            record.status = error.status
            error.headers.setdefault("X-Request-Id", job_id)
            raise
        except Exception:
            record.status = 500
            raise
        finally:
            if not handed_over:
                finish()

    async def _stream(self, exchange: Exchange, reply: Reply, delta: Delta, record: _Record) -> AsyncIterator[bytes]:
        try:
            for piece in reply.opening():
                yield piece
            while True:
                for piece in reply.chunks(delta):
                    yield piece
                if delta.finish is not None:
                    break
                delta = await exchange.next()
                reply.count(delta)
            record.status = 200
            for piece in reply.closing():
                yield piece
        except ClientGone:
            record.status = CLIENT_GONE
        except ApiError as error:  # too late for a status line: an error event, and no [DONE] after it
            record.status = error.status
            yield event(error.body())


class _Record:
    """Counts one request and writes its log line: sizes and times, never contents."""

    def __init__(self, service: Service, job_id: str, began: float) -> None:
        self._service = service
        self._id = job_id
        self._began = began
        self.reply: Reply | None = None
        self.status = CLIENT_GONE  # unless something better is known: an abandoned stream ends here

    def write(self) -> None:
        metrics = self._service.metrics
        metrics.requests.labels(str(self.status)).inc()
        seconds = time.monotonic() - self._began
        reply = self.reply
        if self.status == 200:
            metrics.request_seconds.observe(seconds)
        if reply is None:
            logger.info("request %s: HTTP %d after %.3f s", self._id, self.status, seconds)
            return
        logger.info(
            "request %s: HTTP %d, %s after %.3f s, %d prompt tokens, %d tokens in %d steps",
            self._id, self.status, reply.finish or "unfinished", seconds, len(reply.prompt), reply.completion_tokens,
            reply.verify_steps,
        )  # fmt: skip
