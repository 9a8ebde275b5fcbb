"""How the libraries of an environment fit each other: who finds whom, and whose symbols nobody has.

Works on facts that were read before (`native`), so the same code judges files on a disk and members of wheels.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Iterable

from .native import Native, Symbols

# Mangled names whose outermost namespace is one of torch's, and the C functions that torch offers to extensions.
_TORCH = re.compile(
    rb"_Z(?:T[VTIS]|GV|T[hv]n?\d+_(?:n?\d+_)*)?N[VKrRO]*(?:3c10|2at|5torch|6caffe2)\d*[A-Za-z_]"
    rb"|aoti_torch_|torch_|THP[A-Z]"
)
TORCH_LIBRARIES = "torch/lib/"
# Folders whose libraries torch has loaded, by path, before any extension is imported.
_PRELOADED = re.compile(r"(?:torch/lib|nvidia/[^/]+/lib)\Z")


@dataclasses.dataclass(frozen=True)
class Library:
    """One library at `path` in the environment; only its torch symbols are kept."""

    path: str
    size: int
    native: Native
    wants: frozenset[bytes] = frozenset()
    gives: frozenset[bytes] = frozenset()

    @classmethod
    def of(cls, path: str, size: int, native: Native, symbols: Symbols) -> Library:
        return cls(
            path,
            size,
            native,
            frozenset(name for name in symbols.undefined if _TORCH.match(name)),
            frozenset(name for name in symbols.exported if _TORCH.match(name)),
        )


class Environment:
    """Libraries by path, as the dynamic linker would meet them when torch was imported first."""

    def __init__(self, libraries: Iterable[Library]) -> None:
        self.libraries = {library.path: library for library in libraries}
        self._loaded: dict[str, str] = {}
        for path, library in sorted(self.libraries.items()):
            if _PRELOADED.search(posixpath.dirname(path)):
                self._loaded.setdefault(posixpath.basename(path), path)
                if library.native.soname:
                    self._loaded.setdefault(library.native.soname, path)

    def find(self, library: Library, soname: str) -> str:
        """Path of the library in this environment that the linker takes for `soname`; empty if there is none."""
        folder = posixpath.dirname(library.path)
        for entry in library.native.runpath.split(":"):
            if entry == "$ORIGIN" or entry.startswith(("$ORIGIN/", "${ORIGIN}")):
                rest = entry.replace("${ORIGIN}", "$ORIGIN", 1).removeprefix("$ORIGIN").lstrip("/")
                path = posixpath.normpath(posixpath.join(folder, rest, soname))
                if path in self.libraries:
                    return path
        if soname in self._loaded:
            return self._loaded[soname]
        # packages load such neighbours themselves before, by path
        neighbour = posixpath.join(folder, soname)
        return neighbour if neighbour in self.libraries else ""

    def missing(self, library: Library) -> list[str]:
        """Needed libraries that this environment does not hold: the system's, or nobody's."""
        return [soname for soname in library.native.needed if not self.find(library, soname)]

    def closure(self, library: Library) -> set[str]:
        """Paths of everything that is loaded with `library`, itself included."""
        seen, todo = {library.path}, [library]
        while todo:
            current = todo.pop()
            for soname in current.native.needed:
                path = self.find(current, soname)
                if path and path not in seen:
                    seen.add(path)
                    todo.append(self.libraries[path])
        return seen

    def unresolved(self) -> dict[str, list[str]]:
        """Torch symbols, by library, that nothing offers: not the library's own closure, and not torch."""
        torch: set[bytes] = set()
        for path, library in self.libraries.items():
            if posixpath.dirname(path).endswith(TORCH_LIBRARIES.rstrip("/")):
                torch |= library.gives
        found = {}
        for path, library in sorted(self.libraries.items()):
            left = library.wants - torch - library.gives
            if left:
                for other in self.closure(library):
                    left -= self.libraries[other].gives
            if left:
                found[path] = sorted(name.decode("utf-8", "replace") for name in left)
        return found

    def unversioned(self) -> list[tuple[str, str, str]]:
        """(library, soname, version) of symbol versions that the library found for a need does not define."""
        found = []
        for path, library in sorted(self.libraries.items()):
            for soname, versions in library.native.needs.items():
                other = self.find(library, soname)
                offered = self.libraries[other].native.defines if other else ()
                if offered:
                    found += [(path, soname, version) for version in versions if version not in offered]
        return found


def system_needs(libraries: Iterable[Library], environment: Environment) -> dict[str, list[str]]:
    """Soname to the symbol versions asked of it, for everything that the environment itself does not hold."""
    wanted: dict[str, set[str]] = {}
    for library in libraries:
        for soname in environment.missing(library):
            wanted.setdefault(soname, set()).update(library.native.needs.get(soname, ()))
    return {soname: sorted(versions) for soname, versions in sorted(wanted.items())}


def facts(environment: Environment) -> list[dict[str, object]]:
    """Every library, small enough to send: what it says, and what of its needs this environment does not hold."""
    return [
        {
            "path": path,
            "size": library.size,
            "torch": bool(library.wants),
            "missing": environment.missing(library),
            **library.native.as_dict(),
        }
        for path, library in sorted(environment.libraries.items())
    ]
