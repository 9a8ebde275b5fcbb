"""What single inventory values may look like. Each rule says what is wrong with a value and how to mend it, or None.

Names, paths, flags and environment values end up in unit files, environment files and argument lists. They are allowed
a plain character set only, so that nothing which systemd, a shell or an engine would interpret can be smuggled in.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from pathlib import PurePosixPath

Complaint = tuple[str, str]
Rule = Callable[[str], Complaint | None]

_CHARACTER_NAMES = {
    "\n": "a line break",
    "\r": "a carriage return",
    "\t": "a tab",
    "\0": "a NUL byte",
    " ": "a space",
    "\\": "a backslash",
    "'": "a single quote",
    '"': "a double quote",
    "`": "a backquote",
}

# Directories of the system itself: nothing of ours may lie there, or is lost at the next boot.
_SYSTEM_DIRECTORIES = (
    "/proc",
    "/sys",
    "/dev",
    "/run",
    "/tmp",
    "/boot",
    "/etc",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/usr/bin",
    "/usr/lib",
)

GPU_UUID = re.compile(r"GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z", re.IGNORECASE)
SLOT_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")
RELEASE_ID = re.compile(r"[a-z0-9][A-Za-z0-9._+-]{0,127}\Z")

# `ddtree-<name>.service` must never be one of the toolkit's own units.
RESERVED_SLOTS = ("activate", "recover", "router", "agent")

# Set by the toolkit for every slot; another value would break isolation, readiness or the matched stack.
_RESERVED_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "the slot's gpu decides it",
    "NVIDIA_VISIBLE_DEVICES": "the slot's gpu decides it",
    "CUDA_DEVICE_ORDER": "GPUs are addressed by UUID",
    "CUDA_HOME": "it points at the release's own toolkit",
    "LD_LIBRARY_PATH": "no library path can mend a mismatched stack; the release brings its libraries",
    "LD_PRELOAD": "nothing may be loaded into the engine that the release does not hold",
    "PATH": "the unit sets it",
    "HOME": "the unit sets it",
    "PYTHONPATH": "nothing may be imported that the release does not hold",
    "PYTHONHOME": "nothing may be imported that the release does not hold",
    "NO_PROXY": "loopback is always excluded from proxies",
    "no_proxy": "loopback is always excluded from proxies",
    "NOTIFY_SOCKET": "systemd sets it",
    "WATCHDOG_USEC": "systemd sets it",
    "CREDENTIALS_DIRECTORY": "systemd sets it",
    "OMP_NUM_THREADS": "the slot's threads decide it",
    "TRITON_CACHE_DIR": "each release has a cache of its own",
    "TORCHINDUCTOR_CACHE_DIR": "each release has a cache of its own",
    "TORCH_EXTENSIONS_DIR": "each release has a cache of its own",
    "FLASHINFER_WORKSPACE_BASE": "each release has a cache of its own",
    "TVM_FFI_CACHE_DIR": "each release has a cache of its own",
}

# Engine arguments that a field of the slot renders.
_RESERVED_ARGUMENTS = {
    "--host": "bind",
    "--port": "port",
    "--model": "model",
    "--model-path": "model",
    "--draft": "draft",
    "--speculative-draft-model-path": "draft",
    "--served-model-name": "served_model",
    "--mode": "mode",
    "--budget": "budget",
    "--topk": "topk",
    "--context-length": "context_length",
    "--max-concurrent": "max_concurrent",
    "--threads": "threads",
    "--api-key": "fleet_api_key",
    "--api-key-file": "fleet_api_key",
}


def named(character: str) -> str:
    """A character in words, so that an invisible one can be found."""
    return _CHARACTER_NAMES.get(character) or (
        f"{character!r}" if character.isprintable() else f"U+{ord(character):04X}"
    )


def forbidden(value: str, allowed: str) -> Complaint | None:
    """The characters of `value` outside the class `allowed` (the inside of a regular expression's brackets)."""
    bad = sorted(set(re.findall(f"[^{allowed}]", value)))
    if not bad:
        return None
    return f"holds {', '.join(named(item) for item in bad)}, which is not allowed here", f"use only {_spoken(allowed)}"


def _spoken(allowed: str) -> str:
    marks = allowed.replace("A-Za-z0-9", "").replace("a-z0-9", "").replace("\\", "")
    letters = "letters and digits" if "A-Z" in allowed else "lower-case letters and digits"
    shown = " ".join("space" if mark == " " else mark for mark in marks)
    return f"{letters}" + (f" and {shown}" if shown else "")


def slot_name(value: str) -> Complaint | None:
    if not SLOT_NAME.match(value):
        return (
            f"{value[:40]!r} is not a slot name",
            "use 1 to 32 lower-case letters, digits and '-', beginning with a letter or digit, such as gpu1",
        )
    if value in RESERVED_SLOTS:
        return (
            f"{value!r} would name one of the toolkit's own units (ddtree-{value})",
            "choose another name, such as gpu1",
        )
    return None


def gpu(value: str) -> Complaint | None:
    if value == "none" or GPU_UUID.match(value):
        return None
    if value.isdigit():
        return (
            f"names GPU {value} by its index, which shifts when a GPU dies",
            "give the GPU's UUID (GPU-...), which `nvidia-smi -L` prints on the host",
        )
    if value.upper().startswith("MIG-"):
        return "is a MIG instance, which is not supported", "give the UUID of a whole GPU (GPU-...) with MIG off"
    return (
        f"{value[:60]!r} is not a GPU UUID",
        "give the whole UUID (GPU- and 32 hexadecimal digits in five groups), which `nvidia-smi -L` prints on the host",
    )


def absolute_path(value: str) -> Complaint | None:
    if not value:
        return "is empty", "give an absolute path on the host"
    if not value.startswith("/"):
        return f"{value[:80]!r} is not an absolute path", "begin it with /"
    if len(value) > 255:
        return f"is {len(value)} characters long", "use a path of at most 255 characters"
    bad = forbidden(value, "A-Za-z0-9/._+@=,-")
    if bad:
        return bad
    if ".." in PurePosixPath(value).parts:
        return "holds '..'", "write the path out"
    return None


def own_directory(value: str) -> Complaint | None:
    """A directory that the toolkit makes and fills."""
    complaint = absolute_path(value)
    if complaint:
        return complaint
    path = PurePosixPath(value)
    if len(path.parts) < 3:
        return f"{value!r} is too near the root of the file system", "use a directory of its own, such as /opt/ddtree"
    for system in _SYSTEM_DIRECTORIES:
        if path.is_relative_to(system):
            return f"lies in {system}, which belongs to the system", "use a directory of its own, such as /opt/ddtree"
    return None


def model(value: str) -> Complaint | None:
    if value == "embedded":
        return None
    if not value:
        return "is empty: no model is named", "give `embedded` or the absolute path of a model directory on the host"
    complaint = absolute_path(value)
    if complaint and not value.startswith("/"):
        return f"{value[:80]!r} is neither `embedded` nor an absolute path", "give `embedded` or begin the path with /"
    return complaint


def draft(value: str) -> Complaint | None:
    return None if value == "none" else model(value)


def served_model(value: str) -> Complaint | None:
    if len(value) > 128:
        return f"is {len(value)} characters long", "use at most 128 characters"
    return forbidden(value, "A-Za-z0-9._/:@+-")


def bind(value: str) -> Complaint | None:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return f"{value[:60]!r} is not an IP address", "give an address of the host, 127.0.0.1 or 0.0.0.0"
    return None


def user(value: str) -> Complaint | None:
    if not re.match(r"[a-z_][a-z0-9_-]{0,30}\Z", value):
        return f"{value[:40]!r} is not a user name", "use lower-case letters, digits, '_' and '-', at most 31"
    if value in ("root", "nobody"):
        return (
            f"the engine must not run as {value}",
            "name a user of its own, such as ddtree; it is made where it is missing",
        )
    return None


def release(value: str) -> Complaint | None:
    if value and not RELEASE_ID.match(value):
        return f"{value[:60]!r} is not a release id", "take one from `fleet releases`, or leave it empty"
    return None


def reason(value: str) -> Complaint | None:
    if any(not character.isprintable() for character in value):
        return "holds a line break or control character", "write the reason on one line"
    return ("is longer than 500 characters", "shorten it") if len(value) > 500 else None


def api_key(value: str) -> Complaint | None:
    """Never repeats the value."""
    if any(character.isspace() or not character.isprintable() or not character.isascii() for character in value):
        return (
            "holds a space, a line break or another character that an HTTP header cannot carry",
            "use printable ASCII",
        )
    return None


def environment_name(value: str) -> Complaint | None:
    if not re.match(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z", value):
        return (
            f"{value[:60]!r} is not the name of an environment variable",
            "use letters, digits and '_', not beginning with a digit",
        )
    if value.startswith("DDTREE_"):
        return "names beginning with DDTREE_ belong to the toolkit", "set what you want through the slot's own fields"
    if value in _RESERVED_ENVIRONMENT:
        return f"is set by the toolkit: {_RESERVED_ENVIRONMENT[value]}", "remove it"
    return None


def environment_value(value: str) -> Complaint | None:
    return forbidden(value, "A-Za-z0-9 ._/:@=,+-")


def argument(value: str) -> Complaint | None:
    if not value:
        return "is an empty argument", "remove it"
    field = _RESERVED_ARGUMENTS.get(value.split("=", 1)[0])
    if field:
        return f"{value.split('=', 1)[0]} is rendered from {field}", f"set {field} instead"
    return forbidden(value, "A-Za-z0-9._/:@=,+-")


# What to do about a value of the wrong type, where that has a reason of its own.
TYPE_HINTS = {
    "gpu": "give the GPU's UUID (GPU-...), which `nvidia-smi -L` prints on the host; an index shifts when a GPU dies",
}

SLOT_RULES: dict[str, Rule] = {
    "name": slot_name,
    "gpu": gpu,
    "bind": bind,
    "model": model,
    "draft": draft,
    "served_model": served_model,
}

SLOT_RANGES: dict[str, tuple[int, int]] = {
    "port": (1024, 65535),
    "context_length": (16, 1 << 24),
    "budget": (1, 1024),
    "topk": (1, 1024),
    "max_concurrent": (1, 4096),
    "threads": (1, 1024),
}

GATE_RANGES: dict[str, tuple[float, float]] = {
    "no_progress_s": (1, 86400),
    "cap_s": (1, 7 * 86400),
    "probe_timeout_s": (0.5, 600),
    "completions": (1, 1000),
    "soak_s": (0, 86400),
    "min_acceptance": (0, 1025),
}

HOST_RULES: dict[str, Rule] = {
    "fleet_root": own_directory,
    "fleet_state": own_directory,
    "fleet_cache": own_directory,
    "fleet_python": absolute_path,
    "fleet_user": user,
    "fleet_release": release,
    "fleet_reason": reason,
    "fleet_api_key": api_key,
}

HOST_RANGES: dict[str, tuple[float, float]] = {
    "fleet_max_unavailable": (1, 64),
    "fleet_keep_releases": (1, 1000),
    "fleet_disk_reserve_gib": (0, 100000),
    "fleet_xid_window_h": (0, 24 * 365),
}
