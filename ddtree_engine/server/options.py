"""Command line of the standalone server."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

Mode = Literal["tree", "linear", "ar"]
MODES: tuple[Mode, ...] = ("tree", "linear", "ar")
DTYPES = ("float32", "bfloat16", "float16")


class OptionError(Exception):
    """An option whose value cannot work; the text names the option and the fix."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked options. `api_key` holds the key itself and must never be logged."""

    host: str
    port: int
    model: str
    draft: str
    served_model_name: str
    mode: Mode
    budget: int
    topk: int
    context_length: int
    max_concurrent: int
    max_queue: int
    threads: int
    device: str
    dtype: str
    stall_seconds: float
    api_key: str = dataclasses.field(repr=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddtree_engine.server",
        description="Serve one model with DDTree speculative decoding over an OpenAI-compatible API.",
        epilog="/health and /metrics need no API key; everything else does once --api-key-file is given.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=30001, help="port to listen on; 0 picks a free one (default: %(default)s)")
    add("--model", default="embedded", help="'embedded' or the folder of a model (default: %(default)s)")
    add("--draft", default="embedded", help="'embedded', 'none' or the folder of a drafter (default: %(default)s)")
    add("--served-model-name", default="", help="the name requests use (default: demo-code, or the folder's name)")
    add("--mode", choices=MODES, default="tree", help="how drafts are verified (default: %(default)s)")
    add("--budget", type=int, default=15, help="tree nodes verified per step, root excluded (default: %(default)s)")
    add("--topk", type=int, default=8, help="candidates per drafted position (default: %(default)s)")
    add("--context-length", type=int, default=1024, help="prompt + completion tokens at most (default: %(default)s)")
    add("--max-concurrent", type=int, default=4, help="requests decoded side by side (default: %(default)s)")
    add("--max-queue", type=int, default=64, help="requests that may wait; more get HTTP 429 (default: %(default)s)")
    add("--threads", type=int, default=1, help="CPU threads of the engine (default: %(default)s)")
    add("--device", default="auto", help="cpu, cuda, cuda:N or auto (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="arithmetic of the model (default: %(default)s)")
    add("--stall-seconds", type=float, default=60.0,
        help="/health turns 503 when one decoding step takes longer (default: %(default)s)")  # fmt: skip
    add("--api-key-file", type=Path, help="file holding the API key; clients send it as a bearer token")
    return parser


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise OptionError(f"{name} is {value:g}; it must be at least {least:g}")


def read_api_key(path: Path) -> str:
    """The key in `path`, without surrounding white space."""
    try:
        key = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise OptionError(
            f"--api-key-file: cannot read {path}: {error.strerror}; give a file that this user may read"
        ) from error
    except UnicodeDecodeError as error:
        raise OptionError(
            f"--api-key-file: {path} holds more than ASCII; a bearer token must be plain ASCII"
        ) from error
    if not key or any(character.isspace() for character in key):
        raise OptionError(f"--api-key-file: {path} must hold exactly one key, without white space inside")
    return key


def parse(argv: Sequence[str]) -> Options:
    """Options from `argv`. Raises OptionError (and SystemExit, from argparse) on what cannot work."""
    arguments = _parser().parse_args(argv)
    if not 0 <= arguments.port <= 65535:
        raise OptionError(f"--port is {arguments.port}; a port is a number from 0 to 65535")
    for name, least in (("--budget", 1), ("--topk", 1), ("--context-length", 2), ("--max-concurrent", 1)):
        _at_least(name, getattr(arguments, name[2:].replace("-", "_")), least)
    for name in ("--max-queue", "--threads", "--stall-seconds"):
        _at_least(name, getattr(arguments, name[2:].replace("-", "_")), 1)
    if arguments.draft == "none" and arguments.mode != "ar":
        raise OptionError(f"--mode {arguments.mode} needs a drafter, but --draft is none; use --mode ar")
    name = arguments.served_model_name
    if not name:
        name = "demo-code" if arguments.model == "embedded" else Path(arguments.model).name
    values = {key: value for key, value in vars(arguments).items() if key != "api_key_file"}
    values["served_model_name"] = name
    key = read_api_key(arguments.api_key_file) if arguments.api_key_file else ""
    return Options(**values, api_key=key)
