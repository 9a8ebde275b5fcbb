"""Reading safetensors checkpoints, whole or sharded, with every tensor's name and shape checked."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .config import read_json


class Weights:
    """A checkpoint's tensors by name, converted to one dtype and device. Each tensor is to be taken once."""

    def __init__(self, folder: Path, device: torch.device | str, dtype: torch.dtype) -> None:
        self._folder = folder
        self._device = device
        self._dtype = dtype
        self._tensors: dict[str, torch.Tensor] = {}
        for file in _files(folder):
            try:
                self._tensors.update(load_file(file))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file}: not a readable safetensors file: {error}") from error

    def drop(self, *prefixes: str) -> None:
        """Forgets tensors that are known to play no part."""
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if not name.startswith(prefixes)}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ValueError(f"{self._folder}: the checkpoint has no tensor {name}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{self._folder}: {name} has shape {tuple(tensor.shape)}, config.json says {shape}")
        return tensor.to(self._device, self._dtype)

    def finish(self) -> None:
        """Raises ValueError if tensors are left: a part of the model that was not computed."""
        if self._tensors:
            names = ", ".join(sorted(self._tensors)[:3])
            raise ValueError(f"{self._folder}: {len(self._tensors)} tensors are not part of this architecture: {names}")


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in read_json(index).get("weight_map", {}).values()})
    else:
        files = [folder / "model.safetensors"]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ValueError(f"{folder}: weights are missing: {', '.join(missing) or 'the index names no file'}")
    return files
