"""The server's process: its socket, its signals and its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence

import uvicorn

from .app import create_app
from .options import OptionError, Options, parse
from .service import Service

logger = logging.getLogger("ddtree.server")

EXIT_USAGE = 2
# Decoding is over when this begins to count: it bounds only clients that do not read what is already there.
SLOW_READER_SECONDS = 10
IDLE_CONNECTION_SECONDS = 30


class Server(uvicorn.Server):
    """uvicorn with our signal handling: it would die by the signal, and refuse connections while requests finish."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(options: Options) -> socket.socket:
    """The listening socket, opened first so that a taken port is a clear error and not a late one."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=512)
    except OSError as error:
        raise OptionError(
            f"cannot listen on {options.host} port {options.port}: {os.strerror(error.errno or 0)}; "
            f"`ss -ltnp 'sport = :{options.port}'` shows who has it"
        ) from error


async def _drain(service: Service, server: Server) -> None:
    """Lets accepted requests finish, while probes still get their 503, then ends the server."""
    scheduler = service.scheduler
    service.drain()
    logger.info("stopping: %d requests in flight will be finished, new ones are refused", scheduler.unfinished)
    while scheduler.unfinished and scheduler.alive:
        await asyncio.sleep(0.02)
    server.should_exit = True


async def _serve(service: Service, server: Server, sock: socket.socket) -> bool:
    """Serves until told to stop. True for an orderly stop, false where the engine failed."""
    loop = asyncio.get_running_loop()
    failed = asyncio.Event()
    draining: list[asyncio.Task[None]] = []

    def stop(signum: signal.Signals) -> None:
        if not draining:
            logger.info("received %s", signum.name)
            draining.append(asyncio.create_task(_drain(service, server)))

    def engine_failed() -> None:
        failed.set()
        server.should_exit = True

    def engine_failed_elsewhere() -> None:
        """Called on other threads, possibly after the loop has ended."""
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(engine_failed)

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop, signum)
    service.load(engine_failed_elsewhere)
    await server.serve(sockets=[sock])
    return not failed.is_set()


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Where a hang sits is worth more than that there is one: SIGUSR1 writes every thread's stack to stderr.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        sock = listen(options)
    except OptionError as error:
        logger.error("%s", error)
        return EXIT_USAGE
    service = Service(options)
    config = uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=IDLE_CONNECTION_SECONDS,
        timeout_graceful_shutdown=SLOW_READER_SECONDS,
    )
    host, port = sock.getsockname()[:2]
    logger.info("listening on http://%s:%d, pid %d", f"[{host}]" if ":" in host else host, port, os.getpid())
    orderly = asyncio.run(_serve(service, Server(config), sock))
    joined = service.close()
    status = 0 if orderly else 1
    logger.info("stopped")
    if not joined:
        # A thread is still inside torch (a stop while loading): ending the interpreter under it can crash.
        sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
