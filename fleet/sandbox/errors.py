"""The one error of the sandbox: what is wrong, and what to do about it."""

from __future__ import annotations


class SandboxError(Exception):
    """Shown to the user as it is; `fix` is a command or a sentence that says what would help."""

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(f"{problem}\n  fix: {fix}" if fix else problem)
        self.problem = problem
        self.fix = fix
