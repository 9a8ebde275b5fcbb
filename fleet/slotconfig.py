"""From a slot's desired configuration to what stands on the host: its unit, its environment, its gate, its digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from fleet import content

# Seconds that a stopping engine has to finish the requests in flight.
STOP_TIMEOUT_S = 60
# The supervisor tells systemd at least this often that it lives and that tokens advance.
WATCHDOG_S = 20
# Requests running without a token for this long are a hang.
HANG_S = 30


@dataclasses.dataclass(frozen=True)
class SlotFiles:
    """Everything that an activation record needs beside who and why."""

    unit: str
    env: str
    gate: dict[str, Any]
    digest: str
    exact_answers: bool
    answers_key: str


def digest(desired: Mapping[str, Any], slot: Mapping[str, Any], api_key: str = "") -> str:
    """Digest of a slot's configuration: 12 hex digits over unit, environment and secret, whatever the release.

    Settings of the gate are left out: to judge more strictly is no reason to restart an engine.
    """
    unit = _unit(desired, slot)
    env = _env(desired, slot, release="RELEASE")
    secret = hashlib.sha256(api_key.encode()).hexdigest()
    return hashlib.sha256("\0".join((unit, env, secret)).encode()).hexdigest()[:12]


def render(desired: Mapping[str, Any], slot: Mapping[str, Any], release: str, api_key: str = "") -> SlotFiles:
    """Files and gate of one slot for one release. `desired` as `fleet.desired.Desired.model_dump()` gives it."""
    embedded = slot["model"] == "embedded"
    exact = desired["engine"] == "standalone" and desired["stack"] == "cpu"
    return SlotFiles(
        unit=_unit(desired, slot),
        env=_env(desired, slot, release),
        gate=_gate(desired, slot, exact),
        digest=digest(desired, slot, api_key),
        exact_answers=exact,
        answers_key="" if embedded and exact else _answers_key(desired, slot),
    )


def argv(desired: Mapping[str, Any], slot: Mapping[str, Any]) -> list[str]:
    """The engine's own arguments; never secrets, never through a shell."""
    if desired["engine"] == "sglang":
        arguments = _sglang(slot)
    else:
        arguments = [
            *("--model", slot["model"]),
            *("--draft", slot["draft"]),
            *("--mode", slot["mode"]),
            *("--budget", str(slot["budget"])),
            *("--topk", str(slot["topk"])),
            *("--max-concurrent", str(slot["max_concurrent"])),
            *("--threads", str(slot["threads"])),
        ]
    return [
        *("--host", slot["bind"]),
        *("--port", str(slot["port"])),
        *("--served-model-name", slot["served_model"]),
        *("--context-length", str(slot["context_length"])),
        *arguments,
        *slot["extra_args"],
    ]


def _sglang(slot: Mapping[str, Any]) -> list[str]:
    arguments = ["--model-path", slot["model"], "--max-running-requests", str(slot["max_concurrent"])]
    if slot["mode"] == "ar" or slot["draft"] == "none":
        return arguments
    arguments += ["--speculative-draft-model-path", slot["draft"]]
    if slot["mode"] == "linear":
        return [*arguments, "--speculative-algorithm", "DFLASH"]
    return [
        *arguments,
        *("--speculative-algorithm", "DDTREE"),
        *("--speculative-ddtree-budget", str(slot["budget"])),
        *("--speculative-ddtree-topk", str(slot["topk"])),
    ]


def _unit(desired: Mapping[str, Any], slot: Mapping[str, Any]) -> str:
    template = (content.root() / "templates" / "slot.service.j2").read_text()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string(template).render(
        slot=slot["name"],
        port=slot["port"],
        engine=desired["engine"],
        user=desired["user"],
        root=desired["root"],
        state=desired["state"],
        cache=desired["cache"],
        start_timeout_s=int(desired["gate"]["no_progress_s"]) + 30,
        watchdog_s=WATCHDOG_S,
        stop_timeout_s=STOP_TIMEOUT_S,
    )


def _env(desired: Mapping[str, Any], slot: Mapping[str, Any], release: str) -> str:
    cache = f"{desired['cache']}/{release}"
    values = {
        "DDTREE_SLOT": slot["name"],
        "DDTREE_RELEASE": release,
        "DDTREE_ENGINE": desired["engine"],
        "DDTREE_HOST": slot["bind"],
        "DDTREE_PORT": str(slot["port"]),
        "DDTREE_SERVED_MODEL": slot["served_model"],
        "DDTREE_ARGV": json.dumps(argv(desired, slot)),
        "DDTREE_NO_PROGRESS_S": str(HANG_S),
        "DDTREE_LOAD_NO_PROGRESS_S": f"{max(HANG_S, desired['gate']['no_progress_s']):g}",
        "CUDA_VISIBLE_DEVICES": "" if slot["gpu"] == "none" else slot["gpu"],
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": str(slot["threads"]),
        "NO_PROXY": "127.0.0.1,localhost,0.0.0.0",
        "no_proxy": "127.0.0.1,localhost,0.0.0.0",
        "HOME": cache,
        "TMPDIR": cache,
        "XDG_CACHE_HOME": cache,
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TORCH_EXTENSIONS_DIR": f"{cache}/torch-extensions",
        "FLASHINFER_WORKSPACE_BASE": cache,
        "TVM_FFI_CACHE_DIR": f"{cache}/tvm-ffi",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONFAULTHANDLER": "1",
        **slot["env"],
    }
    return "".join(f"{key}={quote(value)}\n" for key, value in values.items())


def quote(value: str) -> str:
    """A value in the syntax of systemd's EnvironmentFile=. Raises ValueError on what a line cannot hold."""
    if any(character in value for character in "\n\r\0"):
        raise ValueError(f"an environment value may not hold line breaks or NUL: {value!r}")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`")
    return f'"{escaped}"'


def _gate(desired: Mapping[str, Any], slot: Mapping[str, Any], exact: bool) -> dict[str, Any]:
    settings = desired["gate"]
    speculation = slot["mode"] != "ar" and slot["draft"] != "none"
    gate: dict[str, Any] = {
        "port": slot["port"],
        "served_model": slot["served_model"],
        "host": "127.0.0.1" if slot["bind"] in ("0.0.0.0", "::") else slot["bind"],
        "completions": settings["completions"],
        "soak_s": settings["soak_s"],
        "no_progress_s": settings["no_progress_s"],
        "cap_s": settings["cap_s"],
        "probe_timeout_s": settings["probe_timeout_s"],
        "speculation": speculation,
        "min_acceptance": max(1.0, float(settings["min_acceptance"])),
    }
    if slot["model"] == "embedded" and exact:
        gate["answers"] = embedded_answers()
    return gate


def embedded_answers() -> list[dict[str, Any]]:
    """Known answers of the pair that ships with the engine: plain greedy decoding in fp32, so every letter counts."""
    path = Path(__file__).parent.parent / "ddtree_engine" / "models" / "demo-code" / "golden.json"
    values = json.loads(path.read_text())
    return [
        {"prompt": item["prompt"], "max_tokens": item["max_tokens"], "text": item["text"], "exact": True}
        for item in values
    ]


def _answers_key(desired: Mapping[str, Any], slot: Mapping[str, Any]) -> str:
    """Under which recorded answers are kept: they hold for one model, engine and set of flags only."""
    parts = (desired["stack"], desired["engine"], slot["model"], slot["served_model"], *slot["extra_args"])
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
