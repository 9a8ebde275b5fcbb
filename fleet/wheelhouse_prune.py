"""Make room in a wheelhouse: what no lock names goes, and so do parts of downloads and files that were changed."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path

from fleet.stack import LockedWheel
from fleet.wheelhouse import Wheelhouse


@dataclasses.dataclass(frozen=True)
class Pruned:
    """What went (or would go), and what is left."""

    removed: tuple[str, ...]
    bytes: int
    kept: int


def prune(house: Wheelhouse, keep: Iterable[LockedWheel], *, check: bool = False) -> Pruned:
    """Remove everything but `keep`; with `check` only say what would go. Raises WheelhouseError."""
    if not house.root.is_dir():
        return Pruned((), 0, 0)
    wanted = {(wheel.sha256, wheel.filename) for wheel in keep}
    with house.exclusive():  # nobody fetches meanwhile, so every part of a download is a leftover
        gone: list[tuple[str, Path]] = []
        kept = 0
        for entry in house.entries():
            if (entry.sha256, entry.filename) in wanted:
                kept += 1
            else:
                gone.append((entry.filename, house.root / entry.sha256))
        gone += [(f"partial/{path.name}", path) for path in sorted((house.root / "partial").glob("*"))]
        size = sum(_size(path) for _, path in gone)
        if not check:
            for _, path in gone:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
    return Pruned(tuple(name for name, _ in gone), size, kept)


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(item.stat().st_size for item in path.rglob("*") if item.is_file())
    return path.stat().st_size
