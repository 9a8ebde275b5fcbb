"""Where things lie on a host. Nothing outside these directories is ever written."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

SLOT_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}\Z")
RELEASE_ID = re.compile(r"[a-z0-9][A-Za-z0-9._+-]{0,127}\Z")


@dataclasses.dataclass(frozen=True)
class Paths:
    """Directories of one host; the first three are operator's variables (``fleet_root``, ``fleet_state``, ...)."""

    root: Path = Path("/opt/ddtree")
    state: Path = Path("/var/lib/ddtree")
    cache: Path = Path("/var/cache/ddtree")
    units: Path = Path("/etc/systemd/system")
    run: Path = Path("/run/ddtree")

    @classmethod
    def of(cls, values: dict[str, Any]) -> Paths:
        """Paths from a mapping with any of the field names; missing ones keep their default."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: Path(value) for key, value in values.items() if key in names and value})

    def as_dict(self) -> dict[str, str]:
        return {field.name: str(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def releases(self) -> Path:
        return self.root / "releases"

    @property
    def agent(self) -> Path:
        return self.root / "agent"

    @property
    def slots(self) -> Path:
        return self.root / "slots"

    @property
    def journal(self) -> Path:
        return self.state / "journal.jsonl"

    @property
    def lock(self) -> Path:
        return self.state / "lock"

    @property
    def verified(self) -> Path:
        return self.state / "verified"

    @property
    def golden(self) -> Path:
        return self.state / "golden"

    def release(self, release_id: str) -> Path:
        if not RELEASE_ID.match(release_id):
            raise ValueError(f"not a release id: {release_id!r}")
        return self.releases / release_id

    def slot(self, name: str) -> Path:
        """Directory with the slot's ``current`` link, ``slot.env`` and credential."""
        return self.slots / _slot(name)

    def slot_state(self, name: str) -> Path:
        """Directory with the slot's activation records and evidence."""
        return self.state / "slots" / _slot(name)

    def activation(self, slot: str, activation_id: str) -> Path:
        if not re.match(r"[A-Za-z0-9-]{1,64}\Z", activation_id):
            raise ValueError(f"not an activation id: {activation_id!r}")
        return self.slot_state(slot) / "activations" / f"{activation_id}.json"

    def unit_file(self, slot: str) -> Path:
        return self.units / slot_unit(slot)


def _slot(name: str) -> str:
    if not SLOT_NAME.match(name):
        raise ValueError(f"not a slot name: {name!r} (lower-case letters, digits and '-', at most 32)")
    return name


def slot_unit(slot: str) -> str:
    return f"ddtree-{_slot(slot)}.service"


def activation_unit(slot: str) -> str:
    return f"ddtree-activate@{_slot(slot)}.service"


RECOVER_UNIT = "ddtree-recover.service"
