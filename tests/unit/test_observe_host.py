"""One look at a host: this machine as a whole, and the parts that other machines have, from made-up files."""

from __future__ import annotations

import json
import os
import platform
import pwd
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from ddtree import access, hostfacts, nvidia, observe, slotfacts
from ddtree.journal import Journal
from ddtree.paths import Paths

UUID = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(
        root=tmp_path / "root",
        state=tmp_path / "state",
        cache=tmp_path / "cache",
        units=tmp_path / "units",
        run=tmp_path / "run",
    )


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_this_machine_is_observed_in_a_second_and_as_plain_data(paths: Paths) -> None:
    request = observe.Request(
        paths=paths, slots=[{"name": "gpu1", "port": 1, "bind": "127.0.0.1"}], libraries=["no.so.9"]
    )
    facts = observe.observe(request)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["seconds"] < 1.0
    assert (facts["arch"], facts["python"]["implementation"]) == (platform.machine(), "cpython")
    assert facts["glibc"] == platform.libc_ver()[1]
    assert facts["libraries"] == {"no.so.9": False}
    assert facts["disk"][str(paths.root)]["free_bytes"] > 0
    assert facts["slots"]["gpu1"]["active"] is False
    assert facts["slots"]["gpu1"]["release"] is None
    assert facts["releases"] == [] and facts["agent_version"] == "" and facts["lock"] is None


def test_looking_changes_nothing(paths: Paths, tmp_path: Path) -> None:
    observe.observe(observe.Request(paths=paths))
    assert list(tmp_path.iterdir()) == []


def test_the_schema_that_is_documented_is_what_is_returned(paths: Paths) -> None:
    documented = {
        name.strip()
        for line in (observe.__doc__ or "").splitlines()
        if line.startswith("  ") and not line.startswith("   ")
        for name in line[2:18].split(",")
    }
    documented |= {"gpu_detail", "seconds"}  # the first is described with gpu_state
    assert set(observe.observe(observe.Request(paths=paths))) <= documented


def test_releases_are_listed_newest_first_without_those_under_construction(paths: Paths) -> None:
    for name, created in (("cpu-a", 10), ("cpu-b", 30), (".cpu-c.building", 40)):
        write(
            paths.releases / name / "manifest.json", json.dumps({"stack": "cpu", "created_t": created, "wheels": [1]})
        )
    write(paths.releases / "broken" / "manifest.json", "{")
    (paths.releases / "empty").mkdir()
    found = observe.releases(paths)
    assert [item["id"] for item in found] == ["cpu-b", "cpu-a", "broken"]
    assert found[0]["stack"] == "cpu" and "wheels" not in found[0]
    assert "manifest.json" in found[2]["damaged"]


def test_the_agent_is_known_by_its_link(paths: Paths) -> None:
    (paths.agent / "abc123").mkdir(parents=True)
    (paths.agent / "current").symlink_to("abc123")
    assert observe.agent_version(paths) == "abc123"


def test_a_gpu_knows_its_faults_and_its_processes_and_a_lost_one_its_uuid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddtree.kernellog import Fault

    monkeypatch.setattr(hostfacts, "driver_gpus", lambda: {"0000:4b:00": "GPU-lost", "0000:5c:00": "GPU-silent"})
    gpu = nvidia.Gpu(UUID, 0, bus_id="00000000:29:00.0", processes=[{"pid": os.getpid(), "comm": "x", "memory_mib": 7}])
    gpu.processes.append({"pid": 2**22 + 1, "comm": "/elsewhere", "memory_mib": 9})
    report = nvidia.Report(gpus=[gpu], lost=[nvidia.Lost(bus_id="0000:4B:00.0", reason="GPU is lost")])
    faults = [Fault(1.0, "0000:29:00", 79, "a"), Fault(2.0, "0000:4b:00", 79, "b"), Fault(3.0, "", None, "c")]
    facts = observe.gpu_facts(report, faults, sandbox=False)
    (found,) = facts["gpus"]
    assert [item["text"] for item in found["faults"]] == ["a"]
    assert [item["text"] for item in facts["gpu_faults"]] == ["b", "c"]
    mine, hidden = found["processes"]
    assert (mine["pid"], mine["memory_mib"], mine["ours"]) == (os.getpid(), 7, False)
    assert mine["command"]
    assert (hidden["comm"], hidden["ours"], "not visible" in hidden["command"]) == ("/elsewhere", False, True)
    assert [item["uuid"] for item in facts["gpus_lost"]] == ["GPU-lost", "GPU-silent"]
    assert facts["gpu_source"] == "nvidia-smi"


@pytest.mark.parametrize(
    ("state", "sandbox", "source"),
    [("absent", False, "none"), ("ok", True, "simulated"), ("hang", False, "nvidia-smi")],
)
def test_where_gpu_facts_come_from_is_said(state: str, sandbox: bool, source: str) -> None:
    assert observe.gpu_facts(nvidia.Report(state=state), [], sandbox)["gpu_source"] == source


def test_the_drivers_versions_are_read_from_the_kernel_and_from_the_tool(tmp_path: Path) -> None:
    text = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  \n"
        "GCC version:  gcc version 15.3.0 (GCC) \n"
    )
    write(tmp_path / "driver/nvidia/version", text)
    write(tmp_path / "modules", "nouveau 2000000 0 - Live 0x0\n")
    found = hostfacts.driver(nvidia.Report(state="mismatch", library="580.95"), tmp_path)
    assert (found["kernel"], found["library"], found["nouveau"]) == ("580.159.04", "580.95", True)
    old = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
    write(tmp_path / "driver/nvidia/version", old)
    assert hostfacts.driver(nvidia.Report(), tmp_path)["kernel"] == "535.183.01"
    assert hostfacts.driver(nvidia.Report(driver="580.95.05"), tmp_path / "none")["kernel"] == "580.95.05"


def test_a_lost_gpus_uuid_is_in_the_drivers_own_list(tmp_path: Path) -> None:
    write(
        tmp_path / "driver/nvidia/gpus/0000:4b:00.0/information",
        f"Model: \t X\nGPU UUID: \t {UUID}\nDevice Minor: \t 3\n",
    )
    write(tmp_path / "driver/nvidia/gpus/0000:5c:00.0/information", "GPU UUID: \t GPU-????????\n")
    assert hostfacts.driver_gpus(tmp_path) == {"0000:4b:00": UUID}


def test_toolkits_are_found_each_once_and_the_one_that_compilers_take_first(tmp_path: Path) -> None:
    local = tmp_path / "usr/local"
    write(local / "cuda-12.8/version.json", json.dumps({"cuda": {"version": "12.8.1"}}))
    write(local / "cuda-13.0/targets/x86_64-linux/include/cuda.h", "#define CUDA_VERSION 13000\n")
    write(local / "cuda-11.8/version.txt", "CUDA Version 11.8.0\n")
    write(local / "cuda-12.4/bin/nvcc")
    write(local / "cuda-12.5/README")
    (local / "cuda").symlink_to("cuda-12.8")
    found = hostfacts.toolkits(tmp_path)
    assert [item["version"] for item in found] == ["12.8.1", "11.8.0", "12.4", "13.0"]
    assert found[0]["path"].endswith("/usr/local/cuda")


def test_a_models_missing_parts_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}}
    write(folder / "model.safetensors.index.json", json.dumps(index))
    write(folder / "model-1.safetensors", "x")
    write(folder / "model-2.safetensors")
    (folder / "tokenizer.json").symlink_to("/nowhere/blob")
    found = hostfacts.model(str(folder), "")
    assert (found["exists"], found["kind"], found["weights"]) == (True, "directory", 1)
    assert found["missing"] == ["config.json", "model-2.safetensors", "model-3.safetensors", "tokenizer.json"]


def test_a_complete_model_lacks_nothing_and_a_missing_one_is_not_there(tmp_path: Path) -> None:
    write(tmp_path / "model/config.json", "{}")
    write(tmp_path / "model/model.safetensors", "x")
    assert hostfacts.model(str(tmp_path / "model"), "")["missing"] == []
    assert hostfacts.model(str(tmp_path / "none"), "")["exists"] is False


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that everybody can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_the_service_user_may_not_use_is_found_as_that_user(open_directory: Path) -> None:
    tmp_path = open_directory
    readable = write(tmp_path / "model/config.json", "{}")
    secret = write(tmp_path / "model/weights", "x")
    secret.chmod(0o600)
    closed = write(tmp_path / "closed/file", "x")
    closed.parent.chmod(0o700)
    nobody = pwd.getpwnam("nobody")
    ids = (nobody.pw_uid, nobody.pw_gid, [nobody.pw_gid])
    wanted = [(str(path), os.R_OK) for path in (readable, secret, closed, tmp_path / "none")]
    found = access.denied(ids, [*wanted, (str(tmp_path / "model"), os.W_OK)])
    assert found == {
        str(secret): "Permission denied",
        str(closed): f"{closed.parent} may not be entered",
        str(tmp_path / "none"): "No such file or directory",
        str(tmp_path / "model"): "Permission denied",
    }
    assert access.denied(None, wanted) == {path: why for path, why in found.items() if path != str(tmp_path / "model")}
    assert os.geteuid() == 0


def test_a_user_that_does_not_exist_is_no_error() -> None:
    assert access.user_ids("no-such-user-here") is None
    assert hostfacts.account("no-such-user-here")["exists"] is False
    assert hostfacts.account("root")["uid"] == 0


def test_an_interpreter_that_does_not_run_says_why() -> None:
    assert "not installed" in hostfacts.interpreter("/no/such/python3")["error"]
    assert hostfacts.interpreter("/bin/false")["error"]


def test_the_unit_file_and_environment_are_compared_with_what_was_activated(paths: Paths) -> None:
    journal = Journal(paths.journal)
    journal.append("intent", id="a1", slot="gpu1", release="rel", config_digest="d")
    journal.append("committed", id="a1", slot="gpu1", release="rel", config_digest="d")
    write(paths.activation("gpu1", "a1"), json.dumps({"unit": "[Unit]\n", "env": 'DDTREE_PORT="30001"\n'}))
    unit = write(paths.unit_file("gpu1"), "[Unit]\n")
    env = write(paths.slot("gpu1") / "slot.env", 'DDTREE_PORT="30001"\n')
    (paths.slot("gpu1") / "current").symlink_to("../../releases/rel")
    found = slotfacts.slots(paths, [], 1.0)["gpu1"]
    assert (found["altered"], found["link"], found["port"], found["release"]) == ([], "rel", 30001, "rel")
    unit.write_text("[Unit]\nDescription=mine\n")
    env.unlink()
    assert slotfacts.slots(paths, [], 1.0)["gpu1"]["altered"] == [f"{unit} (changed)", f"{env} (missing)"]


def test_a_drop_in_laid_over_the_unit_is_an_alteration_and_the_slots_own_device_is_not(paths: Paths) -> None:
    own = "/run/systemd/system.control/ddtree-gpu1.service.d/50-DeviceAllow.conf"
    hand = "/etc/systemd/system/ddtree-gpu1.service.d/override.conf"
    system = "/usr/lib/systemd/system/service.d/10-all.conf"
    found = slotfacts._altered(paths, "gpu1", None, {"DropInPaths": f"{own} {hand} {system}"})
    assert found == [f"{hand} (drop-in)"]


def test_slots_on_disk_and_in_the_journal_are_found_and_the_toolkits_own_units_are_none(paths: Paths) -> None:
    paths.slots.joinpath("disk").mkdir(parents=True)
    for name in ("unit", "recover", "activate@"):
        write(paths.units / f"ddtree-{name}.service")
    Journal(paths.journal).append("intent", id="a1", slot="journal", release="rel", config_digest="d")
    found = slotfacts.slots(paths, [{"name": "wanted", "port": 1}], 1.0)
    assert sorted(found) == ["disk", "journal", "unit", "wanted"]
    assert found["unit"]["unit_exists"] and found["unit"]["last"] is None
    assert found["journal"]["open"]["id"] == "a1"


class Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(b'{"status": "starting"}')

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""


@pytest.fixture
def engine() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_health_is_asked_directly_whatever_proxies_are_set(engine: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:3128")
    slot = {"port": engine.server_port, "bind": "0.0.0.0"}
    assert slotfacts._health(slot, 2.0) == {"status": 200, "error": ""}
    monkeypatch.setattr(Health, "status", 503)
    found = slotfacts._health(slot, 2.0)
    assert (found["status"], "starting" in found["error"]) == (503, True)


def test_an_engine_that_does_not_answer_is_said(engine: HTTPServer) -> None:
    port = engine.server_port
    engine.shutdown()
    engine.server_close()
    found = slotfacts._health({"port": port, "bind": "127.0.0.1"}, 1.0)
    assert found["status"] is None and "refused" in found["error"]


def test_mount_options_and_space_are_those_of_the_file_system_below(tmp_path: Path) -> None:
    found = hostfacts.disks(Paths(root=Path("/proc/none"), state=tmp_path / "a/b", cache=Path("/")))
    assert (found["/proc/none"]["type"], found["/"]["mount"]) == ("proc", "/")
    assert found[str(tmp_path / "a/b")]["free_bytes"] > 0
    assert {"rw"} <= set(found["/"]["options"])


def test_addresses_of_the_host_are_known() -> None:
    assert "127.0.0.1" in hostfacts.addresses()


def test_versions_are_compared_as_numbers() -> None:
    assert hostfacts.numbers("580.95.05") > hostfacts.numbers("580.9.05")
