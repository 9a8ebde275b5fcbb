"""Fixtures of the unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import wheel_kit

from fleet.stack import LockedWheel


@pytest.fixture(scope="session")
def uv_wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[LockedWheel, Path]:
    folder = tmp_path_factory.mktemp("uv")
    return wheel_kit.uv_wheel(folder), folder


@pytest.fixture
def release_host(tmp_path: Path, uv_wheel: tuple[LockedWheel, Path]) -> wheel_kit.Host:
    """The directories of a host on which releases are really built."""
    return wheel_kit.Host(tmp_path / "host", *uv_wheel)
