"""Faults for a real engine process, switched on by files in $DDTREE_TEST_FAULTS. Python imports this at its start.

hang: decoding steps wait until the file is gone.  raise: every step raises.  raise-once: one step raises, then the
file is removed.  slow: every step takes 50 ms longer.  slow-load: loading waits until the file is gone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

FAULTS = Path(os.environ["DDTREE_TEST_FAULTS"])
ENGINE = "ddtree_engine.reference.engine"


def _patch(module: Any) -> None:
    real_step, real_load = module.Session.step, module.Decoder.load.__func__

    def step(session: Any) -> Any:
        while (FAULTS / "hang").exists():
            time.sleep(0.01)
        if (FAULTS / "raise-once").exists():
            (FAULTS / "raise-once").unlink()
            raise RuntimeError("one step failed on purpose")
        if (FAULTS / "raise").exists():
            raise RuntimeError("every step fails on purpose")
        if (FAULTS / "slow").exists():
            time.sleep(0.05)
        return real_step(session)

    def load(kind: Any, *arguments: Any, **named: Any) -> Any:
        while (FAULTS / "slow-load").exists():
            time.sleep(0.01)
        return real_load(kind, *arguments, **named)

    module.Session.step, module.Decoder.load = step, classmethod(load)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != ENGINE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        real = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            real(module)
            _patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
