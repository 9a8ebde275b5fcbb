"""A slot's entry point: starts the engine, tells systemd when it really serves, watches it, stops it.

Under systemd (`Type=notify`) and by hand alike. This process stays the parent. It says

* READY=1 only after a completion with content came back,
* EXTEND_TIMEOUT_USEC while the starting engine computes or reads,
* WATCHDOG=1 while the engine is idle or tokens advance. Requests that run without a token for DDTREE_NO_PROGRESS_S
  seconds, or an engine that does not answer for as long, are a hang: one line says so, then WATCHDOG=trigger lets
  systemd kill the unit with Result=watchdog. Without a watchdog the engine is killed here and the exit status is 1.

When the engine ends by itself, its status or signal is printed and this process ends with it, never with 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from ddtree_engine.supervisor import toolkit
from ddtree_engine.supervisor.activity import Activity
from ddtree_engine.supervisor.environment import HELP, EnvironmentProblem, Settings, read
from ddtree_engine.supervisor.notify import Notifier
from ddtree_engine.supervisor.probe import Prober

EXIT_ENVIRONMENT = 78
TICK_S = 0.25
STATUS_S = 2.0
EXTEND_S = 2.0
# How long systemd may take to act on WATCHDOG=trigger before the engine is killed from here.
TRIGGER_PATIENCE_S = 10.0
STACK_DUMP_S = 0.5
_PR_SET_PDEATHSIG = 1
_OURS_ALONE = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def say(message: str) -> None:
    """One line in the log. A log that went away is no reason to end the engine."""
    with contextlib.suppress(OSError):
        print(f"ddtree-launch: {message}", file=sys.stderr, flush=True)


class Supervisor:
    """One life of one engine."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._environ = environ
        self._notifier = Notifier(environ)
        self._stop_signal: signal.Signals | None = None
        self._stopping = self._impatient = False
        self._began = time.monotonic()
        self._status_text, self._status_at = "", 0.0
        self._extended_at = self._pinged_at = 0.0
        self._load_progress_at = self._began

    def run(self) -> int:
        """Until the engine has ended. The exit status of the process."""
        taken = _port_taken(self._settings)
        if taken:
            say(f"error: {taken}")
            return 1
        wakeup = self._handle_signals()
        say(f"starting the {self._settings.engine} engine of slot {self._settings.slot}: {self._command_text()}")
        with self._spawn() as child:
            self._child = child
            try:
                return self._follow(child, wakeup)
            finally:
                # Helpers of the engine may outlive it; under systemd the cgroup is cleared, by hand only this does it.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)

    # -- the pieces ----------------------------------------------------------------------------------------------

    def _command_text(self) -> str:
        return " ".join(self._settings.command[1:])

    def _spawn(self) -> subprocess.Popen[bytes]:
        """The engine: own process group (a Ctrl-C here is passed on once, by us), and never without its parent."""
        environ = {name: value for name, value in self._environ.items() if name not in _OURS_ALONE}
        environ |= toolkit.environment(environ)
        libc = ctypes.CDLL(None, use_errno=True)

        def die_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        return subprocess.Popen(
            self._settings.command,
            stdin=subprocess.DEVNULL,
            env=environ,
            process_group=0,
            preexec_fn=die_with_parent,
        )

    def _handle_signals(self) -> socket.socket:
        """A socket that becomes readable on every signal, SIGCHLD included: nothing is noticed late."""
        reading, writing = socket.socketpair()
        for end in (reading, writing):
            end.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        self._wakeup_writer = writing  # kept open as long as this object

        def stop(number: int, frame: FrameType | None) -> None:
            # Whoever presses Ctrl-C twice does not want to wait; a manager that repeats itself does.
            self._impatient = self._stopping and number == signal.SIGINT
            self._stop_signal = signal.Signals(number)

        for number in _STOP_SIGNALS:
            signal.signal(number, stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        return reading

    def _follow(self, child: subprocess.Popen[bytes], wakeup: socket.socket) -> int:
        prober = Prober(self._settings)
        activity = Activity(child.pid, in_unit=self._notifier.connected)
        prober.start()
        ready = False
        while True:
            status = child.poll()
            if status is not None:
                return self._ended(status, ready)
            now = time.monotonic()
            if self._stop_signal and not self._stopping:
                self._begin_stop(child)
            if self._impatient:
                say("error: stopped at once, requests in flight are lost")
                _kill(child)
                return 1
            if self._stopping:
                self._ping(now)
            elif ready:
                if not self._serving(prober, now):
                    return self._hung(child, prober)
            elif prober.ready:
                ready = True
                text = f"ready after {now - self._began:.1f} s"
                say(text)
                self._notifier.ready(f"serving {self._settings.served_model}: {text}")
                self._ping(now)
            elif prober.refused or not self._loading(prober, activity, now):
                return self._never_ready(child, prober)
            if select.select([wakeup], [], [], TICK_S)[0]:
                with contextlib.suppress(BlockingIOError):
                    wakeup.recv(4096)

    # -- starting ------------------------------------------------------------------------------------------------

    def _loading(self, prober: Prober, activity: Activity, now: float) -> bool:
        """Keeps the start alive while there is progress; false when there has been none for too long."""
        limit = self._settings.load_no_progress_s
        if activity.busy(now):
            self._load_progress_at = now
            if now - self._extended_at >= EXTEND_S:
                self._extended_at = now
                # A little more than our own patience, so that the line below is printed before systemd acts.
                self._notifier.extend_timeout(limit + 30)
        self._status(f"starting for {now - self._began:.0f} s: {prober.stage}", now)
        return now - self._load_progress_at < limit

    def _never_ready(self, child: subprocess.Popen[bytes], prober: Prober) -> int:
        if prober.refused:
            reason = f"the engine is up but serves no completion: {prober.refused}"
        else:
            reason = (
                f"the engine neither computed nor read anything for {self._settings.load_no_progress_s:g} s "
                f"while starting; stage: {prober.stage}"
            )
        self._dump_stacks(child)
        say(f"error: {reason}")
        self._notifier.status(reason)
        _kill(child)
        return 1

    # -- serving -------------------------------------------------------------------------------------------------

    def _serving(self, prober: Prober, now: float) -> bool:
        """Pings while the engine is idle or tokens advance; false when it hangs."""
        if now - prober.progress_at >= self._settings.no_progress_s:
            return False
        self._ping(now)
        text = prober.trouble or (prober.pulse.text if prober.pulse else "ready")
        self._status(f"serving {self._settings.served_model}: {text}", now)
        return True

    def _hung(self, child: subprocess.Popen[bytes], prober: Prober) -> int:
        seconds = time.monotonic() - prober.progress_at
        if prober.trouble or prober.pulse is None:
            reason = f"the engine has not answered for {seconds:.0f} s: {prober.trouble or 'nothing came back'}"
        else:
            reason = f"requests ran {seconds:.0f} s without a token: {prober.pulse.text}"
        self._dump_stacks(child)
        say(f"error: the engine of slot {self._settings.slot} hangs: {reason}")
        if self._notifier.watchdog_s is not None:
            self._notifier.hang(f"hung: {reason}")
            deadline = time.monotonic() + TRIGGER_PATIENCE_S
            while time.monotonic() < deadline and child.poll() is None:
                time.sleep(TICK_S)
        _kill(child)
        return 1

    def _dump_stacks(self, child: subprocess.Popen[bytes]) -> None:
        """Where it hangs. Our own server prints its stacks on SIGUSR1; other engines would die of it."""
        if self._settings.engine == "standalone" and _catches(child.pid, signal.SIGUSR1):
            child.send_signal(signal.SIGUSR1)
            time.sleep(STACK_DUMP_S)

    def _ping(self, now: float) -> None:
        watchdog = self._notifier.watchdog_s
        if watchdog is not None and now - self._pinged_at >= watchdog / 4:
            self._pinged_at = now
            self._notifier.alive()

    def _status(self, text: str, now: float) -> None:
        if text != self._status_text and now - self._status_at >= STATUS_S:
            self._status_text, self._status_at = text, now
            self._notifier.status(text)

    # -- the end -------------------------------------------------------------------------------------------------

    def _begin_stop(self, child: subprocess.Popen[bytes]) -> None:
        assert self._stop_signal is not None
        self._stopping = True
        say(f"received {self._stop_signal.name}: asking the engine to finish its requests and stop")
        self._notifier.stopping("stopping: requests in flight are finished")
        child.terminate()

    def _ended(self, status: int, ready: bool) -> int:
        after = f"after {time.monotonic() - self._began:.1f} s"
        # SGLang ends itself by SIGKILL when it is told to stop.
        usual = (0, -signal.SIGTERM, 128 + signal.SIGTERM, *([-signal.SIGKILL] if self._is_sglang else []))
        if self._stopping and status in usual:
            say(f"the engine has stopped {after}")
            return 0
        moment = "while it was being stopped" if self._stopping else "while serving" if ready else "before it was ready"
        if status < 0:
            cause = f"the engine was ended by signal {_signal_text(-status)} {after}, {moment}"
        elif status == 0:
            cause = f"the engine ended by itself with exit status 0 {after}, {moment}; it must keep running"
        else:
            cause = f"the engine ended with exit status {status} {after}, {moment}"
        say(f"error: {cause}")
        self._notifier.status(cause)
        return 128 - status if status < 0 else status or 1

    @property
    def _is_sglang(self) -> bool:
        return self._settings.engine == "sglang"


def _signal_text(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return str(number)
    hint = " (often the kernel's out-of-memory killer: see the kernel log)" if number == signal.SIGKILL else ""
    return f"{number}, {name}{hint}"


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for the signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        mask = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(mask, 16) >> (number - 1) & 1)


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _port_taken(settings: Settings) -> str:
    """Why the engine could not listen, or "". Checked first, or a stranger on the port might pass for our engine."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((settings.host, settings.port))
            probe.listen(1)
    except OSError as error:
        return (
            f"slot {settings.slot} cannot listen on {settings.host} port {settings.port}: "
            f"{os.strerror(error.errno or 0)}; `ss -ltnp 'sport = :{settings.port}'` shows who has it"
        )
    return ""


def main() -> int:
    if len(sys.argv) > 1:
        print(HELP, end="", file=sys.stdout if sys.argv[1:] in (["-h"], ["--help"]) else sys.stderr)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    try:
        settings = read(os.environ)
    except EnvironmentProblem as error:
        for problem in error.problems:
            say(f"error: {problem}")
        say("`python -m ddtree_engine.launch --help` lists every variable")
        return EXIT_ENVIRONMENT
    return Supervisor(settings, os.environ).run()


if __name__ == "__main__":
    sys.exit(main())
