"""Messages to the service manager (sd_notify), without any library. By hand, where there is none, they go nowhere."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class Notifier:
    """Speaks to the socket that $NOTIFY_SOCKET names. `watchdog_s` is None where no watchdog watches this process."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # "@name" is an abstract socket, whose real name begins with a NUL.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self.watchdog_s = _watchdog(environ) if address else None

    @property
    def connected(self) -> bool:
        return self._socket is not None

    def send(self, **fields: str) -> None:
        """One datagram of NAME=value lines. A manager that went away is no reason to end the engine."""
        if self._socket is None:
            return
        lines = "\n".join(f"{name}={' '.join(value.split())}" for name, value in fields.items())
        try:
            self._socket.sendto(lines.encode(), self._address)
        except OSError:
            return

    def ready(self, status: str) -> None:
        self.send(READY="1", STATUS=status)

    def status(self, text: str) -> None:
        self.send(STATUS=text)

    def extend_timeout(self, seconds: float) -> None:
        """Asks for at least `seconds` more, from now, for the start or stop in progress."""
        self.send(EXTEND_TIMEOUT_USEC=str(int(seconds * 1_000_000)))

    def stopping(self, status: str) -> None:
        self.send(STOPPING="1", STATUS=status)

    def alive(self) -> None:
        self.send(WATCHDOG="1")

    def hang(self, status: str) -> None:
        """Fires the watchdog now: the manager kills the unit with Result=watchdog."""
        self.send(STATUS=status)
        self.send(WATCHDOG="trigger")


def _watchdog(environ: Mapping[str, str]) -> float | None:
    try:
        microseconds = int(environ.get("WATCHDOG_USEC", ""))
        meant_for = int(environ.get("WATCHDOG_PID", "") or os.getpid())
    except ValueError:
        return None
    return microseconds / 1_000_000 if microseconds > 0 and meant_for == os.getpid() else None
