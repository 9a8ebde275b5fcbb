"""Every rule of the audit: silent on a set that fits, and telling exactly what does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import audit_toys as toys
import pytest
from audit_toys import CUBIN, PTX, Dist
from ddtree import survey

from fleet.audit import knowledge, rules
from fleet.audit.case import Case, Finding, Target, Wanted
from fleet.audit.judge import judge

STACK = {
    "python": ["3.11", "3.12"],
    "arch": "x86_64",
    "torch": "2.11.0+cu130",
    "cuda": 13,
    "min_driver": "580.65.06",
    "min_glibc": "2.34",
    "archs": ["9.0", "12.0"],
    "libraries": ["libnuma.so.1"],
}
LOCK = [Wanted(dist.name, dist.version) for dist in toys.good()]


def audit(
    root: Path,
    dists: Iterable[Dist],
    *,
    stack: dict[str, Any] | None = None,
    lock: list[Wanted] | None = None,
    target: Target | None = None,
    minor: str = "3.11",
    spoil: Callable[[Path], object] | None = None,
) -> list[Finding]:
    venv = toys.venv(root / "venv", dists, minor)
    if spoil:
        spoil(toys.site(venv, minor))
    return judge(Case(survey.survey(venv), stack, lock, target))


def without(name: str) -> list[Dist]:
    return [dist for dist in toys.good() if dist.name != name]


def ids(findings: list[Finding]) -> list[str]:
    return [finding.rule for finding in findings]


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, [(item.rule, item.subject, item.evidence) for item in findings]
    return findings[0]


@pytest.mark.parametrize(
    "target",
    [
        Target(),
        Target("2.36", "x86_64", "580.95.05", {"GPU-1": "12.0"}, "12.9"),
        Target("2.39", "x86_64", "590.1", {"GPU-1": "9.0"}, "none"),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_a_set_that_fits_gives_no_finding(tmp_path: Path, target: Target, known: bool) -> None:
    stack, lock = (STACK, LOCK) if known else (None, None)
    assert audit(tmp_path, toys.good(), stack=stack, lock=lock, target=target) == []


# -- the set of distributions ------------------------------------------------------------------------------------------


def test_another_python_than_the_stacks(tmp_path: Path) -> None:
    found = audit(tmp_path, [Dist("engine")], stack={**STACK, "archs": []}, minor="3.9")
    assert only(found).rule == "SET-PYTHON"
    assert "3.11 or 3.12" in found[0].fix


@pytest.mark.parametrize(
    ("tag", "fits"),
    [
        ("py3-none-any", True),
        ("cp311-cp311-manylinux_2_28_x86_64", True),
        ("cp310-abi3-manylinux2014_x86_64", True),
        ("cp312-cp312-manylinux_2_28_x86_64", False),
        ("cp312-abi3-manylinux_2_28_x86_64", False),
        ("cp311-cp311-manylinux_2_28_aarch64", False),
        ("cp311-cp311-musllinux_1_2_x86_64", False),
        ("cp311-cp311-win_amd64", False),
    ],
)
def test_wheel_tags_that_do_not_fit(tmp_path: Path, tag: str, fits: bool) -> None:
    found = audit(tmp_path, [Dist("engine", tag=tag)], target=Target(machine="x86_64"))
    assert ids(found) == ([] if fits else ["SET-TAGS"])


def test_a_distribution_missing_from_the_locks_set(tmp_path: Path) -> None:
    found = only(audit(tmp_path, without("soundfile"), stack=STACK, lock=LOCK))
    assert (found.rule, found.subject) == ("SET-MISSING", "soundfile")
    assert "0.13.1" in found.fix


def test_a_requirement_that_is_not_installed_is_told_without_a_lock(tmp_path: Path) -> None:
    engine = Dist("sglang", requires=("soundfile==0.13.1", 'unused; extra == "all"', 'other; sys_platform == "win32"'))
    found = only(audit(tmp_path, [*without("soundfile"), engine]))
    assert (found.rule, found.subject) == ("SET-REQUIREMENT", "soundfile")
    assert "sglang requires soundfile==0.13.1" in found.evidence[0]


def test_the_former_name_of_a_distribution_does_not_meet_a_requirement(tmp_path: Path) -> None:
    engine = Dist("sglang", requires=("sglang-kernel>=0.4.2",))
    found = audit(tmp_path, [*without("sgl-kernels"), toys.kernels("sgl-kernel"), engine])
    finding = next(item for item in found if item.rule == "SET-REQUIREMENT")
    assert finding.subject == "sglang-kernel"
    assert "former name" in finding.evidence[-1]


def test_another_version_than_the_locks(tmp_path: Path) -> None:
    found = only(audit(tmp_path, [*without("soundfile"), Dist("soundfile", "0.12.0")], stack=STACK, lock=LOCK))
    assert (found.rule, found.subject) == ("SET-VERSION", "soundfile")


def test_a_distribution_that_the_lock_does_not_name(tmp_path: Path) -> None:
    found = only(audit(tmp_path, [*toys.good(), Dist("stranger")], stack=STACK, lock=LOCK))
    assert (found.rule, found.subject) == ("SET-EXTRA", "stranger")


def test_a_distribution_that_is_there_twice(tmp_path: Path) -> None:
    files = {"double.py": b""}
    found = audit(tmp_path, [Dist("double", "1.0", files), Dist("double", "2.0", files)])
    assert ids(found) == ["SET-TWICE"]


def test_two_distributions_with_one_module(tmp_path: Path) -> None:
    kernel = toys.kernels("sglang-kernel")
    former = Dist("sgl-kernel", "0.3.21", {**kernel.files, "sgl_kernel/__init__.py": b"# the old one\n"})
    found = audit(tmp_path, [*without("sgl-kernels"), former, kernel])
    conflict = next(item for item in found if item.rule == "SET-CONFLICT")
    assert conflict.subject == "sgl-kernel, sglang-kernel"
    assert "keep sglang-kernel only" in conflict.fix


def test_a_shared_file_with_the_same_content_is_no_conflict(tmp_path: Path) -> None:
    files = {"nvidia/__init__.py": b""}
    assert audit(tmp_path, [Dist("nvidia-a", files=files), Dist("nvidia-b", files=files)]) == []


def test_build_scripts_dropped_at_the_top_by_mistake_are_no_conflict(tmp_path: Path) -> None:
    one, other = (Dist(name, files={"build_backend.py": name.encode()}) for name in ("one", "other"))
    assert audit(tmp_path, [one, other]) == []


def test_metadata_that_cannot_be_read(tmp_path: Path) -> None:
    found = audit(
        tmp_path, [Dist("engine")], spoil=lambda site: (site / "engine-1.0.dist-info/METADATA").write_text("")
    )
    assert "SET-METADATA" in ids(found)


# -- one CUDA ----------------------------------------------------------------------------------------------------------


def test_another_build_of_torch_than_the_stacks(tmp_path: Path) -> None:
    cpu = toys.torch(build="cpu")
    cpu.files = {path: data for path, data in cpu.files.items() if "cuda" not in path}
    found = audit(tmp_path, [cpu], stack=STACK)
    assert "TORCH-BUILD" in ids(found)
    assert any("2.11.0+cpu" in line for item in found for line in item.evidence)


@pytest.mark.parametrize(
    ("name", "version", "major"),
    [
        ("nvidia-cublas-cu12", "12.8.4.1", 12),
        ("nvidia-nvjitlink", "12.9.86", 12),
        ("cuda-bindings", "12.9.0", 12),
        ("cupy-cuda12x", "13.6.0", 12),
        ("flash-attn", "2.8.3+cu128", 12),
        ("nvidia-cufft", "12.0.0.61", None),
        ("nvidia-cudnn-cu13", "9.19.0.56", 13),
        ("cuda-core", "1.2.2", None),
    ],
)
def test_builds_for_another_cuda_are_told_by_name(tmp_path: Path, name: str, version: str, major: int | None) -> None:
    found = audit(tmp_path, [*toys.good(), Dist(name, version)], stack=STACK)
    if major in (None, 13):
        assert found == []
    else:
        assert (only(found).rule, found[0].subject) == ("CUDA-MIXED", name)


def test_a_library_linked_against_another_cuda(tmp_path: Path) -> None:
    old = Dist("extension", files={"extension/_C.abi3.so": toys.elf(needed=["libnvrtc.so.12", "libcudart.so.12"])})
    found = audit(tmp_path, [*toys.good(), old], stack=STACK)
    assert ids(found) == ["CUDA-LIBRARY", "LIB-MISSING", "LIB-MISSING"]
    assert "extension/_C.abi3.so needs libnvrtc.so.12" in found[0].evidence


def test_compiler_parts_of_different_releases(tmp_path: Path) -> None:
    parts = [Dist("nvidia-cuda-nvcc", "13.0.88"), Dist("nvidia-nvvm", "13.5.20")]
    found = only(audit(tmp_path, [*toys.good(), *parts], stack=STACK))
    assert found.rule == "CUDA-TOOLCHAIN"
    assert any("13.5.20" in line for line in found.evidence)


# -- ABI ---------------------------------------------------------------------------------------------------------------


def test_symbols_that_torch_does_not_export_are_told_readably(tmp_path: Path) -> None:
    old = toys.torch("2.9.1", "cu128", symbol=toys.CHECK)
    found = audit(tmp_path, [*without("torch"), old])
    finding = next(item for item in found if item.rule == "ABI-SYMBOLS")
    assert finding.subject == "sgl-kernels"
    assert finding.count == 1
    line = finding.evidence[1]
    assert line.startswith(
        "c10::cuda::c10_cuda_check_implementation(int, char const*, char const*, unsigned int, bool)"
    )
    assert "sgl_kernel/common_ops.abi3.so" in line


def test_symbols_are_found_in_neighbours_that_a_library_needs(tmp_path: Path) -> None:
    own = {
        "pack/_C.abi3.so": toys.elf(needed=["libpack.so"], runpath="$ORIGIN/lib", undefined=["_ZN2at4packEv"]),
        "pack/lib/libpack.so": toys.elf("libpack.so", exported=["_ZN2at4packEv"]),
    }
    assert audit(tmp_path, [*toys.good(), Dist("pack", files=own)]) == []


def test_a_neighbour_in_the_same_folder_is_found_without_a_run_path(tmp_path: Path) -> None:
    own = {
        "pack/_C.abi3.so": toys.elf(needed=["libpack.so"], undefined=["_ZN2at4packEv"]),
        "pack/libpack.so": toys.elf("libpack.so", exported=["_ZN2at4packEv"]),
    }
    assert audit(tmp_path, [*toys.good(), Dist("pack", files=own)]) == []


def test_an_extension_without_any_torch(tmp_path: Path) -> None:
    found = audit(tmp_path, [runtime for runtime in without("torch") if runtime.name != "engine"])
    symbols = next(item for item in found if item.rule == "ABI-SYMBOLS")
    assert symbols.evidence[0] == "torch is not installed"


def test_a_kernel_build_is_tied_to_its_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = toys.kernels("sglang-kernel")
    dists = [*without("sgl-kernels"), kernel]
    assert ids(audit(tmp_path / "a", dists, stack=STACK)) == ["ABI-UNTIED"]
    tie = knowledge.Tie("sglang-kernel", "0.4.2", "2.11.0", 13, "f" * 64, "")
    lock = [Wanted(dist.name, dist.version, "f" * 64 if dist is kernel else "") for dist in dists]
    stack = {**STACK, "ties": [dataclasses.asdict(tie)]}
    assert audit(tmp_path / "b", dists, stack=stack, lock=lock) == []
    stack["ties"] = [dataclasses.asdict(dataclasses.replace(tie, torch="2.13.0"))]
    found = only(audit(tmp_path / "c", dists, stack=stack, lock=lock))
    assert found.rule == "ABI-TIE"
    assert "was built for torch 2.13.0" in found.evidence[0]


# -- libraries ---------------------------------------------------------------------------------------------------------


def test_a_library_that_nobody_brings_is_told_with_its_wheel(tmp_path: Path) -> None:
    found = only(audit(tmp_path, without("nvidia-cuda-nvrtc"), stack=STACK))
    assert (found.rule, found.subject) == ("LIB-MISSING", "libnvrtc.so.13")
    assert found.evidence == ("libnvrtc.so.13 is needed by sgl_kernel/common_ops.abi3.so",)
    assert "nvidia-cuda-nvrtc" in found.fix


def test_a_system_library_must_be_one_that_the_stack_asks_hosts_for(tmp_path: Path) -> None:
    dists = [*without("sgl-kernels"), toys.kernels(needed=["libnuma.so.1", "libmlx5.so.1"])]
    facts = survey.survey(toys.venv(tmp_path / "venv", dists))
    facts["host"] = {}
    found = only(judge(Case(facts, STACK)))
    assert (found.rule, found.subject) == ("LIB-SYSTEM", "libmlx5.so.1")
    assert "ibverbs-providers" in found.fix


def test_a_system_library_that_this_host_lacks(tmp_path: Path) -> None:
    facts = survey.survey(
        toys.venv(tmp_path / "venv", [*without("sgl-kernels"), toys.kernels(needed=["libnuma.so.1"])])
    )
    facts["host"]["libraries"]["libnuma.so.1"] = None
    found = only(judge(Case(facts, STACK)))
    assert (found.rule, found.subject) == ("HOST-LIBRARY", "libnuma.so.1")
    assert "libnuma1" in found.fix


def test_a_library_without_the_versions_that_are_asked_of_it(tmp_path: Path) -> None:
    user = Dist(
        "user",
        files={
            "user/_C.so": toys.elf(needed=["libcudart.so.13"], needs={"libcudart.so.13": ["libcudart.so.13", "NEW_13"]})
        },
    )
    found = only(audit(tmp_path, [*toys.good(), user], stack=STACK))
    assert found.rule == "LIB-VERSION"
    assert "NEW_13" in found.evidence[0]


def test_a_library_that_cannot_be_read(tmp_path: Path) -> None:
    def cut(site: Path) -> None:
        path = site / "sgl_kernel/common_ops.abi3.so"
        path.write_bytes(path.read_bytes()[:200])

    found = audit(tmp_path, toys.good(), stack=STACK, lock=LOCK, spoil=cut)
    assert ids(found) == ["LIB-DAMAGED", "FILE-EDITED"]
    assert found[0].subject == "sgl-kernels"


@pytest.mark.parametrize("path", ["torchcodec/libtorchcodec_core5.so", "nvidia/nvshmem/lib/nvshmem_transport_ucx.so.3"])
def test_files_chosen_at_run_time_may_lack_their_libraries(tmp_path: Path, path: str) -> None:
    plugin = Dist("plugin", files={path: toys.elf(needed=["libavutil.so.57", "libucp.so.0"])})
    assert audit(tmp_path, [*toys.good(), plugin], stack=STACK) == []


def test_files_for_another_torch_are_set_aside(tmp_path: Path) -> None:
    name = "torch_c_dlpack_ext/libtorch_c_dlpack_addon_torch{}-cuda.so"
    old = toys.elf(undefined=["_ZN3c104goneEv"])
    set_aside = Dist("torch-c-dlpack-ext", files={name.format(29): old})
    assert audit(tmp_path / "a", [*toys.good(), set_aside]) == []
    taken = Dist("torch-c-dlpack-ext", files={name.format(211): old})
    assert ids(audit(tmp_path / "b", [*toys.good(), taken])) == ["ABI-SYMBOLS"]


# -- GPUs and host -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "capability", "covered"),
    [
        ([(CUBIN, 80, False), (CUBIN, 120, True)], "12.0", True),
        ([(CUBIN, 80, False), (CUBIN, 120, True)], "7.5", False),
        ([(CUBIN, 80, False)], "8.6", True),
        ([(CUBIN, 86, False)], "8.0", False),
        ([(CUBIN, 90, True)], "9.0", True),
        ([(CUBIN, 120, True)], "12.1", False),
        ([(CUBIN, 120, False)], "12.1", True),
        ([(CUBIN, 90, False)], "12.0", False),
        ([(PTX, 90, False)], "12.0", True),
        ([(PTX, 90, True)], "12.0", False),
        ([(CUBIN, 120, "f")], "12.1", True),
        ([(CUBIN, 120, "f")], "9.0", False),
        ([(PTX, 100, "f")], "10.3", True),
        ([(PTX, 100, "f")], "12.0", False),
        ([(PTX, 120, False)], "9.0", False),
    ],
)
def test_architectures_that_kernels_cover(
    tmp_path: Path, images: list[tuple[int, int, bool]], capability: str, covered: bool
) -> None:
    number = int(capability.replace(".", ""))
    dists = [toys.torch(archs=[number]), toys.runtime(), toys.nvrtc(), toys.kernels(images=images)]
    found = audit(tmp_path, dists, target=Target(gpus={"GPU-1": capability}))
    assert ids(found) == ([] if covered else ["ARCH-UNCOVERED"])
    if not covered:
        assert (found[0].subject, "GPU-1" in found[0].evidence[1]) == ("sgl-kernels", True)


def test_the_stacks_architectures_count_where_no_host_is_known(tmp_path: Path) -> None:
    dists = [*without("sgl-kernels"), toys.kernels(images=[(CUBIN, 90, False)])]
    found = only(audit(tmp_path, dists, stack=STACK))
    assert (found.rule, "12.0" in found.fix) == ("ARCH-UNCOVERED", True)


def test_a_file_for_one_architecture_beside_others_is_enough(tmp_path: Path) -> None:
    kernel = toys.kernels()
    kernel.files["sgl_kernel/flash_ops.abi3.so"] = toys.elf(
        undefined=[toys.ADDED], device=toys.fatbin((CUBIN, 90, True))
    )
    assert audit(tmp_path, [*without("sgl-kernels"), kernel], stack=STACK) == []


@pytest.mark.parametrize(("glibc", "fits"), [("2.16", False), ("2.17", True), ("2.36", True)])
def test_a_c_library_that_is_too_old(tmp_path: Path, glibc: str, fits: bool) -> None:
    found = audit(tmp_path, toys.good(), target=Target(glibc=glibc))
    assert ids(found) == ([] if fits else ["HOST-GLIBC"])
    if not fits:
        assert "GLIBC_2.17 is needed by torch/lib/libc10_cuda.so" in found[0].evidence


@pytest.mark.parametrize(("driver", "fits"), [("570.133.07", False), ("580.65.06", True), ("580.126.9", True)])
def test_a_driver_that_is_too_old_for_the_cuda_of_torch(tmp_path: Path, driver: str, fits: bool) -> None:
    found = audit(tmp_path, toys.good(), target=Target(driver=driver))
    assert ids(found) == ([] if fits else ["DRIVER-OLD"])
    if not fits:
        assert "580.65.06" in found[0].fix
        assert "{" not in found[0].explanation


@pytest.mark.parametrize(
    ("toolkit", "capability", "fits"),
    [
        ("12.8", "12.0", False),
        ("12.9", "12.0", True),
        ("12.8", "9.0", True),
        ("none", "12.0", False),
        ("", "12.0", True),
    ],
)
def test_a_toolkit_that_is_too_old_for_the_gpu(tmp_path: Path, toolkit: str, capability: str, fits: bool) -> None:
    found = audit(tmp_path, toys.good(), target=Target(toolkit=toolkit, gpus={"GPU-1": capability}))
    assert ids(found) == ([] if fits else ["GPU-TOOLKIT"])


def test_an_environment_with_its_own_compiler_needs_no_toolkit(tmp_path: Path) -> None:
    parts = [Dist("nvidia-cuda-nvcc", "13.0.88"), Dist("nvidia-nvvm", "13.0.88")]
    target = Target(toolkit="12.8", gpus={"GPU-1": "12.0"})
    assert audit(tmp_path, [*toys.good(), *parts], target=target) == []


# -- files, order and waivers ------------------------------------------------------------------------------------------


def test_edited_missing_and_unowned_files(tmp_path: Path) -> None:
    def spoil(site: Path) -> None:
        (site / "soundfile/__init__.py").write_bytes(b"VALUE = 2\n")
        (site / "engine/__init__.py").unlink()
        (site / "copied.py").write_text("")

    found = audit(tmp_path, toys.good(), stack=STACK, lock=LOCK, spoil=spoil)
    assert [(item.rule, item.subject) for item in found] == [
        ("FILE-EDITED", "soundfile"),
        ("FILE-MISSING", "engine"),
        ("FILE-UNOWNED", "copied.py"),
    ]
    assert [item.stops for item in found] == [True, True, False]


def test_causes_come_before_their_effects(tmp_path: Path) -> None:
    dists = [toys.torch("2.9.1", "cu128", symbol=toys.CHECK), toys.runtime(), toys.kernels()]
    found = ids(audit(tmp_path, dists, stack=STACK, lock=LOCK))
    assert found.index("SET-VERSION") < found.index("TORCH-BUILD") < found.index("ABI-SYMBOLS")
    assert found.index("ABI-SYMBOLS") < found.index("LIB-MISSING")


def test_a_waived_rule_is_told_with_its_reason_and_stops_nothing(tmp_path: Path) -> None:
    facts = survey.survey(toys.venv(tmp_path, without("nvidia-cuda-nvrtc")))
    found = only(judge(Case(facts, STACK), {"LIB-MISSING": "known"}))
    assert (found.waived, found.stops) == ("known", False)
    dists = [dist for dist in without("torch") if dist.name != "engine"] + [toys.torch("2.11.0", "cu128")]
    facts = survey.survey(toys.venv(tmp_path / "b", dists))
    assert any(item.rule == "TORCH-BUILD" and item.stops for item in judge(Case(facts, STACK), {"TORCH-BUILD": "no"}))


def test_every_rule_says_why_and_how_to_mend() -> None:
    for rule in rules.RULES.values():
        assert len(rule.explanation) > 20, rule.id
        assert len(rule.fix) > 10, rule.id
        assert rule.severity in rules.SEVERITIES


def test_what_follows_from_a_wrong_version_is_not_told_again(tmp_path: Path) -> None:
    other = toys.torch("2.9.1", "cu130")
    other.requires = ("nvidia-cublas-cu12==12.8.4.1",)
    vision = Dist("torchvision", requires=("torch==2.11.0",))
    lock = [*LOCK, Wanted("torchvision", "1.0")]
    found = ids(audit(tmp_path / "a", [*without("torch"), other, vision], lock=lock))
    assert "SET-VERSION" in found
    assert "SET-REQUIREMENT" not in found
    found = ids(audit(tmp_path / "b", [*without("torch"), other, vision]))
    assert found.count("SET-REQUIREMENT") == 2


@pytest.mark.parametrize("glibc", ["", "2.36"])
def test_a_c_plus_plus_runtime_of_this_host_that_is_too_old(tmp_path: Path, glibc: str) -> None:
    needs = {"libstdc++.so.6": ["GLIBCXX_3.4.21", "GLIBCXX_3.4.32"]}
    library = toys.elf(needed=["libstdc++.so.6"], needs=needs)
    facts = survey.survey(toys.venv(tmp_path / "venv", [Dist("fast", files={"fast/_C.abi3.so": library})]))
    facts["host"] = {"glibc": "2.36", "libraries": {"libstdc++.so.6": ["GLIBCXX_3.4", "GLIBCXX_3.4.21"]}}
    found = only(judge(Case(facts, target=Target(glibc=glibc))))
    assert (found.rule, found.subject) == ("LIB-VERSION", "libstdc++.so.6")
    assert "GLIBCXX_3.4.32" in found.evidence[0]


def test_facts_of_a_host_are_its_target() -> None:
    facts = {
        "glibc": "2.35",
        "arch": "x86_64",
        "driver": {"kernel": "570.1"},
        "toolkits": [{"version": "12.8", "path": "/usr/local/cuda"}],
        "gpus": [{"uuid": "GPU-1", "compute_cap": "12.0"}, {"uuid": "GPU-2", "compute_cap": ""}],
    }
    assert Target.of_facts(facts) == Target("2.35", "x86_64", "570.1", {"GPU-1": "12.0"}, "12.8")
    assert Target.of_facts({**facts, "toolkits": []}).toolkit == "none"
    assert Target.of_facts({}) == Target()
