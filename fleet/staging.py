"""What is sent to a host: packed so that many small wheels cost one transfer, and nothing is held in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from fleet.stack import LockedWheel
from fleet.wheelhouse import Wheelhouse, WheelhouseError

# Files below this are sent together; one transfer has a fixed cost of a tenth of a second and more.
SMALL = 8 << 20
# No bundle grows beyond this, so that a cut connection costs little.
BUNDLE = 64 << 20


@dataclasses.dataclass(frozen=True)
class Upload:
    """One transfer: a local file, the name it gets in the host's incoming folder, and how many wheels are in it."""

    file: Path
    name: str
    wheels: tuple[LockedWheel, ...]

    @property
    def size(self) -> int:
        return self.file.stat().st_size


@contextlib.contextmanager
def pack(house: Wheelhouse, wheels: Iterable[LockedWheel]) -> Iterator[list[Upload]]:
    """Transfers for `wheels`; bundles are temporary files that go afterwards. Raises WheelhouseError."""
    wanted = sorted(set(wheels), key=lambda wheel: wheel.filename)
    missing = [wheel.filename for wheel in wanted if not house.has(wheel)]
    if missing:
        raise WheelhouseError(
            f"wheelhouse {house.root} lacks what the host needs: run `fleet wheelhouse build`", missing
        )
    large = [wheel for wheel in wanted if wheel.size >= SMALL]
    uploads = [Upload(house.path(wheel), wheel.sha256, (wheel,)) for wheel in large]
    with tempfile.TemporaryDirectory(prefix="ddtree-send-") as folder:
        for number, group in enumerate(_groups([wheel for wheel in wanted if wheel.size < SMALL])):
            name = f"{group[0].sha256[:12]}-{number}.tar"
            uploads.append(Upload(_bundle(house, Path(folder, name), group), name, tuple(group)))
        yield uploads


def _groups(wheels: list[LockedWheel]) -> Iterator[list[LockedWheel]]:
    group: list[LockedWheel] = []
    for wheel in wheels:
        if group and sum(item.size for item in group) + wheel.size > BUNDLE:
            yield group
            group = []
        group.append(wheel)
    if group:
        yield group


def _bundle(house: Wheelhouse, path: Path, wheels: list[LockedWheel]) -> Path:
    with tarfile.open(path, "w") as bundle:
        for wheel in wheels:
            bundle.add(house.path(wheel), arcname=wheel.sha256)
    return path
