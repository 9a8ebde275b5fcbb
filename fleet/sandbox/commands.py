"""Running the machine's own tools: one way, with an error that says what failed."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from .errors import SandboxError


def run(argv: Sequence[str], *, check: bool = True, stdin: str | None = None, timeout: float = 60) -> str:
    """Run a tool to its end and return its output; a failure carries the tool's last words."""
    try:
        done = subprocess.run(
            list(argv), input=stdin, stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
    except FileNotFoundError:
        raise SandboxError(f"{argv[0]} is not installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise SandboxError(f"`{' '.join(argv)}` did not end within {timeout:.0f} s") from None
    if check and done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise SandboxError(f"`{' '.join(argv)}` failed with status {done.returncode}: {words}")
    return done.stdout
