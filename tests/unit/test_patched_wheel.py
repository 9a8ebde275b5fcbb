"""Patched wheels: the pinned input, strict hunks, the same bytes twice, a RECORD that installers accept."""

from __future__ import annotations

import csv
import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from fleet import patched_wheel
from fleet.patched_wheel import PatchedWheelError, apply, build, parse, verify_record

SOURCE = "one\ntwo\nthree\nfour\nfive\n"
PATCH = """--- a/demo/core.py
+++ b/demo/core.py
@@ -2,3 +2,4 @@ heading
 two
-three
+THREE
+and a half
 four
"""


def make_wheel(folder: Path) -> tuple[Path, str]:
    wheel = folder / "demo-1.2-cp312-cp312-manylinux_2_34_x86_64.whl"
    files = {
        "demo/core.py": SOURCE,
        "demo/_version.py": "__version__ = version = '1.2'\n__version_tuple__ = version_tuple = (1, 2)\n",
        "demo/E=8,N=16.json": "{}",
        "demo-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: demo\nVersion: 1.2\n\ntext\n",
        "demo-1.2.dist-info/RECORD": "stale,,\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name, (2024, 5, 6, 7, 8, 10))
            entry.external_attr = (0o100755 if name.endswith("core.py") else 0o100644) << 16
            archive.writestr(entry, text)
    return wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()


def patch_file(folder: Path, text: str = PATCH) -> Path:
    path = folder / "0001-demo.patch"
    path.write_text(text)
    return path


def test_a_patched_wheel_has_the_change_the_local_version_and_a_true_record(tmp_path: Path) -> None:
    wheel, sha256 = make_wheel(tmp_path)
    out = build(wheel, sha256, [patch_file(tmp_path)], tmp_path / "out")
    assert out.name == "demo-1.2+ddtree.1-cp312-cp312-manylinux_2_34_x86_64.whl"
    assert verify_record(out) == []
    with zipfile.ZipFile(out) as archive:
        assert archive.read("demo/core.py").decode() == "one\ntwo\nTHREE\nand a half\nfour\nfive\n"
        assert b"Version: 1.2+ddtree.1\n" in archive.read("demo-1.2+ddtree.1.dist-info/METADATA")
        assert b"(1, 2, 'ddtree.1')" in archive.read("demo/_version.py")
        assert archive.getinfo("demo/core.py").external_attr >> 16 == 0o100755
        rows = list(csv.reader(io.StringIO(archive.read("demo-1.2+ddtree.1.dist-info/RECORD").decode())))
    assert "demo/E=8,N=16.json" in [row[0] for row in rows], "a name with a comma must stay one field"
    assert all(len(row) == 3 for row in rows)


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    wheel, sha256 = make_wheel(tmp_path)
    patches = [patch_file(tmp_path)]
    first, second = (build(wheel, sha256, patches, tmp_path / name) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}, "not the clock"


def test_another_wheel_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    wheel, _ = make_wheel(tmp_path)
    with pytest.raises(PatchedWheelError, match="pinned is 00"):
        build(wheel, "00" * 32, [patch_file(tmp_path)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "source",
    [
        "one\nTWO\nthree\nfour\nfive\n",  # context differs
        "zero\none\ntwo\nthree\nfour\nfive\n",  # the right lines, one further down: no offset is searched
        "one\ntwo\n",  # too short
    ],
)
def test_a_hunk_that_does_not_match_exactly_is_named(source: str) -> None:
    with pytest.raises(PatchedWheelError, match=r"demo/core.py: hunk 1 of 1 does not apply at line \d+"):
        apply(source, parse(PATCH, "0001-demo.patch")[0])


def test_a_patch_for_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    wheel, sha256 = make_wheel(tmp_path)
    with pytest.raises(PatchedWheelError, match=r"demo/other.py is not in"):
        build(wheel, sha256, [patch_file(tmp_path, PATCH.replace("core", "other"))], tmp_path / "out")


def test_a_cut_off_patch_is_refused() -> None:
    with pytest.raises(PatchedWheelError, match="shorter than its header"):
        parse("".join(PATCH.splitlines(keepends=True)[:-1]), "0001-demo.patch")


def test_a_file_changed_after_packing_fails_its_record(tmp_path: Path) -> None:
    wheel, sha256 = make_wheel(tmp_path)
    out = build(wheel, sha256, [patch_file(tmp_path)], tmp_path / "out")
    broken = tmp_path / "broken.whl"
    with zipfile.ZipFile(out) as source, zipfile.ZipFile(broken, "w") as target:
        for name in source.namelist():
            target.writestr(name, b"tampered" if name == "demo/core.py" else source.read(name))
    assert verify_record(broken) == ["demo/core.py: content differs from RECORD"]


def test_the_digest_of_a_patch_set_follows_its_content(tmp_path: Path) -> None:
    path = patch_file(tmp_path)
    before = patched_wheel.patch_set_digest([path])
    path.write_text(PATCH + "\n")
    assert patched_wheel.patch_set_digest([path]) != before


def test_the_repository_s_patches_are_well_formed() -> None:
    folder = Path(__file__).parents[2] / "stacks" / "cu130-sglang0.5.11" / "patches"
    files = [patch.path for path in sorted(folder.glob("*.patch")) for patch in parse(path.read_text(), path.name)]
    assert "sglang/srt/speculative/dflash_worker.py" in files
    assert len(files) == len(set(files))
