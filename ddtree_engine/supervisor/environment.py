"""The DDTREE_* variables of a slot, checked all at once: every problem is named, not only the first."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

ENGINES = {"standalone": "ddtree_engine.server", "sglang": "sglang.launch_server"}
CREDENTIAL = "api_key"

HELP = """\
python -m ddtree_engine.launch: start a slot's engine, say when it is ready, watch it, stop it.

It takes no arguments. The environment says what to do (systemd units: EnvironmentFile=):
  DDTREE_SLOT                name of the slot, for messages
  DDTREE_ENGINE              standalone or sglang
  DDTREE_PORT                port that the engine listens on
  DDTREE_SERVED_MODEL        model name that requests use
  DDTREE_ARGV                the engine's arguments as a JSON list of strings, e.g. ["--port", "30001", ...]
  DDTREE_HOST                address that the engine listens on (default 127.0.0.1)
  DDTREE_API_KEY_FILE        file with the API key; a relative path is meant from $CREDENTIALS_DIRECTORY
                             (default: $CREDENTIALS_DIRECTORY/api_key if that holds a key, else no key)
  DDTREE_NO_PROGRESS_S       a serving engine is hung when requests run this long without a token (default 120)
  DDTREE_LOAD_NO_PROGRESS_S  a starting engine is hung when it neither computes nor reads for this long
                             (default 120, and never less than DDTREE_NO_PROGRESS_S)

Exit status: 0 after a stop that was asked for, 78 for a wrong environment, else the engine's own status, 128 + signal
where a signal ended it, or 1. An engine that ends by itself is always a failure, also where its status was 0.
"""


class EnvironmentProblem(Exception):
    """The environment cannot work. `problems` holds one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run and how to judge it. `api_key` is for probes and is never printed."""

    slot: str
    engine: str
    host: str
    port: int
    served_model: str
    arguments: tuple[str, ...]
    no_progress_s: float
    load_no_progress_s: float
    api_key_file: Path | None
    api_key: str = dataclasses.field(repr=False)

    @property
    def probe_host(self) -> str:
        """Where the engine answers on this host: an engine on all addresses is asked on loopback."""
        return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def command(self) -> list[str]:
        """The engine's command line. The key itself never stands in it."""
        module = ENGINES[self.engine]
        if self.api_key_file is None:
            return [sys.executable, "-m", module, *self.arguments]
        if self.engine == "standalone":
            return [sys.executable, "-m", module, *self.arguments, "--api-key-file", str(self.api_key_file)]
        keyed = "ddtree_engine.supervisor.keyed"
        return [sys.executable, "-m", keyed, str(self.api_key_file), module, *self.arguments]


class _Reader:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.problems: list[str] = []

    def text(self, name: str, default: str | None = None) -> str:
        value = self._environ.get(name, "") or default
        if value is None:
            self.problems.append(f"{name} is not set")
            return ""
        return value

    def port(self, name: str) -> int:
        text = self.text(name)
        if text and not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
            self.problems.append(f"{name} is {text!r}; it must be a port number from 1 to 65535")
            return 0
        return int(text or 0)

    def seconds(self, name: str, default: float) -> float:
        text = self._environ.get(name, "")
        try:
            value = float(text) if text else default
        except ValueError:
            value = math.nan
        if not 0 < value < 1e6:
            self.problems.append(f"{name} is {text!r}; it must be a number of seconds greater than 0")
        return value

    def arguments(self, name: str) -> tuple[str, ...]:
        text = self.text(name)
        if not text:
            return ()
        try:
            value = json.loads(text)
        except ValueError as error:
            self.problems.append(f"{name} is not valid JSON ({error}); it must be a JSON list of strings")
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.problems.append(f"{name} must be a JSON list of strings")
            return ()
        if any(item == "--api-key" or item.startswith("--api-key=") for item in value):
            self.problems.append(f"{name} holds --api-key: a key in a command line is public; use DDTREE_API_KEY_FILE")
        return tuple(value)

    def key_file(self, name: str) -> tuple[Path | None, str]:
        named, folder = self._environ.get(name, ""), self._environ.get("CREDENTIALS_DIRECTORY", "")
        path = Path(folder, named or CREDENTIAL)
        if not named and not (folder and path.is_file()):
            return None, ""
        try:
            key = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not plain ASCII"
            self.problems.append(f"{name}: cannot read the API key from {path}: {reason}")
            return None, ""
        if not key and named:
            self.problems.append(f"{name}: {path} is empty; put the key there, or leave the variable out")
        # The unit always loads a credential; an empty one means that no key is wanted.
        return (path, key) if key else (None, "")


def read(environ: Mapping[str, str]) -> Settings:
    """Settings from the environment. Raises EnvironmentProblem naming everything that is wrong."""
    reader = _Reader(environ)
    engine = reader.text("DDTREE_ENGINE")
    if engine and engine not in ENGINES:
        reader.problems.append(f"DDTREE_ENGINE is {engine!r}; it must be one of {', '.join(ENGINES)}")
    port = reader.port("DDTREE_PORT")
    arguments = reader.arguments("DDTREE_ARGV")
    for index, argument in enumerate(arguments):
        value = arguments[index + 1] if argument == "--port" and index + 1 < len(arguments) else None
        value = argument.removeprefix("--port=") if argument.startswith("--port=") else value
        if value is not None and port and value != str(port):
            reader.problems.append(f"DDTREE_ARGV has --port {value}, but DDTREE_PORT is {port}; they must agree")
    api_key_file, api_key = reader.key_file("DDTREE_API_KEY_FILE")
    no_progress = reader.seconds("DDTREE_NO_PROGRESS_S", 120.0)
    settings = Settings(
        slot=reader.text("DDTREE_SLOT"),
        engine=engine,
        host=reader.text("DDTREE_HOST", "127.0.0.1"),
        port=port,
        served_model=reader.text("DDTREE_SERVED_MODEL"),
        arguments=arguments,
        no_progress_s=no_progress,
        load_no_progress_s=reader.seconds("DDTREE_LOAD_NO_PROGRESS_S", max(120.0, no_progress)),
        api_key_file=api_key_file,
        api_key=api_key,
    )
    if reader.problems:
        raise EnvironmentProblem(reader.problems)
    return settings
