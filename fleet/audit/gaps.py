"""Compare two bills of materials: what differs, what matters for CUDA first, and what would make one like the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from . import knowledge
from .checks_set import same_version

# What a row is about; in this order they are told.
GROUPS = ("python", "torch", "cuda", "kernels", "engine", "driver", "other")
_ENGINES = frozenset({"sglang", "ddtree-engine", "transformers", "tokenizers", "xgrammar", "outlines"})
_KERNELS = (
    "sglang-kernel", "sgl-kernel", "flashinfer", "flash-attn", "triton", "torchao", "torchvision", "torchaudio",
    "xformers", "torchcodec", "torch-memory-saver", "torch-c-dlpack", "deep-gemm", "quack-kernels", "apache-tvm-ffi",
    "vllm", "kernels",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One difference: what A has, what B has, and what would make B like A. `significant`: CUDA depends on it."""

    name: str
    group: str
    a: str
    b: str
    kind: str  # missing, extra, version, build, content, renamed
    action: str
    significant: bool

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def of_survey(survey: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a survey that is worth comparing and keeping: a bill of materials."""
    archs: dict[str, set[str]] = {}
    for library in survey.get("libraries") or ():
        if library.get("archs") and library.get("distribution"):
            archs.setdefault(library["distribution"], set()).update(library["archs"])
    keys = ("name", "version", "local", "content_sha256", "modules", "tags")
    return {
        "schema": 1,
        "root": survey.get("root", ""),
        "python": dict(survey.get("python") or {}),
        "torch": dict(survey.get("torch") or {}),
        "distributions": [
            {
                **{key: item[key] for key in keys if key in item},
                **({"archs": sorted(archs[item["name"]])} if item["name"] in archs else {}),
            }
            for item in survey.get("distributions") or ()
        ],
    }


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Row]:
    """Every difference of two bills of materials, whoever wrote them (`fleet bom`, a release's bom.json, a lock)."""
    have, want = _by_name(b), _by_name(a)
    rows = [*_python(a, b)]
    renamed: set[str] = set()
    for old, new in knowledge.RENAMED.items():
        for mine, yours in ((old, new), (new, old)):
            if mine in have and mine not in want and yours in want and yours not in have:
                renamed |= {mine, yours}
                rows.append(
                    Row(
                        yours,
                        _group(yours),
                        f"{yours} {_version(a, want[yours])}",
                        f"{mine} {_version(b, have[mine])}",
                        "renamed",
                        f"remove {mine}, install {yours}=={_version(a, want[yours])} ({old} became {new})",
                        True,
                    )
                )
    for name in sorted((have.keys() | want.keys()) - renamed):
        row = _row(name, a, b, want.get(name), have.get(name))
        if row:
            rows.append(row)
    return sorted(rows, key=lambda row: (not row.significant, GROUPS.index(row.group), row.name))


def _by_name(bom: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {str(item["name"]): item for item in bom.get("distributions") or ()}


def _python(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Row]:
    one, other = (_minor(bom) for bom in (a, b))
    if not one or not other or one == other:
        return []
    return [Row("python", "python", one, other, "version", f"make the environment with Python {one}", True)]


def _minor(bom: Mapping[str, Any]) -> str:
    python = bom.get("python") or {}
    if isinstance(python, str):
        return ".".join(python.split(".")[:2])
    return str(python.get("minor") or ".".join(str(python.get("version") or "").split(".")[:2]))


def _version(bom: Mapping[str, Any], item: Mapping[str, Any]) -> str:
    """torch's own file tells the build that wheels from PyPI leave out of their version."""
    said = str((bom.get("torch") or {}).get("version") or "")
    version = str(item["version"])
    return said if item["name"] == "torch" and said.partition("+")[0] == version else version


def _row(
    name: str,
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    want: Mapping[str, Any] | None,
    have: Mapping[str, Any] | None,
) -> Row | None:
    group = _group(name)
    wanted = _version(a, want) if want else ""
    found = _version(b, have) if have else ""
    significant = _significant(name, wanted, found)
    if want is None:
        return Row(name, group, "", found, "extra", f"remove {name}", significant)
    if have is None:
        return Row(name, group, wanted, "", "missing", f"install {name}=={wanted}", significant)
    if not same_version(wanted, found):
        one, _, local = wanted.partition("+")
        other, _, own = found.partition("+")
        if same_version(one, other):
            if not local or not own:
                return None  # one of them does not say which build it is
            action = f"install {name}=={wanted}: the same version, built for {local} instead of {own}"
            return Row(name, group, wanted, found, "build", action, True)
        return Row(name, group, wanted, found, "version", f"install {name}=={wanted}", significant)
    one, other = (str(item.get("content_sha256") or "") for item in (want, have))
    if one and other and one != other:
        action = f"install {name}=={wanted} again from A's wheel: the same version, other files"
        return Row(name, group, wanted, found, "content", action, significant)
    return None


def _group(name: str) -> str:
    if name == "torch":
        return "torch"
    if name.startswith(("nvidia-", "cuda-")) and name != "nvidia-ml-py":
        return "cuda"
    if name.startswith(_KERNELS):
        return "kernels"
    return "engine" if name in _ENGINES else "other"


def _significant(name: str, wanted: str, found: str) -> bool:
    """CUDA depends on it: torch, kernels, NVIDIA's wheels, and whatever carries a CUDA build in its version."""
    if _group(name) in ("python", "torch", "cuda", "kernels"):
        return True
    return any(text.partition("+")[2].startswith("cu") for text in (wanted, found))


def document(a_name: str, b_name: str, rows: list[Row]) -> dict[str, Any]:
    return {
        "schema": 1,
        "a": a_name,
        "b": b_name,
        "same": not rows,
        "significant": sum(row.significant for row in rows),
        "rows": [row.as_dict() for row in rows],
    }


def text(a_name: str, b_name: str, rows: list[Row]) -> str:
    if not rows:
        return f"{a_name} and {b_name} hold the same."
    lines: list[str] = []
    for title, chosen in (
        ("CUDA depends on these", [row for row in rows if row.significant]),
        ("Others", [row for row in rows if not row.significant]),
    ):
        if not chosen:
            continue
        width = max(len(row.name) for row in chosen)
        columns = [
            max(len(a_name), *(len(row.a) for row in chosen), 1),
            max(len(b_name), *(len(row.b) for row in chosen), 1),
        ]
        lines += [
            f"{title} ({len(chosen)}):",
            f"  {'':{width}}  {a_name:{columns[0]}}  {b_name:{columns[1]}}  to make B like A",
        ]
        lines += [
            f"  {row.name:{width}}  {row.a or '-':{columns[0]}}  {row.b or '-':{columns[1]}}  {row.action}"
            for row in chosen
        ]
        lines.append("")
    return "\n".join(lines).rstrip()
