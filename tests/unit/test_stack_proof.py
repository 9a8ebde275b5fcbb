"""The parts of a proof, on small things of this machine: a stand-in that loads, imports that are told apart."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import wheel_kit

from fleet.proof import environment, imports, standin
from fleet.proof.environment import ProofError, Venv
from fleet.wheelhouse import Wheelhouse

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
TORCH = {
    "torch/__init__.py": "__version__ = '9+cu0'\nfrom . import cuda, version\n",
    "torch/cuda.py": "is_available = lambda: False\ndef get_device_capability(d=None): raise RuntimeError('none')\n",
    "torch/version.py": "cuda = '0.0'\n",
}
SERVER = {
    "server/__init__.py": "import torch\nif torch.cuda.is_available():\n    import server.kernels\n",
    "server/kernels.py": "import torch\nassert torch.cuda.get_device_capability() == (12, 0)\n",
    "server/models/__init__.py": "",
    "server/models/good.py": "",
    "server/models/bad.py": "import nothing_of_that_name\n",
    "server/broken.py": "import soundfile_that_is_not_there\n",
}


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Venv:
    house = Wheelhouse(tmp_path / "wheelhouse")
    made = []
    for name, files in (("torch", TORCH), ("server", SERVER)):
        wheel = wheel_kit.make_wheel(tmp_path / "made", name, files=files)
        house.add(wheel, (tmp_path / "made" / wheel.filename).read_bytes())
        made.append(wheel)
    monkeypatch.setattr(environment, "interpreter", lambda minor: Path(sys.executable))
    return environment.make(house, made, MINOR, tmp_path / "venv", tmp_path / "cache")


def test_a_venv_is_made_of_the_wheelhouse_alone(venv: Venv, tmp_path: Path) -> None:
    assert (venv.site / "server" / "__init__.py").is_file()
    assert venv.version.startswith(MINOR) and venv.files > 10
    missing = wheel_kit.make_wheel(tmp_path / "made", "other")
    with pytest.raises(ProofError, match="lacks 1 wheels"):
        environment.make(Wheelhouse(tmp_path / "wheelhouse"), [missing], MINOR, tmp_path / "two", tmp_path / "cache")


def test_imports_are_seen_as_without_and_as_with_a_gpu(venv: Venv) -> None:
    plain = imports.run(venv, ["server"], packages=["server.models"])
    assert set(plain.modules) == {"server"}
    assert (plain.walked, list(plain.optional)) == (2, ["server.models.bad"])
    assert "nothing_of_that_name" in plain.optional["server.models.bad"]
    assert plain.torch == {"version": "9+cu0", "cuda": "0.0"}
    gpu = imports.run(venv, ["server"], packages=["server.models"], capability=(12, 0))
    assert gpu.imported > 0 and set(gpu.modules) == {"server"}
    with pytest.raises(ProofError, match="AssertionError"):
        imports.run(venv, ["server"], capability=(9, 0))


def test_an_import_that_fails_ends_the_proof_and_says_why(venv: Venv) -> None:
    with pytest.raises(
        ProofError, match=r"import of server\.broken failed: ModuleNotFoundError: .*soundfile_that"
    ) as error:
        imports.run(venv, ["server", "server.broken"])
    assert "Traceback" in str(error.value)


def test_a_process_that_dies_at_import_ends_the_proof(venv: Venv) -> None:
    (venv.site / "server" / "broken.py").write_text("import os, sys\nprint('why', file=sys.stderr)\nos._exit(3)\n")
    with pytest.raises(ProofError, match=r"ended with status 3 .*\n?why"):
        imports.run(venv, ["server.broken"])


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_library_of_the_hosts_toolkit_in_the_process_ends_the_proof(venv: Venv, tmp_path: Path) -> None:
    library = compiled(tmp_path / "cuda-12.8", "int x;", "libcudart.so.12")
    (venv.site / "server" / "broken.py").write_text(f"import ctypes\nctypes.CDLL({str(library)!r})\n")
    with pytest.raises(ProofError, match=r"files of the host took part .*cuda-12\.8/libcudart"):
        imports.run(venv, ["server.broken"])


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_what_needs_the_driver_loads_with_the_stand_in_and_finds_no_device(tmp_path: Path) -> None:
    first = standin.make(tmp_path / "first", ["cuSomething"])
    code = "int cuSomething(void); int cuInit(unsigned); int ask(void) { return cuSomething() + cuInit(0); }"
    site = tmp_path / "site"
    kernel = compiled(site, code, "libkernel.so", str(first))
    assert standin.wanted(site) == {"cuSomething", "cuInit"}
    load = f"import ctypes; print(ctypes.CDLL({str(kernel)!r}).ask())"
    if not standin.driver_present():
        bare = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=False)
        assert "libcuda.so.1" in bare.stderr
    made = standin.make(tmp_path / "second", standin.wanted(site))
    environ = {"LD_LIBRARY_PATH": str(made.parent)}
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, env=environ, check=False)
    assert done.stdout.strip() == "200", done.stderr


def compiled(folder: Path, code: str, name: str, *libraries: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{name}.c"
    source.write_text(code)
    argv = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source), *libraries]
    subprocess.run(argv, check=True)
    return folder / name
