"""The wheel: complete, and able to run on its own outside a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTENT = ("ansible.cfg", "deploy.yml", "rollback.yml", "playbooks", "plugins", "roles", "stacks", "templates")


def tracked(*paths: str) -> list[Path]:
    """Files of the checkout that belong in the wheel: what git knows, or (an unpacked archive) what is there."""
    git = subprocess.run(["git", "ls-files", "--", *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    if git.returncode == 0 and git.stdout:
        found = [ROOT / line for line in git.stdout.splitlines()]
    else:
        found = [file for path in paths for file in [ROOT / path, *(ROOT / path).rglob("*")] if file.is_file()]
    return [file for file in found if file.is_file() and "__pycache__" not in file.parts]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    # without isolation the build needs no network; hatchling comes with the development extra
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("ddtree_fleet-*.whl")
    return found


def test_the_wheel_holds_all_of_the_ansible_content_byte_for_byte(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for file in tracked(*CONTENT):
            name = f"fleet/_content/{file.relative_to(ROOT)}"
            assert archive.read(name) == file.read_bytes(), name


def test_the_wheel_holds_every_file_of_both_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    missing = [
        str(path)
        for file in tracked("fleet", "ddtree_engine")
        if (path := file.relative_to(ROOT)) and str(path) not in names
    ]
    assert not missing
    assert any(name.endswith(".safetensors") for name in names), "the embedded models are part of it"


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/", 1)[0] for name in names}
    assert {"fleet", "ddtree_engine"} == {top for top in tops if not top.endswith(".dist-info")}
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc") or "inventory/sandbox" in name]


class Installation:
    """The wheel in an environment of its own, with this environment's dependencies behind it."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        venv.create(folder / "venv", with_pip=False)
        self._pip("install", "--no-deps", "--no-index", "--quiet", str(wheel))
        site = next((folder / "venv" / "lib").glob("python*/site-packages"))
        outside = [path for path in sys.path if path.endswith("site-packages")]
        (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in outside))
        self.site = site

    def _pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("ANSIBLE_", "PYTHON", "DDTREE_"))
            },
            "XDG_STATE_HOME": str(self.folder / "state"),
            "PATH": f"{self.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        return subprocess.run(
            [str(self.bin / "fleet"), *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    yield Installation(tmp_path_factory.mktemp("elsewhere"), wheel)


def test_the_installed_command_finds_its_own_content(installed: Installation) -> None:
    done = installed.run("--version")
    assert done.returncode == 0, done.stderr
    assert str(installed.site / "fleet" / "_content") in done.stdout


def test_the_installed_command_helps(installed: Installation) -> None:
    done = installed.run("--help")
    assert done.returncode == 0 and "deploy" in done.stdout and "sandbox" in done.stdout


def test_preflight_outside_a_checkout_validates_the_inventory_with_the_packaged_content(
    installed: Installation,
) -> None:
    """A typing error in a variable is found by the packaged plugins, before the host (there is none) is asked."""
    inventory = installed.folder / "inventory.yml"
    inventory.write_text(
        "all:\n  hosts:\n    nowhere:\n      ansible_host: 192.0.2.1\n      fleet_stak: cpu\n      fleet_slots: []\n"
    )
    done = installed.run("preflight", "-i", str(inventory))
    assert done.returncode == 4, done.stdout + done.stderr
    assert "hosts.nowhere.fleet_stak" in done.stdout


def test_the_reference_pages_say_what_the_code_says() -> None:
    from fleet import docs

    assert docs.drifted(ROOT) == [], "run `make docs`"
