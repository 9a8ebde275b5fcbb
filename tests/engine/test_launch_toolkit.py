"""Just-in-time compilers find the environment's own toolkit, never the host's."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ddtree_engine.supervisor import toolkit


@pytest.fixture
def site(tmp_path: Path) -> Path:
    own = tmp_path / "site" / "nvidia" / "cu13"
    for name in (
        "bin/nvcc",
        "bin/ptxas",
        "include/cuda.h",
        "nvvm/bin/cicc",
        "lib/libcudart.so.13",
        "lib/libcublas.so.13",
    ):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(name)
    return tmp_path / "site"


def test_compilers_are_led_to_the_environments_own_toolkit(site: Path, tmp_path: Path) -> None:
    found = toolkit.environment({"PATH": "/usr/local/cuda/bin:/usr/bin", "XDG_CACHE_HOME": str(tmp_path / "c")}, site)
    home = Path(found["CUDA_HOME"])
    assert home == tmp_path / "c" / "cuda" and found["CUDA_PATH"] == str(home)
    assert (home / "bin" / "nvcc").read_text() == "bin/nvcc"
    assert (home / "include" / "cuda.h").is_file() and (home / "nvvm" / "bin" / "cicc").is_file()
    paths = found["PATH"].split(":")
    assert paths.index(str(home / "bin")) < paths.index("/usr/local/cuda/bin")
    assert paths[-1] == "/usr/bin"


def test_libraries_can_be_linked_against_by_their_plain_names(site: Path, tmp_path: Path) -> None:
    home = toolkit.view(site / "nvidia" / "cu13", tmp_path / "cuda")
    for folder in ("lib", "lib64"):
        assert (home / folder / "libcudart.so").read_text() == "lib/libcudart.so.13"
        assert (home / folder / "libcublas.so.13").exists()


def test_a_view_is_kept_while_it_is_right_and_made_again_for_another_release(site: Path, tmp_path: Path) -> None:
    own = site / "nvidia" / "cu13"
    home = toolkit.view(own, tmp_path / "cuda")
    before = home.stat().st_ino
    assert toolkit.view(own, home).stat().st_ino == before
    (home / "lib64" / "libcudart.so").unlink()
    assert (toolkit.view(own, home) / "lib64" / "libcudart.so").exists()
    moved = own.rename(own.with_name("cu14"))
    assert (toolkit.view(moved, home) / "bin" / "nvcc").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["cuda", "site"] or set(tmp_path.iterdir()) == {home, site}


def test_slots_of_one_release_may_start_at_once(site: Path, tmp_path: Path) -> None:
    own, failures = site / "nvidia" / "cu13", []

    def make() -> None:
        try:
            assert (toolkit.view(own, tmp_path / "cuda") / "lib64" / "libcudart.so").exists()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert {path.name for path in tmp_path.iterdir()} == {"cuda", "site"}


def test_without_a_toolkit_nothing_is_claimed(tmp_path: Path) -> None:
    found = toolkit.environment({"PATH": "/usr/bin"}, tmp_path)
    assert "CUDA_HOME" not in found
    assert found["PATH"].endswith("/usr/bin")


def test_without_a_cache_directory_the_wheels_own_folder_serves(site: Path) -> None:
    found = toolkit.environment({"XDG_CACHE_HOME": "/proc/none"}, site)
    assert found["CUDA_HOME"] == str(site / "nvidia" / "cu13")
