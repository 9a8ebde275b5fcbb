"""Small made-up libraries, wheels and environments, byte by byte, for the tests of the audit."""

from __future__ import annotations

import csv
import dataclasses
import io
import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from ddtree import distinfo

PTX, CUBIN = 1, 2


def fatbin(*images: tuple[int, int, bool | str], payload: bytes = b"\x7fELFcode") -> bytes:
    """A section of device code: (kind, architecture, for exactly that one? or "f"), in one container, and padding."""
    body = b""
    for kind, arch, exact in images:
        flags = 0x11 | (0x0020_0000 if exact == "f" else 0x0010_0000 if exact else 0)
        body += struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(payload), 0, 64, 0, 8, arch, 64, 0, flags, 0, 0)
        body += payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body + b"\0" * 16


def elf(
    soname: str = "",
    needed: Iterable[str] = (),
    runpath: str = "",
    undefined: Iterable[str] = (),
    weak: Iterable[str] = (),
    exported: Iterable[str] = (),
    hidden: Iterable[str] = (),
    needs: Mapping[str, Iterable[str]] | None = None,
    defines: Iterable[str] = (),
    device: bytes = b"",
    machine: int = 62,
    gnu_hash: bool = False,
) -> bytes:
    """A shared library that nothing could run, but that says all this of itself."""
    strings = bytearray(b"\0")

    def text(value: str) -> int:
        at = len(strings)
        strings.extend(value.encode() + b"\0")
        return at

    symbols = [struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)]
    for names, bind, other, section in ((undefined, 1, 0, 0), (weak, 2, 0, 0), (exported, 1, 0, 1), (hidden, 1, 2, 1)):
        symbols += [struct.pack("<IBBHQQ", text(name), bind << 4 | 2, other, section, 0x100, 8) for name in names]
    first_own = 1 + len(list(undefined)) + len(list(weak))
    verneed = b""
    wanted = {library: list(versions) for library, versions in (needs or {}).items()}
    for number, (library, versions) in enumerate(wanted.items(), 1):
        size = 16 + 16 * len(versions)
        verneed += struct.pack("<HHIII", 1, len(versions), text(library), 16, size if number < len(wanted) else 0)
        for index, version in enumerate(versions, 1):
            verneed += struct.pack("<IHHII", 0, 0, index + 1, text(version), 16 if index < len(versions) else 0)
    verdef = b""
    offered = list(defines)
    for index, version in enumerate(offered, 1):
        verdef += struct.pack("<HHHHIII", 1, 0, index, 1, 0, 20, 28 if index < len(offered) else 0)
        verdef += struct.pack("<II", text(version), 0)
    dynamic = [(1, text(name)) for name in needed]
    dynamic += [(14, text(soname))] if soname else []
    dynamic += [(29, text(runpath))] if runpath else []
    if gnu_hash:
        own = len(symbols) - first_own
        table = struct.pack("<4IQ", 1, first_own, 1, 6, 0) + struct.pack("<I", first_own if own else 0)
        table += struct.pack(f"<{own}I", *([0] * (own - 1) + [1])) if own else b""
    else:
        table = struct.pack("<II", 1, len(symbols)) + b"\0" * (4 + 4 * len(symbols))

    parts: dict[str, tuple[int, bytes]] = {}
    at = 64 + 2 * 56
    for name, data in (
        ("strings", bytes(strings)),
        ("symbols", b"".join(symbols)),
        ("hash", table),
        ("verneed", verneed),
        ("verdef", verdef),
        ("device", device),
    ):
        at += -at % 8
        parts[name] = (at, data)
        at += len(data)
    dynamic += [(5, parts["strings"][0]), (10, len(strings)), (6, parts["symbols"][0]), (11, 24)]
    dynamic += [(0x6FFFFEF5 if gnu_hash else 4, parts["hash"][0])]
    dynamic += [(0x6FFFFFFE, parts["verneed"][0]), (0x6FFFFFFF, len(wanted))] if wanted else []
    dynamic += [(0x6FFFFFFC, parts["verdef"][0]), (0x6FFFFFFD, len(offered))] if offered else []
    at += -at % 8
    parts["dynamic"] = (at, b"".join(struct.pack("<qQ", *entry) for entry in [*dynamic, (0, 0)]))
    at += len(parts["dynamic"][1])
    names = b"\0.nv_fatbin\0.shstrtab\0"
    parts["names"] = (at, names)
    at += len(names)
    at += -at % 8
    sections = [(0, 0, 0, 0), (1, 1, *_span(parts["device"])), (12, 3, *_span(parts["names"]))]
    headers = b"".join(
        struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, 0, 0, 1, 0) for name, kind, offset, size in sections
    )
    header = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    header += struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, at, 0, 64, 56, 2, 64, len(sections), 2)
    total = at + len(headers)
    programs = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, total, total, 4096)
    programs += struct.pack("<IIQQQQQQ", 2, 6, *[parts["dynamic"][0]] * 3, *[len(parts["dynamic"][1])] * 2, 8)
    image = bytearray(total)
    image[:64], image[64 : 64 + 112], image[at:] = header, programs, headers
    for offset, data in parts.values():
        image[offset : offset + len(data)] = data
    return bytes(image)


def _span(part: tuple[int, bytes]) -> tuple[int, int]:
    return part[0], len(part[1])


@dataclasses.dataclass
class Dist:
    """A distribution to be made, as a wheel or installed."""

    name: str
    version: str = "1.0"
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    requires: tuple[str, ...] = ()
    tag: str = "py3-none-any"
    metadata_version: str = ""

    @property
    def folder(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}.dist-info"

    @property
    def wheel_name(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-{self.tag}.whl"

    def members(self) -> dict[str, bytes]:
        metadata = f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self.metadata_version or self.version}\n"
        metadata += "".join(f"Requires-Dist: {line}\n" for line in self.requires)
        wheel = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {self.tag}\n"
        found = {**(self.files or {f"{self.name.replace('-', '_')}/__init__.py": b"VALUE = 1\n"})}
        found |= {f"{self.folder}/METADATA": metadata.encode(), f"{self.folder}/WHEEL": wheel.encode()}
        return found

    def record(self) -> bytes:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        for path, data in self.members().items():
            writer.writerow((path, record_hash(data), len(data)))
        writer.writerow((f"{self.folder}/RECORD", "", ""))
        return out.getvalue().encode()

    def install(self, site: Path) -> None:
        for path, data in {**self.members(), f"{self.folder}/RECORD": self.record()}.items():
            target = site / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    def wheel(self, folder: Path) -> Path:
        path = folder / self.wheel_name
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in {**self.members(), f"{self.folder}/RECORD": self.record()}.items():
                archive.writestr(name, data)
        return path


def record_hash(data: bytes) -> str:
    import hashlib

    return distinfo.record_hash("sha256", hashlib.sha256(data).digest())


def venv(root: Path, dists: Iterable[Dist], minor: str = "3.11") -> Path:
    site = root / "lib" / f"python{minor}" / "site-packages"
    site.mkdir(parents=True, exist_ok=True)
    (root / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion_info = {minor}.7\n")
    for dist in dists:
        dist.install(site)
    return root


def site(root: Path, minor: str = "3.11") -> Path:
    return root / "lib" / f"python{minor}" / "site-packages"


CHECK = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib"
ADDED = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb"


def torch(version: str = "2.11.0", build: str = "cu130", symbol: str = ADDED, archs: Iterable[int] = (90, 120)) -> Dist:
    cuda = f"'{build[2:4]}.{build[4:]}'" if build.startswith("cu") else "None"
    major = build[2:4]
    text = f"__version__ = '{version}+{build}'\ncuda: Optional[str] = {cuda}\ngit_version = '70d99e9'\n"
    return Dist(
        "torch",
        version,
        {
            "torch/version.py": text.encode(),
            "torch/lib/libc10.so": elf("libc10.so", exported=["_ZN3c105ErrorC1ESs"]),
            "torch/lib/libc10_cuda.so": elf(
                "libc10_cuda.so",
                needed=["libc10.so", f"libcudart.so.{major}", "libc.so.6"],
                runpath="$ORIGIN:$ORIGIN/../../nvidia/cu13/lib",
                exported=[symbol],
                needs={"libc.so.6": ["GLIBC_2.14", "GLIBC_2.17"]},
            ),
            "torch/lib/libtorch_cuda.so": elf(
                "libtorch_cuda.so",
                needed=["libc10_cuda.so"],
                runpath="$ORIGIN",
                device=fatbin(*((CUBIN, arch, False) for arch in archs)),
            ),
        },
        tag="cp311-cp311-manylinux_2_28_x86_64",
    )


def runtime() -> Dist:
    data = elf("libcudart.so.13", exported=["cudaMalloc"], defines=["libcudart.so.13"])
    return Dist("nvidia-cuda-runtime", "13.0.96", {"nvidia/cu13/lib/libcudart.so.13": data})


def nvrtc() -> Dist:
    return Dist("nvidia-cuda-nvrtc", "13.0.88", {"nvidia/cu13/lib/libnvrtc.so.13": elf("libnvrtc.so.13")})


def kernels(
    name: str = "sgl-kernels",
    symbol: str = ADDED,
    images: Iterable[tuple[int, int, bool]] = (),
    needed: Iterable[str] = (),
) -> Dist:
    """An extension of torch. Its name is none that needs a tie."""
    library = elf(
        needed=["libc10_cuda.so", "libnvrtc.so.13", "libcudart.so.13", "libcuda.so.1", "libc.so.6", *needed],
        undefined=[symbol, "cudaMalloc", "malloc"],
        weak=["_ZN3c104cuda7missingEv"],
        device=fatbin(*(images or ((CUBIN, 90, False), (CUBIN, 120, True)))),
        needs={"libcudart.so.13": ["libcudart.so.13"]},
    )
    files = {"sgl_kernel/__init__.py": f"# {name}\n".encode(), "sgl_kernel/common_ops.abi3.so": library}
    return Dist(name, "0.4.2", files, tag="cp310-abi3-manylinux2014_x86_64")


def good() -> list[Dist]:
    """A set whose parts fit each other."""
    return [
        torch(),
        runtime(),
        nvrtc(),
        kernels(),
        Dist("soundfile", "0.13.1"),
        Dist("engine", "1.0", requires=("torch",)),
    ]
