"""Damaged and hostile inputs by the thousand: told or read, but never a crash, a hang, or a file where none belongs.

The seed is fixed, so that a failure can be had again.
"""

from __future__ import annotations

import io
import json
import random
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import audit_toys as toys
from audit_toys import Dist
from ddtree import distinfo, native, survey

from fleet.audit import wheels
from fleet.audit.case import Case
from fleet.audit.demangle import demangle
from fleet.audit.judge import judge

LIBRARIES = 1500
WHEELS = 500
ENVIRONMENTS = 300
TEXTS = 1200
MOST_SECONDS = 5.0  # for one input; they are a few kilobytes each

HOSTILE = [
    b"\0",
    b"\xff",
    b"\xff" * 8,
    b"\0" * 8,
    b"../",
    b"\xff\xff\xff\x7f",
    b"\x01\x00\x00\x80",
    b"=",
    b",",
    b"\n",
    b'"',
]


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Cut, flipped, overwritten, repeated or spliced, several times over."""
    found = bytearray(data)
    for _ in range(dice.randint(1, 6)):
        if not found:
            break
        at = dice.randrange(len(found))
        match dice.randrange(6):
            case 0:
                del found[at:]
            case 1:
                found[at] ^= 1 << dice.randrange(8)
            case 2:
                word = dice.choice(HOSTILE)
                found[at : at + len(word)] = word
            case 3:
                found[at:at] = found[at : at + dice.randint(1, 64)]
            case 4:
                for place in range(at, min(len(found), at + dice.randint(1, 8))):
                    found[place] = dice.randrange(256)
            case 5:
                del found[at : at + dice.randint(1, 32)]
    return bytes(found)


def timed(action: Callable[[], object], what: object) -> None:
    started = time.monotonic()
    action()
    assert time.monotonic() - started < MOST_SECONDS, what


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def seeds() -> list[bytes]:
    full = toys.elf(
        "libx.so.1",
        ["liba.so", "libb.so"],
        "$ORIGIN/lib",
        undefined=["_ZN3c104goneEv", "malloc"],
        weak=["w"],
        exported=["_ZN2at4haveEv", "b"],
        hidden=["h"],
        needs={"libc.so.6": ["GLIBC_2.14", "GLIBC_2.34"], "libm.so.6": ["GLIBC_2.29"]},
        defines=["libx.so.1", "X_2"],
        device=toys.fatbin((2, 90, True), (1, 120, False)) + toys.fatbin((2, 80, False)),
    )
    return [full, toys.elf(exported=["a", "b"], gnu_hash=True), toys.elf("liby.so", device=toys.fatbin((2, 75, False)))]


def test_damaged_libraries(tmp_path: Path) -> None:
    dice = random.Random(20261201)
    path = tmp_path / "lib.so"
    told = 0
    for number in range(LIBRARIES):
        path.write_bytes(mutate(dice.choice(seeds()), dice))

        def read() -> None:
            with path.open("rb", buffering=0) as stream:
                image = native.Image(stream)
                json.dumps(image.facts().as_dict())
                image.symbols()

        try:
            timed(read, number)
        except native.BadLibrary:
            told += 1
    assert LIBRARIES / 3 < told < LIBRARIES
    assert listing(tmp_path) == {"lib.so"}


def test_libraries_crafted_to_loop(tmp_path: Path) -> None:
    """Chains that point at themselves, and counts as large as their fields can say."""
    base = seeds()[0]
    path = tmp_path / "lib.so"
    for at in range(0, len(base) - 8, 4):
        for word in (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x01\0\0\0", b"\xff\xff\xff\x7f"):
            path.write_bytes(base[:at] + word + base[at + 4 :])

            def read() -> None:
                with path.open("rb", buffering=0) as stream:
                    image = native.Image(stream)
                    image.facts()
                    image.symbols()

            try:
                timed(read, (at, word))
            except native.BadLibrary:
                continue


def test_damaged_wheels(tmp_path: Path) -> None:
    dice = random.Random(7)
    folder = tmp_path / "a" / "b" / "wheels"
    folder.mkdir(parents=True)
    dist = Dist("demo", "1.0", {"demo/__init__.py": b"a = 1\n", "demo/_C.so": seeds()[0]}, requires=("torch>=2",))
    path = dist.wheel(folder)
    whole = path.read_bytes()
    before = listing(tmp_path)
    findings = 0
    for number in range(WHEELS):
        path.write_bytes(mutate(whole, dice) if number % 2 else hostile_wheel(dist, dice))
        facts: dict[str, object] = {}
        timed(lambda facts=facts: facts.update(wheels.survey_wheels([path], "3.11", 1)), number)
        findings += bool(judge(Case(facts)))
    assert findings > WHEELS * 0.8
    assert listing(tmp_path) == before


def hostile_wheel(dist: Dist, dice: random.Random) -> bytes:
    """A sound archive of members that are not: other names, texts and libraries."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", dice.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for name, data in {**dist.members(), f"{dist.folder}/RECORD": dist.record()}.items():
            if dice.random() < 0.4:
                data = mutate(data, dice)
            if dice.random() < 0.2:
                name = dice.choice(["../" * dice.randint(1, 4), "/tmp/", "..\\", "a/../../../", "./", "x/"]) + name
            archive.writestr(name, data)
    return buffer.getvalue()


def test_damaged_environments(tmp_path: Path) -> None:
    dice = random.Random(11)
    venv = toys.venv(tmp_path / "a" / "venv", toys.good())
    files = sorted(path for path in toys.site(venv).rglob("*") if path.is_file())
    before = listing(tmp_path)
    for number in range(ENVIRONMENTS):
        chosen = dice.sample(files, 3)
        kept = {path: path.read_bytes() for path in chosen}
        for path, data in kept.items():
            path.write_bytes(mutate(data, dice))
        facts: dict[str, object] = {}
        timed(lambda facts=facts: facts.update(survey.survey(venv)), number)
        json.dumps([finding.as_dict() for finding in judge(Case(facts))])
        for path, data in kept.items():
            path.write_bytes(data)
    assert listing(tmp_path) == before
    assert judge(Case(survey.survey(venv))) == []


def test_damaged_texts() -> None:
    dice = random.Random(13)
    dist = toys.good()[3]
    members = dist.members()
    metadata, record = members[f"{dist.folder}/METADATA"], dist.record()
    requires = b"Requires-Dist: torch (>=2.0) ; python_version >= '3.8' and extra == 'x'\n"
    for number in range(TEXTS):
        texts = [mutate(text, dice).decode("utf-8", "replace") for text in (metadata + requires, record)]
        found: dict[str, object] = {}

        def read(texts: list[str] = texts, found: dict[str, object] = found) -> None:
            facts, _ = distinfo.distribution(dist.folder, texts[0], texts[0], texts[1])
            found.update({"distributions": [facts], "python": {"minor": "3.11"}})
            judge(Case(found))
            demangle(mutate(toys.ADDED.encode(), dice).decode("latin-1"))

        timed(read, number)
