"""Gap analysis: what differs, CUDA first, and what would make B like A."""

from __future__ import annotations

from pathlib import Path

import audit_toys as toys
from ddtree import survey

from fleet.audit import gaps


def bom(torch: str, python: str = "3.11", **versions: str) -> dict[str, object]:
    listed = {"torch": torch.partition("+")[0], **{name.replace("_", "-"): text for name, text in versions.items()}}
    return {
        "python": {"minor": python},
        "torch": {"version": torch},
        "distributions": [{"name": name, "version": text} for name, text in listed.items()],
    }


# The reference host where the stack works, and the training box that was to be made like it.
REFERENCE = bom(
    "2.11.0+cu130",
    triton="3.6.0",
    torchvision="0.26.0",
    sglang_kernel="0.4.2",
    flashinfer_python="0.6.8.post1",
    flashinfer_cubin="0.6.8.post1",
    nvidia_cuda_nvrtc="13.0.88",
    nvidia_cuda_runtime="13.0.96",
    nvidia_cublas="13.1.0.3",
    nvidia_nccl_cu13="2.28.9",
    sglang="0.5.11",
    soundfile="0.13.1",
    numpy="2.4.1",
)
TARGET = bom(
    "2.11.0+cu128",
    triton="3.6.0",
    torchvision="0.26.0",
    sgl_kernel="0.3.21",
    nvidia_cuda_nvrtc_cu12="12.8.93",
    nvidia_cuda_runtime_cu12="12.8.90",
    nvidia_cublas_cu12="12.8.4.1",
    nvidia_nccl_cu12="2.28.9",
    numpy="2.4.0",
    accelerate="1.12.0",
)


def test_the_storys_rows_are_named_and_no_others() -> None:
    rows = gaps.compare(REFERENCE, TARGET)
    assert [(row.name, row.kind, row.a, row.b) for row in rows if row.significant] == [
        ("torch", "build", "2.11.0+cu130", "2.11.0+cu128"),
        ("nvidia-cublas", "missing", "13.1.0.3", ""),
        ("nvidia-cublas-cu12", "extra", "", "12.8.4.1"),
        ("nvidia-cuda-nvrtc", "missing", "13.0.88", ""),
        ("nvidia-cuda-nvrtc-cu12", "extra", "", "12.8.93"),
        ("nvidia-cuda-runtime", "missing", "13.0.96", ""),
        ("nvidia-cuda-runtime-cu12", "extra", "", "12.8.90"),
        ("nvidia-nccl-cu12", "extra", "", "2.28.9"),
        ("nvidia-nccl-cu13", "missing", "2.28.9", ""),
        ("flashinfer-cubin", "missing", "0.6.8.post1", ""),
        ("flashinfer-python", "missing", "0.6.8.post1", ""),
        ("sglang-kernel", "renamed", "sglang-kernel 0.4.2", "sgl-kernel 0.3.21"),
    ]
    assert [(row.name, row.kind) for row in rows if not row.significant] == [
        ("sglang", "missing"),
        ("accelerate", "extra"),
        ("numpy", "version"),
        ("soundfile", "missing"),
    ]


def test_each_row_says_what_would_make_b_like_a() -> None:
    actions = {row.name: row.action for row in gaps.compare(REFERENCE, TARGET)}
    assert actions["torch"] == "install torch==2.11.0+cu130: the same version, built for cu130 instead of cu128"
    assert actions["nvidia-cublas-cu12"] == "remove nvidia-cublas-cu12"
    assert actions["sglang-kernel"].startswith("remove sgl-kernel, install sglang-kernel==0.4.2")
    assert actions["numpy"] == "install numpy==2.4.1"


def test_a_bill_of_materials_is_like_itself() -> None:
    assert gaps.compare(REFERENCE, REFERENCE) == []


def test_a_build_that_one_side_does_not_state_is_no_difference() -> None:
    unstated = bom("2.11.0", **_others(REFERENCE))
    unstated["torch"] = {}
    assert gaps.compare(REFERENCE, unstated) == []


def _others(value: dict[str, object]) -> dict[str, str]:
    return {item["name"]: item["version"] for item in value["distributions"] if item["name"] != "torch"}  # type: ignore[attr-defined]


def test_a_package_with_a_cuda_build_in_its_version_comes_before_the_engine() -> None:
    rows = gaps.compare(bom("2.11.0", sglang="1.0", zeta="1.0+cu130"), bom("2.11.0", sglang="1.1", zeta="1.0+cu128"))
    assert [(row.name, row.significant) for row in rows] == [("zeta", True), ("sglang", False)]


def test_another_python_comes_first() -> None:
    rows = gaps.compare(bom("2.11.0+cu130", python="3.12"), bom("2.11.0+cu128", python="3.11"))
    assert [row.name for row in rows] == ["python", "torch"]


def test_the_same_version_with_other_files_is_a_difference(tmp_path: Path) -> None:
    one = gaps.of_survey(survey.survey(toys.venv(tmp_path / "a", toys.good())))
    changed = [dist for dist in toys.good() if dist.name != "sgl-kernels"]
    changed.append(toys.kernels(images=[(toys.CUBIN, 90, False)]))
    other = gaps.of_survey(survey.survey(toys.venv(tmp_path / "b", changed)))
    (row,) = gaps.compare(one, other)
    assert (row.name, row.kind) == ("sgl-kernels", "content")


def test_the_bill_of_a_venv_states_the_build_of_torch_and_architectures(tmp_path: Path) -> None:
    value = gaps.of_survey(survey.survey(toys.venv(tmp_path, toys.good())))
    archs = {item["name"]: item.get("archs") for item in value["distributions"]}
    assert value["torch"]["version"] == "2.11.0+cu130"
    assert archs["sgl-kernels"] == ["sm_120a", "sm_90"]
    other = gaps.of_survey(survey.survey(toys.venv(tmp_path / "b", [toys.torch(build="cu128"), *toys.good()[1:]])))
    assert [(row.name, row.kind) for row in gaps.compare(value, other)] == [("torch", "build")]


def test_text_tells_the_rows_that_matter_for_cuda_first() -> None:
    text = gaps.text("ct129", "ct200", gaps.compare(REFERENCE, TARGET))
    first, _, rest = text.partition("Others (4):")
    assert "2.11.0+cu130" in first
    assert "accelerate" in rest
    assert gaps.text("a", "b", []) == "a and b hold the same."
