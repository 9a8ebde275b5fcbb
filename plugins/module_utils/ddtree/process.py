"""The one way to run another program on a host."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess


@dataclasses.dataclass(frozen=True)
class Result:
    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.code == 0

    def explain(self) -> str:
        """One line for people: what was run, how it ended, its last words."""
        words = (self.err.strip() or self.out.strip()).splitlines()
        return f"`{' '.join(self.argv)}` ended with status {self.code}" + (f": {words[-1]}" if words else "")


class CommandError(RuntimeError):
    """A command that had to succeed did not."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.explain())
        self.result = result


def run(
    *argv: str,
    check: bool = True,
    timeout: float | None = 60.0,
    env: dict[str, str] | None = None,
    stdin: str | None = None,
) -> Result:
    """Run `argv` without a shell, in the C locale, and collect its output.

    Raises CommandError when `check` is set and the status is not 0. A missing program has status 127, one that
    cannot be run 126, one that outlives `timeout` seconds is killed and has status 124.
    """
    environment = dict(os.environ if env is None else env, LC_ALL="C")
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
        )
    except FileNotFoundError:
        result = Result(tuple(argv), 127, "", f"{argv[0]} is not installed on this host")
    except OSError as error:
        result = Result(tuple(argv), 126, "", f"{argv[0]} cannot be run: {error.strerror}")
    else:
        result = _finish(process, tuple(argv), stdin, timeout)
    if check and not result.ok:
        raise CommandError(result)
    return result


def _finish(process: subprocess.Popen[str], argv: tuple[str, ...], stdin: str | None, timeout: float | None) -> Result:
    try:
        out, err = process.communicate(stdin, timeout)
        return Result(argv, process.returncode, out, err)
    except subprocess.TimeoutExpired as expired:
        process.kill()
        # one that hangs inside the kernel (a lost GPU, a dead disk) does not even die: never wait for it without end
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        out = expired.stdout.decode(errors="replace") if isinstance(expired.stdout, bytes) else (expired.stdout or "")
        return Result(argv, 124, out, f"no answer within {timeout} s")
    except BaseException:
        process.kill()
        process.wait(2)
        raise
