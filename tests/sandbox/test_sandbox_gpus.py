"""The simulated nvidia-smi answers like the real one, from real processes, and breaks on request."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.sandbox import Sandbox, SandboxError
from fleet.sandbox import faults as faults_module
from fleet.sandbox.onhost import nvidia_smi

HOST = "ct129"


def smi(sandbox: Sandbox, arguments: str, timeout: float = 20) -> subprocess.CompletedProcess[str]:
    return sandbox.ssh(HOST, f"nvidia-smi {arguments}", timeout=timeout)


def query(sandbox: Sandbox, fields: str, gpu: int | str | None = None) -> list[list[str]]:
    choice = "" if gpu is None else f" -i {gpu}"
    lines = smi(sandbox, f"--query-gpu={fields} --format=csv,noheader,nounits{choice}").stdout.splitlines()
    return [line.split(", ") for line in lines]


@pytest.fixture
def gpus(sandbox: Sandbox) -> Iterator[Sandbox]:
    yield sandbox
    sandbox.fault(HOST, "clear")


def test_eight_gpus_that_say_that_they_are_simulated(gpus: Sandbox) -> None:
    lines = smi(gpus, "-L").stdout.splitlines()
    uuids = [gpus.gpu_uuid(HOST, number) for number in range(8)]
    assert lines == [
        f"GPU {number}: SIMULATED RTX PRO 6000 Blackwell Server Edition (UUID: {uuid})"
        for number, uuid in enumerate(uuids)
    ]
    assert "SIMULATED" in smi(gpus, "").stdout


def test_csv_has_headings_and_units_as_asked(gpus: Sandbox) -> None:
    fields = "--query-gpu=index,memory.total,pci.bus_id,compute_cap,driver_version -i 1"
    full = smi(gpus, f"{fields} --format=csv").stdout.splitlines()
    assert full == [
        "index, memory.total [MiB], pci.bus_id, compute_cap, driver_version",
        "1, 97887 MiB, 00000000:29:00.0, 12.0, 580.95.05",
    ]
    assert smi(gpus, f"{fields} --format=csv,noheader").stdout.splitlines() == full[1:]
    assert smi(gpus, f"{fields} --format=csv,noheader,nounits").stdout == full[1].replace(" MiB", "") + "\n"
    assert smi(gpus, f"{fields} --format=csv,nounits").stdout.splitlines()[0] == full[0]


def test_a_gpu_is_chosen_by_index_uuid_or_bus_id(gpus: Sandbox) -> None:
    uuid = gpus.gpu_uuid(HOST, 5)
    for name in ("5", uuid, "00000000:6D:00.0"):
        assert query(gpus, "index,uuid", name) == [["5", uuid]]
    unknown = smi(gpus, "--query-gpu=index --format=csv -i 8")
    assert (unknown.returncode, unknown.stdout) == (6, "No devices were found\n")


def test_what_is_not_known_is_refused_as_by_the_real_tool(gpus: Sandbox) -> None:
    field = smi(gpus, "--query-gpu=index,colour --format=csv")
    assert field.returncode == 2 and 'Field "colour" is not a valid field to query.' in field.stdout
    option = smi(gpus, "--reset-everything")
    assert option.returncode == 2 and "Invalid combination of input arguments" in option.stdout


def test_health_fields_are_good_by_default(gpus: Sandbox) -> None:
    fields = "ecc.errors.uncorrected.volatile.total,remapped_rows.pending,remapped_rows.failure,mig.mode.current"
    assert query(gpus, fields) == [["0", "No", "No", "Disabled"]] * 8


def test_sections_of_the_full_query(gpus: Sandbox) -> None:
    text = smi(gpus, "-q -d MEMORY,ROW_REMAPPER -i 3").stdout
    assert "CUDA Version                              : 13.0" in text
    assert "        Total                             : 97887 MiB\n" in text and "Remapped Rows" in text
    assert "Temperature" not in text


def test_processes_and_their_memory_are_real(gpus: Sandbox) -> None:
    uuid = gpus.gpu_uuid(HOST, 4)
    start = (
        f"systemd-run --quiet --unit=user-of-4 --setenv=CUDA_VISIBLE_DEVICES={uuid} --setenv=SANDBOX_GPU_MEMORY_MIB=512"
    )
    gpus.ssh(HOST, f"{start} sleep 1000", check=True)
    pid = gpus.ssh(HOST, "systemctl show -p MainPID --value user-of-4").stdout.strip()
    apps = smi(
        gpus, f"--query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv -i {uuid}"
    ).stdout.splitlines()
    gpus.ssh(HOST, "systemctl kill --signal=KILL --kill-whom=main user-of-4 && sleep 0.2", check=True)
    assert apps == ["gpu_uuid, pid, process_name, used_gpu_memory [MiB]", f"{uuid}, {pid}, /usr/bin/sleep, 512 MiB"]
    assert smi(gpus, "--query-compute-apps=pid --format=csv,noheader").stdout == ""
    gpus.ssh(HOST, "systemctl reset-failed user-of-4")


def test_a_gpu_that_is_gone_shifts_the_indices(gpus: Sandbox) -> None:
    gpus.fault(HOST, "1=gone")
    assert query(gpus, "index,count,uuid")[1] == ["1", "7", gpus.gpu_uuid(HOST, 2)]


def test_a_lost_gpu_is_named_and_logged(gpus: Sandbox) -> None:
    gpus.fault(HOST, "2=lost")
    answer = smi(gpus, "--query-gpu=index --format=csv,noheader")
    assert answer.returncode == 15
    assert "GPU2: 00000000:3A:00.0: GPU is lost" in answer.stdout and len(answer.stdout.splitlines()) == 8
    log = gpus.ssh(HOST, "cat /run/sandbox-kernel.log").stdout
    assert (
        "NVRM: Xid (PCI:0000:3A:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus. [SIMULATED]"
        in log
    )


def test_an_xid_is_a_kernel_line_with_its_time(gpus: Sandbox) -> None:
    now = gpus.ssh(HOST, "date -u +%Y-%m-%dT%H").stdout.strip()
    gpus.fault(HOST, "6=xid:48")
    line = gpus.ssh(HOST, "tail -n 1 /run/sandbox-kernel.log").stdout
    assert line.startswith(now) and "NVRM: Xid (PCI:0000:7E:00): 48, " in line and "[SIMULATED]" in line
    assert len(query(gpus, "index")) == 8


@pytest.mark.parametrize(
    ("fault", "field", "value"),
    [
        ("3=ecc:5", "ecc.errors.uncorrected.volatile.total", "5"),
        ("3=remap", "remapped_rows.pending", "Yes"),
        ("3=remap-failure", "remapped_rows.failure", "Yes"),
        ("3=cap:8.9", "compute_cap", "8.9"),
        ("3=temp:95", "temperature.gpu", "95"),
        ("3=mig", "mig.mode.current", "Enabled"),
    ],
)
def test_a_fault_shows_on_its_gpu_alone(gpus: Sandbox, fault: str, field: str, value: str) -> None:
    gpus.fault(HOST, fault)
    answers = [row[0] for row in query(gpus, field)]
    assert [number for number, answer in enumerate(answers) if answer == value] == [3]
    gpus.fault(HOST, "3=clear")
    assert query(gpus, field, 3)[0][0] != value


def test_another_driver_and_no_driver(gpus: Sandbox) -> None:
    gpus.fault(HOST, "all=driver:570.86.15")
    assert query(gpus, "driver_version", 0) == [["570.86.15"]]
    gpus.fault(HOST, "all=nodriver")
    answer = smi(gpus, "-L")
    assert answer.returncode == 9 and "couldn't communicate with the NVIDIA driver" in answer.stdout


def test_a_hanging_gpu_does_not_stop_the_others(gpus: Sandbox) -> None:
    gpus.fault(HOST, "7=hang")
    assert gpus.ssh(HOST, "timeout 1 nvidia-smi -L").returncode == 124
    assert query(gpus, "index", 0) == [["0"]]


def test_a_foreign_process_is_a_process_of_the_host(gpus: Sandbox) -> None:
    gpus.fault(HOST, "5=foreign")
    rows = smi(gpus, "--query-compute-apps=gpu_uuid,pid --format=csv,noheader").stdout.splitlines()
    assert len(rows) == 1 and rows[0].startswith(gpus.gpu_uuid(HOST, 5))
    assert gpus.ssh(HOST, f"kill -0 {rows[0].split(', ')[1]}").returncode == 0
    gpus.fault(HOST, "5=clear")
    assert smi(gpus, "--query-compute-apps=pid --format=csv,noheader").stdout == ""


def test_faults_outlive_a_reboot_and_the_kernel_log_does_not(gpus: Sandbox) -> None:
    gpus.fault(HOST, "1=lost")
    gpus.kill(HOST)
    gpus.start(HOST)
    assert smi(gpus, "-L").returncode == 15
    assert gpus.ssh(HOST, "cat /run/sandbox-kernel.log").returncode != 0


def test_it_refuses_to_run_elsewhere(tmp_path: Path) -> None:
    """Copied to another machine it says what it is and answers nothing."""
    copy = tmp_path / "nvidia-smi"
    copy.write_text(Path(nvidia_smi.__file__).read_text().replace("/etc/sandbox-host", str(tmp_path / "no-such-mark")))
    answer = subprocess.run([sys.executable, str(copy), "-L"], capture_output=True, text=True, timeout=20)
    assert answer.returncode != 0 and answer.stdout == ""
    assert "refused: this is not a sandbox host" in answer.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("3=melted", "melted is not a fault"),
        ("9=gone", "there is no GPU 9"),
        ("3=ecc", "needs a value"),
        ("3=gone:5", "takes no value"),
        ("3=driver:570.1", "concerns the whole host"),
        ("3", "not understood"),
    ],
)
def test_a_fault_that_makes_no_sense_is_explained(text: str, reason: str) -> None:
    with pytest.raises(SandboxError, match=reason):
        faults_module.parse(text)
