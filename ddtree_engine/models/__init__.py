"""The model pair that ships with the package, and how a model name becomes a folder on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

EMBEDDED = "embedded"
EMBEDDED_PAIR = Path(__file__).parent / "demo-code"
GOLDEN = EMBEDDED_PAIR / "golden.json"

Part = Literal["target", "draft"]


def resolve(name_or_path: str, part: Part) -> Path:
    """The folder of a checkpoint: `embedded` is the packaged pair's `part`, anything else a path.

    Raises ValueError when the folder or its config.json does not exist.
    """
    folder = EMBEDDED_PAIR / part if name_or_path == EMBEDDED else Path(name_or_path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{part} model: {folder} is not a folder; give a checkpoint's folder or '{EMBEDDED}'")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{part} model: {folder} holds no config.json, so it is not a Hugging Face format checkpoint")
    return folder
