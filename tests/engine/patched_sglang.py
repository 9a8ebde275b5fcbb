"""Loading a patched SGLang on a machine without CUDA, for the tests that look at its own code.

`DDTREE_PATCHED_SITE` names a folder into which the patched wheel and its pure-Python needs were unpacked (what
`benchmarks/gpu/assemble.py` leaves in its work folder as `site`). CUDA-only packages become empty stand-ins: the code
under test calls none of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

CUDA_ONLY = (
    "torchvision",
    "torchaudio",
    "sgl_kernel",
    "IPython",
    "cuda",
    "flashinfer",
    "xgrammar",
    "torch_memory_saver",
)
SITE = os.environ.get("DDTREE_PATCHED_SITE", "")


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in CUDA_ONLY:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name == "StructuralTag":
                return dict
            if name[0].isupper() and not name.isupper():
                return _Names(name, (), {})
            return MagicMock(name=name)

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def load() -> None:
    """Make `import sglang` find the patched engine. Call once, in a process of its own."""
    if not Path(SITE, "sglang").is_dir():
        raise RuntimeError(f"DDTREE_PATCHED_SITE={SITE!r} holds no sglang")
    sys.meta_path.insert(0, _StandIns())
    sys.path.append(SITE)
