"""The import smoke run: does all that the engine imports load, as the user and in the environment of a slot?"""

from __future__ import annotations

import dataclasses
import os
import pwd
import secrets
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from . import diagnosis

_TIMEOUT_S = 600
# Stops at the first failure: what comes after it would only be its consequence.
_IMPORT = """
import importlib, sys, time
for name in sys.argv[1:]:
    began = time.monotonic()
    try:
        importlib.import_module(name)
    except BaseException as error:
        if isinstance(error, SystemExit):
            print(f"SystemExit: import of {name} left with {error.code!r}", file=sys.stderr)
        else:
            import traceback
            traceback.print_exc()
        print(f"SMOKE-FAILED {name}", file=sys.stderr)
        sys.exit(1)
    print(f"{name} {time.monotonic() - began:.2f}s")
"""
_MARK = "SMOKE-FAILED "


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`cause` names the module and the line that says why; empty when all imports worked."""

    cause: str
    output: str
    seconds: float

    @property
    def failed(self) -> bool:
        return bool(self.cause)


def imports(python: Path, modules: Sequence[str], user: str) -> Outcome:
    """Import `modules` with the release's interpreter, as `user` (where this is root and the user exists)."""
    if not modules:
        return Outcome("", "", 0.0)
    began = time.monotonic()
    # -s and -B as in a slot: no packages of the user, no bytecode written
    argv = [str(python), "-s", "-B", "-X", "faulthandler", "-c", _IMPORT, *modules]
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/nonexistent",
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "PYTHONNOUSERSITE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **_toolkit(python),
    }
    switch = _switch(user)
    if switch and Path("/run/systemd/system").is_dir():
        argv = [*_service(user, environment), *argv]
        switch = {}
    try:
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            cwd="/",
            check=False,
            **switch,  # type: ignore[call-overload]
        )
    except subprocess.TimeoutExpired:
        return Outcome(f"the imports did not end within {_TIMEOUT_S} s", "", time.monotonic() - began)
    except OSError as error:
        return Outcome(f"{python} cannot be run: {error.strerror}", "", time.monotonic() - began)
    seconds = time.monotonic() - began
    output = (done.stdout + done.stderr)[-16000:]
    return Outcome("" if done.returncode == 0 else _cause(done.returncode, done.stdout, done.stderr), output, seconds)


def _toolkit(python: Path) -> dict[str, str]:
    """The release's own toolkit, as in a slot: kernels load the runtime of the host's where CUDA_HOME names none."""
    found = sorted(python.parent.parent.glob("lib/python3*/site-packages/nvidia/*/bin/nvcc"))
    return {"CUDA_HOME": str(found[-1].parent.parent)} if found else {}


def _switch(user: str) -> dict[str, object]:
    if os.geteuid() != 0:
        return {}
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        return {}
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def _service(user: str, environment: dict[str, str]) -> list[str]:
    """A transient service with the restrictions that matter for imports: what loads here loads in a slot."""
    properties = (
        f"User={user}",
        "ProtectSystem=strict",
        "PrivateTmp=yes",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "LimitNOFILE=65536",
        f"RuntimeMaxSec={_TIMEOUT_S}",
    )
    argv = ["systemd-run", "--quiet", "--wait", "--pipe", "--collect", f"--unit=ddtree-smoke-{secrets.token_hex(4)}"]
    argv += [f"--property={value}" for value in properties]
    return argv + [f"--setenv={key}={value}" for key, value in environment.items()] + ["--"]


def _cause(code: int, out: str, err: str) -> str:
    lines = err.splitlines()
    module = next((line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)), "")
    loaded = [line.split()[0] for line in out.splitlines() if line.endswith("s") and " " in line]
    told = [line for line in lines if not line.startswith(_MARK)]
    if module:
        found = diagnosis.diagnose(told)
        exception = next((line for line in reversed(told) if line and not line.startswith((" ", "\t"))), found.root)
        text = f"import of {module} failed: {exception.strip()}"
        return text + (f" (fix: {found.fix})" if found.fix else "")
    last = told[-1] if told else "nothing was printed"
    after = f" after {loaded[-1]}" if loaded else ""
    ended = f"signal {-code}" if code < 0 else f"status {code}"
    return f"the import run ended with {ended}{after}: {last}"
