"""Making a lock again: uv resolves for real, against an index on disk."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import wheel_kit
from typer.testing import CliRunner

from fleet import cli_stack, stack_lock
from fleet import stack as stacks
from fleet.stack import Stack, StackError
from fleet.wheelhouse_sources import Configured


def publish(folder: Path, *names: tuple[str, str]) -> None:
    """An index on disk (PEP 503), with what `names` (name, version) say beside what is there."""
    for name, version in names:
        wheel_kit.make_wheel(folder / "files", name, version)
    for file in (folder / "files").glob("*.whl"):
        page = folder / "simple" / file.name.split("-")[0].replace("_", "-") / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        listed = sorted((folder / "files").glob(f"{file.name.split('-')[0]}-*.whl"))
        links = (
            f'<a href="{f.as_uri()}#sha256={hashlib.sha256(f.read_bytes()).hexdigest()}">{f.name}</a>' for f in listed
        )
        page.write_text("\n".join(links))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    publish(folder, ("alpha", "1.0"), ("beta-two", "2.0"), ("beta-two", "3.0"))
    configured = Configured(index=(folder / "simple").as_uri())
    monkeypatch.setattr(stack_lock, "pip_configuration", lambda: configured)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    return folder


@pytest.fixture
def stack(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    folder = Path(shutil.copytree(stacks.load("cpu").directory, tmp_path / "stacks" / "cpu"))
    (folder / "requirements.in").write_text("alpha\n# three is broken\nbeta-two<3\n")
    for old in folder.glob("*.lock"):
        old.unlink()
    text = (folder / "stack.yml").read_text()
    (folder / "stack.yml").write_text(text.replace("https://download.pytorch.org/whl/cpu/torch/", str(index / "files")))
    monkeypatch.setattr(stack_lock.httpx, "head", _unreachable)
    monkeypatch.setattr(stacks, "load", lambda name: stacks.load_directory(folder))
    stacks.forget()
    return stacks.load_directory(folder)


def _unreachable(url: str, **options: object) -> None:
    raise stack_lock.httpx.ConnectError(f"nothing is asked of {url} here")


def invoke(*argv: str) -> tuple[int, dict[str, object]]:
    done = CliRunner().invoke(cli_stack.app, ["lock", "cpu", "--json", *argv])
    return done.exit_code, json.loads(done.stdout)


def test_a_lock_is_made_from_what_the_index_has(stack: Stack) -> None:
    code, document = invoke()
    assert code == 0, document
    wheels = {wheel.name: wheel for wheel in stack.lock("3.11").wheels}
    assert {name: wheel.version for name, wheel in wheels.items()} == {"alpha": "1.0", "beta-two": "2.0"}
    assert wheels["alpha"].size > 0
    assert invoke("--check") == (0, {"stack": "cpu", "drift": []})


def test_drift_is_named_by_package_and_fails(stack: Stack) -> None:
    invoke()
    path = stack.directory / "requirements.in"
    path.write_text(path.read_text().replace("beta-two<3", "beta-two"))
    assert invoke("--check")[0] == 0  # what is locked still fits
    path.write_text(path.read_text().replace("beta-two", "beta-two>2"))
    stacks.forget()
    code, document = invoke("--check")
    assert code == 1
    assert "beta-two" in str(document)


def test_a_lock_edited_by_hand_is_drift(stack: Stack) -> None:
    invoke()
    path = stack.lock_file("3.11")
    wheel = next(item for item in stack.lock("3.11").wheels if item.name == "alpha")
    path.write_text(path.read_text().replace(wheel.sha256, "0" * 64))
    stacks.forget()
    code, document = invoke("--check")
    assert code == 1
    assert "alpha: locked 1.0 000000000000, resolves to 1.0" in str(document["drift"])


def test_versions_stay_until_they_are_told_to_move(stack: Stack, index: Path) -> None:
    invoke()
    publish(index, ("alpha", "1.1"))
    stacks.forget()
    assert invoke("--check")[0] == 0
    invoke("--upgrade")
    stacks.forget()
    assert {w.name: w.version for w in stack.lock("3.11").wheels}["alpha"] == "1.1"


def test_what_cannot_be_resolved_is_said_and_nothing_is_written(stack: Stack) -> None:
    invoke()
    before = stack.lock_file("3.11").read_bytes()
    (stack.directory / "requirements.in").write_text("alpha>5\n")
    stacks.forget()
    code, document = invoke("--upgrade")
    assert code == 1
    assert "cannot be resolved for Python 3.11" in str(document["error"])
    assert stack.lock_file("3.11").read_bytes() == before
    with pytest.raises(StackError):
        stack_lock.write(stack)
