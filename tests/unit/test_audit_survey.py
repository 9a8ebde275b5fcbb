"""The survey of an environment: what is in it, whether its files are whole, and nothing outside it touched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import audit_toys as toys
import pytest
from ddtree import bom, survey


def kinds(facts: dict[str, object]) -> list[tuple[str, str]]:
    return [(item["kind"], item["path"].rpartition("site-packages/")[2]) for item in facts["problems"]]  # type: ignore[index]


def made(tmp_path: Path) -> Path:
    return toys.venv(tmp_path / "venv", toys.good())


def test_a_whole_environment_has_no_problems(tmp_path: Path) -> None:
    facts = survey.survey(made(tmp_path))
    assert facts["problems"] == []
    assert {item["name"]: item["version"] for item in facts["distributions"]}["nvidia-cuda-nvrtc"] == "13.0.88"
    assert facts["torch"] == {"version": "2.11.0+cu130", "cuda": "13.0", "git": "70d99e9"}
    assert facts["python"] == {"version": "3.11.7", "minor": "3.11"}
    assert json.loads(json.dumps(facts)) == facts


def test_edited_and_missing_files_are_told(tmp_path: Path) -> None:
    venv = made(tmp_path)
    (toys.site(venv) / "soundfile/__init__.py").write_bytes(b"VALUE = 2\n")
    (toys.site(venv) / "engine/__init__.py").unlink()
    (toys.site(venv) / "torch/version.py").write_bytes(b"longer than before, so that its size tells" * 9)
    assert kinds(survey.survey(venv)) == [
        ("edited", "soundfile/__init__.py"),
        ("edited", "torch/version.py"),
        ("missing", "engine/__init__.py"),
    ]


def test_files_that_no_distribution_brought_are_told_once_for_each_folder(tmp_path: Path) -> None:
    venv = made(tmp_path)
    extra = toys.site(venv) / "copied"
    (extra / "__pycache__").mkdir(parents=True)
    (extra / "a.py").write_text("")
    (extra / "b.py").write_text("")
    (toys.site(venv) / "engine/__pycache__").mkdir()
    (toys.site(venv) / "engine/__pycache__/x.cpython-311.pyc").write_text("")
    assert kinds(survey.survey(venv)) == [("unowned", "copied")]


def test_paths_that_lead_out_of_the_environment_are_told_and_not_read(tmp_path: Path) -> None:
    venv = made(tmp_path)
    outside = tmp_path / "outside.txt"
    os.mkfifo(outside)  # opening it would never end
    record = toys.site(venv) / "engine-1.0.dist-info/RECORD"
    with record.open("a") as stream:
        stream.write(f"../../../../outside.txt,sha256=x,1\n{outside},sha256=x,1\n../../../bin/tool,sha256=x,3\n")
    found = survey.survey(venv)["problems"]
    assert [(item["kind"], item["path"]) for item in found] == [
        ("escapes", "../../../../outside.txt"),
        ("escapes", str(outside)),
        ("missing", "bin/tool"),
    ]


def test_a_pipe_in_place_of_a_file_is_told_and_does_not_block(tmp_path: Path) -> None:
    venv = made(tmp_path)
    path = toys.site(venv) / "engine/__init__.py"
    path.unlink()
    os.mkfifo(path)
    library = toys.site(venv) / "sgl_kernel/common_ops.abi3.so"
    library.unlink()
    os.mkfifo(library)
    found = {item["kind"] for item in survey.survey(venv)["problems"]}
    assert {"edited", "damaged"} <= found


def test_unchanged_files_are_not_read_again(tmp_path: Path) -> None:
    venv, cache = made(tmp_path), tmp_path / "cache.json"
    first = survey.survey(venv, cache)
    second = survey.survey(venv, cache)
    assert (first["read_files"] > 10, second["read_files"]) == (True, 0)
    for facts in (first, second):
        del facts["read_files"], facts["seconds"]
    assert first == second


def test_a_change_that_keeps_size_and_mtime_is_still_seen(tmp_path: Path) -> None:
    venv, cache = made(tmp_path), tmp_path / "cache.json"
    survey.survey(venv, cache)
    path = toys.site(venv) / "soundfile/__init__.py"
    before = path.stat()
    path.write_bytes(b"VALUE = 9\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert kinds(survey.survey(venv, cache)) == [("edited", "soundfile/__init__.py")]


def test_a_known_problem_is_told_again_from_the_cache(tmp_path: Path) -> None:
    venv, cache = made(tmp_path), tmp_path / "cache.json"
    (toys.site(venv) / "soundfile/__init__.py").write_bytes(b"VALUE = 2\n")
    (toys.site(venv) / "torch/lib/libc10.so").write_bytes(b"\x7fELF")
    first = kinds(survey.survey(venv, cache))
    again = survey.survey(venv, cache)
    assert (kinds(again), again["read_files"]) == (first, 0)
    assert ("damaged", "torch/lib/libc10.so") in first


def test_a_changed_library_is_read_again(tmp_path: Path) -> None:
    venv, cache = made(tmp_path), tmp_path / "cache.json"
    survey.survey(venv, cache)
    (toys.site(venv) / "torch/lib/libc10_cuda.so").write_bytes(toys.elf("libc10_cuda.so"))
    assert list(survey.survey(venv, cache)["unresolved"].values()) == [[toys.ADDED]]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": []}', '{"files": {"a": 1}}'])
def test_a_damaged_cache_counts_as_none(tmp_path: Path, text: str) -> None:
    venv, cache = made(tmp_path), tmp_path / "cache.json"
    cache.write_text(text)
    facts = survey.survey(venv, cache)
    assert (facts["problems"], facts["read_files"] > 10) == ([], True)


def test_the_cache_of_another_environment_is_not_used(tmp_path: Path) -> None:
    cache = tmp_path / "cache.json"
    survey.survey(made(tmp_path), cache)
    other = toys.venv(tmp_path / "other", toys.good())
    assert survey.survey(other, cache)["read_files"] > 10


def test_a_cache_that_other_code_has_written_is_not_used(tmp_path: Path) -> None:
    venv, cache = made(tmp_path), tmp_path / "cache.json"
    survey.survey(venv, cache)
    value = json.loads(cache.read_text())
    value["key"][-1] = "another version of the reader"
    cache.write_text(json.dumps(value))
    assert survey.survey(venv, cache)["read_files"] > 10


def test_a_folder_without_packages_is_no_environment(tmp_path: Path) -> None:
    with pytest.raises(bom.NotAVenv):
        survey.survey(tmp_path)


def test_nothing_of_what_is_surveyed_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    bomb = f"open({str(mark)!r}, 'w')\n".encode()
    dist = toys.Dist("bomb", "1", {"bomb/__init__.py": bomb, "sitecustomize.py": bomb, "bomb.pth": b"import bomb\n"})
    survey.survey(toys.venv(tmp_path / "venv", [dist, toys.torch()]))
    assert not mark.exists()


def test_a_new_file_in_an_environment_that_is_known_is_seen(tmp_path: Path) -> None:
    venv, cache = made(tmp_path), tmp_path / "cache.json"
    survey.survey(venv, cache)
    (toys.site(venv) / "copied.py").write_text("")
    assert kinds(survey.survey(venv, cache)) == [("unowned", "copied.py")]


def test_a_lost_script_outside_site_packages_is_seen_when_it_goes_and_when_it_is_back(tmp_path: Path) -> None:
    venv, cache = made(tmp_path), tmp_path / "cache.json"
    script = venv / "bin" / "tool"
    script.parent.mkdir()
    script.write_bytes(b"#!/bin/sh")
    with (toys.site(venv) / "engine-1.0.dist-info/RECORD").open("a") as stream:
        stream.write(f"../../../bin/tool,{toys.record_hash(b'#!/bin/sh')},9\n")
    assert survey.survey(venv, cache)["problems"] == []
    script.unlink()
    assert [item["kind"] for item in survey.survey(venv, cache)["problems"]] == ["missing"]
    script.write_bytes(b"#!/bin/sh")
    assert survey.survey(venv, cache)["problems"] == []


def test_on_a_host_the_releases_of_the_slots_are_read(tmp_path: Path) -> None:
    for name in ("old", "serving"):
        (tmp_path / "releases" / name / "venv").mkdir(parents=True)
    (tmp_path / "releases" / "serving" / "manifest.json").write_text('{"stack": "cpu"}')
    (tmp_path / "releases" / "old" / "manifest.json").write_text("{broken")
    os.utime(tmp_path / "releases" / "old", (4e9, 4e9))
    assert [(name, manifest) for name, _, manifest in survey.environments("", tmp_path)] == [("old", {})]
    for slot in ("gpu0", "gpu1"):
        (tmp_path / "slots" / slot).mkdir(parents=True)
        (tmp_path / "slots" / slot / "current").symlink_to("../../releases/serving")
    (tmp_path / "slots" / "gpu2").mkdir()
    (tmp_path / "slots" / "gpu2" / "current").symlink_to("../../releases/gone")
    venv = tmp_path / "releases" / "serving" / "venv"
    assert survey.environments("", tmp_path) == [("serving", venv, {"stack": "cpu"})]
    assert survey.environments("/opt/x", tmp_path) == [("/opt/x", Path("/opt/x"), {})]
    assert survey.environments("", tmp_path / "empty") == []
