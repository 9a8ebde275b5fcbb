"""Wheels are judged before they are installed, by the same facts as a venv after it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import audit_toys as toys
import pytest
from audit_toys import Dist
from ddtree import survey

from fleet.audit import wheels
from fleet.audit.case import Case, Target
from fleet.audit.judge import judge


def written(folder: Path, dists: list[Dist]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    return [dist.wheel(folder) for dist in dists]


def judged(facts: dict[str, object], target: Target | None = None) -> list[tuple[str, str, tuple[str, ...]]]:
    found = judge(Case(facts, target=target))
    return [(item.rule, item.subject, item.evidence) for item in found]


@pytest.mark.parametrize(
    "dists",
    [
        toys.good(),
        [dist for dist in toys.good() if dist.name != "nvidia-cuda-nvrtc"],
        [toys.torch("2.9.1", "cu128", symbol=toys.CHECK), *toys.good()[1:]],
        [*toys.good(), Dist("nvidia-cublas-cu12", "12.8.4.1")],
    ],
)
def test_wheels_and_the_venv_made_of_them_give_the_same_findings(tmp_path: Path, dists: list[Dist]) -> None:
    target = Target(glibc="2.16", gpus={"GPU-1": "7.5"}, toolkit="12.8")
    before = wheels.survey_wheels(written(tmp_path / "wheels", dists), "3.11")
    after = survey.survey(toys.venv(tmp_path / "venv", dists))
    after["host"] = {}
    assert judged(before, target) == judged(after, target)
    assert judged(before, target)


def test_wheels_that_fit_give_no_finding(tmp_path: Path) -> None:
    assert judged(wheels.survey_wheels(written(tmp_path / "wheels", toys.good()), "3.11")) == []


@pytest.mark.parametrize("member", ["../outside.py", "/etc/outside.py", "a/../../outside.py", "a\\..\\outside.py"])
def test_a_member_outside_the_target_is_told_and_never_written(tmp_path: Path, member: str) -> None:
    (path,) = written(tmp_path / "wheels", [Dist("hostile")])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(member, b"x")
    found = judged(wheels.survey_wheels([path], "3.11"))
    assert found[0][:2] == ("FILE-ESCAPES", "hostile")
    assert sorted(item.name for item in tmp_path.rglob("*") if item.is_file()) == [path.name]


def test_a_record_that_lies_is_told(tmp_path: Path) -> None:
    dist = Dist("liar", files={"liar/__init__.py": b"a = 1\n", "liar/_C.so": toys.elf(runpath="a")})
    (path,) = written(tmp_path / "wheels", [dist])
    lies = zipfile.ZipFile(path).read("liar-1.0.dist-info/RECORD")
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in dist.members().items():
            changed = {"liar/__init__.py": b"a = 2\n", "liar/_C.so": toys.elf(runpath="b")}
            archive.writestr(name, changed.get(name, data))
        archive.writestr("liar-1.0.dist-info/RECORD", lies)
    rule, subject, evidence = judged(wheels.survey_wheels([path], "3.11"))[0]
    assert (rule, subject, len(evidence)) == ("FILE-EDITED", "liar", 2)


def test_a_truncated_wheel_is_told(tmp_path: Path) -> None:
    paths = written(tmp_path / "wheels", [Dist("whole"), Dist("cut")])
    paths[1].write_bytes(paths[1].read_bytes()[:-40])
    found = judged(wheels.survey_wheels(paths, "3.11"))
    assert [item[:2] for item in found] == [("SET-METADATA", "cut")]


def test_a_library_cut_off_inside_a_wheel_is_told(tmp_path: Path) -> None:
    dist = Dist("cut", files={"cut/_C.so": toys.elf(exported=["a"])[:150]})
    found = judged(wheels.survey_wheels(written(tmp_path / "wheels", [dist]), "3.11"))
    assert [item[:2] for item in found] == [("LIB-DAMAGED", "cut")]


def test_a_wheelhouse_of_folders_by_digest_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, [Dist("one")])[0]
    (tmp_path / ("a" * 64)).mkdir()
    path.rename(tmp_path / ("a" * 64) / path.name)
    assert [item.name for item in wheels.wheels_in(tmp_path)] == [path.name]
