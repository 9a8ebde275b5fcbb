"""Each preflight rule fires on its fault, names what was found and how to mend it, and is silent on a healthy host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import healthy_host as host
import pytest
from ddtree import checks_gpu, checks_host, checks_slot, preflight, rules

Facts = dict[str, Any]
NOTHING: Callable[[Facts], None] = lambda facts: None  # noqa: E731


@dataclasses.dataclass
class Fault:
    """One thing that is wrong: how to make it so, and what the violation has to say."""

    rule: str
    change: Callable[[Facts], Any] = NOTHING
    says: tuple[str, ...] = ()
    desired: dict[str, Any] = dataclasses.field(default_factory=dict)
    stack: dict[str, Any] = dataclasses.field(default_factory=dict)
    context: dict[str, Any] = dataclasses.field(default_factory=dict)


def setting(*path: Any, to: Any) -> Callable[[Facts], None]:
    def change(facts: Facts) -> None:
        place: Any = facts
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return change


def updating(*path: Any, **values: Any) -> Callable[[Facts], None]:
    def change(facts: Facts) -> None:
        place: Any = facts
        for key in path:
            place = place[key]
        place.update(values)

    return change


def gpu(**values: Any) -> Callable[[Facts], None]:
    return updating("gpus", 0, **values)


def every_disk(**values: Any) -> Callable[[Facts], None]:
    return lambda facts: [disk.update(values) for disk in facts["disk"].values()]


def listening(addr: str = "0.0.0.0", **who: Any) -> Callable[[Facts], None]:
    return lambda facts: facts["ports"].append({"port": 30001, "addr": addr, **host.process(**who)})


def serving(**values: Any) -> Callable[[Facts], None]:
    return setting("slots", to={"gpu1": {**host.SERVING, **values}})


def xid(number: int | None, age_h: float = 1.0, fatal: bool = True, meaning: str = "fault") -> Callable[[Facts], None]:
    text = f"NVRM: Xid (PCI:0000:29:00): {number or 'lost'}, pid=1"
    fault = {"t": host.NOW - age_h * 3600, "bus_id": "0000:29:00", "xid": number, "text": text}
    return gpu(faults=[{**fault, "fatal": fatal, "meaning": meaning}])


FAULTS = [
    Fault("HOST-NOT-ROOT", setting("root", to=False), ("become",)),
    Fault("HOST-SYSTEMD", setting("systemd", to={"running": False, "version": ""})),
    Fault("HOST-SYSTEMD-OLD", setting("systemd", "version", to="245"), ("245", "247")),
    Fault("HOST-ARCH", setting("arch", to="aarch64"), ("aarch64", "x86_64")),
    Fault("HOST-GLIBC", setting("glibc", to="2.31"), ("2.31", "2.35")),
    Fault("HOST-GLIBC", setting("glibc", to=""), ("another one than glibc",)),
    Fault("HOST-GLIBC", setting("glibc", to="2.4"), ("2.4",)),  # a version, not a decimal number
    Fault("HOST-AGENT-PYTHON", setting("agent_python", "version", to="3.9.2"), ("3.9.2", "3.11")),
    Fault(
        "HOST-PYTHON-MISSING",
        updating("python", version="", error="/usr/bin/python3 is not installed on this host"),
        ("not installed", "fleet_python"),
    ),
    Fault("HOST-PYTHON-MINOR", updating("python", version="3.13.1", minor="3.13"), ("3.13", "3.11 or 3.12")),
    Fault("HOST-COMPILER", setting("compilers", "g++", to=""), ("g++",)),
    Fault("HOST-PYTHON-HEADERS", setting("python", "headers", to=False), ("Python.h", "python3-dev")),
    Fault("HOST-LIBRARY", setting("libraries", "libnuma.so.1", to=False), ("libnuma.so.1", "libnuma1")),
    Fault("HOST-MEMORY", setting("memory", "available_mib", to=4096), ("4.0 GiB", "8.0 GiB")),
    Fault("HOST-USER-CLASH", setting("users", "ddtree", "uid", to=0), ("user id 0",)),
    Fault("HOST-USER-LOGIN", setting("users", "ddtree", "shell", to="/bin/bash"), ("/bin/bash",)),
    Fault("HOST-PROXY", setting("proxies", to={"https_proxy": "http://p:1", "no_proxy": "x"}), ("https_proxy",)),
    Fault("HOST-CLOCK-BACK", setting("journal_tail", 0, "t", to=host.NOW + 7200), ("7200 s",)),
    Fault("HOST-CLOCK-SKEW", says=("600 s behind",), context={"now": host.NOW + 600}),
    Fault("DISK-SPACE", every_disk(free_bytes=4 << 30), ("4.0 GiB free", "9.0 GiB", "1.0 GiB in reserve", "6.0 GiB")),
    Fault("DISK-INODES", every_disk(free_inodes=20_000), ("20000", "45000")),
    Fault("DISK-READ-ONLY", every_disk(options=["ro"]), ("read-only",)),
    Fault("DISK-NOEXEC", every_disk(options=["rw", "noexec"]), ("noexec", "fleet_root")),
    Fault(
        "DRIVER-MISSING", updating(gpu_state="no-driver", gpu_detail="NVIDIA-SMI has failed", gpus=[]), ("has failed",)
    ),
    Fault("DRIVER-MISSING", updating(gpu_state="absent", gpu_detail="not installed", gpus=[]), ("not installed",)),
    Fault("DRIVER-HANG", updating(gpu_state="hang", gpu_detail="nvidia-smi hangs on GPU 3"), ("GPU 3",)),
    Fault("DRIVER-MISMATCH", setting("driver", "library", to="575.57.08"), ("580.95.05", "575.57.08", "reboot")),
    Fault(
        "DRIVER-OLD", updating("driver", kernel="570.86.15", library="570.86.15"), ("570.86.15", "580.65.06", "CUDA")
    ),
    Fault("DRIVER-NOUVEAU", setting("driver", "nouveau", to=True)),
    Fault("DRIVER-UVM", setting("driver", "uvm", to=False)),
    Fault("DRIVER-UPGRADES", setting("driver", "held", to=False), ("hold",)),
    Fault("GPU-SIMULATED", setting("gpu_source", to="simulated")),
    Fault(
        "GPU-ABSENT",
        lambda facts: facts["gpus"].pop(0),
        (host.UUID, "1 GPUs, not this one", "hosts.ct200.fleet_slots[0].gpu"),
    ),
    Fault(
        "GPU-ABSENT",
        lambda facts: facts.update(
            gpus=facts["gpus"][1:],
            gpus_lost=[{"bus_id": "0000:29:00", "index": None, "uuid": "", "reason": "GPU is lost"}],
            gpu_faults=[{"t": host.NOW, "bus_id": "0000:29:00", "xid": 79, "text": "NVRM: Xid 79", "fatal": True}],
        ),
        (host.UUID, "lost: at 0000:29:00 (GPU is lost)", "kernel log: NVRM: Xid 79"),
    ),
    Fault(
        "GPU-LOST",
        lambda facts: facts.update(
            gpus=facts["gpus"][1:],
            gpus_lost=[{"bus_id": "0000:29:00", "index": 1, "uuid": host.UUID, "reason": "GPU is lost"}],
        ),
        (host.UUID, "0000:29:00", "GPU is lost"),
    ),
    Fault(
        "GPU-OTHER-LOST",
        setting("gpus_lost", to=[{"bus_id": "0000:4b:00", "index": None, "uuid": "GPU-x", "reason": "GPU is lost"}]),
        ("GPU-x", "0000:4b:00"),
    ),
    Fault(
        "GPU-FOREIGN",
        gpu(processes=[host.process(memory_mib=2048)]),
        ("pid 4242", "python3 -m wrapper", "wrapper.service", "2.0 GiB"),
    ),
    Fault("GPU-FOREIGN", gpu(processes=[host.process(pid=7, command="", unit="")]), ("pid 7", "python3")),
    Fault("GPU-OTHER-SLOT", gpu(processes=[host.process(slot="gpu9", ours=True)]), ("gpu9",)),
    Fault("GPU-MEMORY", gpu(memory_used_mib=40_000), ("39.1 GiB",)),
    Fault("GPU-ARCH", gpu(compute_cap="7.5"), ("7.5", "9.0, 12.0")),
    Fault("GPU-TOOLKIT", setting("toolkits", 0, "version", to="12.8"), ("12.8", "/usr/local/cuda", "12.9")),
    Fault("GPU-TOOLKIT", setting("toolkits", to=[]), ("none", "12.9")),
    Fault("GPU-ECC", gpu(ecc_uncorrected=2), ("2 uncorrectable",)),
    Fault("GPU-REMAP-PENDING", gpu(remap_pending=True), ("--gpu-reset", host.UUID)),
    Fault("GPU-REMAP-FAILED", gpu(remap_failed=True), ("replace the card",)),
    Fault("GPU-XID", xid(79), ("Xid 79", "NVRM")),
    Fault("GPU-XID", xid(None), ("no Xid",)),
    Fault(
        "GPU-XID",
        setting("gpu_faults", to=[{"t": host.NOW, "bus_id": "", "xid": None, "text": "NVRM: lost", "fatal": True}]),
        ("does not name",),
    ),
    Fault("GPU-XID-NOTE", xid(63, fatal=False), ("Xid 63",)),
    Fault("GPU-MIG", gpu(mig=True), ("-mig 0",)),
    Fault("GPU-PROHIBITED", gpu(compute_mode="Prohibited"), ("-c DEFAULT",)),
    Fault("GPU-PERSISTENCE", gpu(persistence=False), ("nvidia-persistenced",)),
    Fault("PORT-FOREIGN", listening(), ("port 30001", "pid 4242", "python3 -m wrapper", "wrapper.service")),
    Fault("PORT-FOREIGN", listening("127.0.0.1"), ("pid 4242",)),
    Fault("PORT-FOREIGN", listening("::", pid=None), ("cannot be seen",)),
    Fault("PORT-OTHER-SLOT", listening(slot="gpu9", ours=True), ("gpu9",)),
    Fault("PORT-EPHEMERAL", says=("32768 to 60999",), desired={"slots": [host.slot(port=40_000)]}),
    Fault("BIND-ADDRESS", says=("10.9.9.9", "10.200.0.200"), desired={"slots": [host.slot(bind="10.9.9.9")]}),
    Fault(
        "MODEL-MISSING",
        setting("models", "/srv/models/draft", "exists", to=False),
        ("/srv/models/draft", "hosts.ct200.fleet_slots[0].draft"),
    ),
    Fault(
        "MODEL-INCOMPLETE",
        setting("models", "/srv/models/target", "missing", to=["model-00002-of-00003.safetensors"]),
        ("model-00002-of-00003.safetensors",),
    ),
    Fault(
        "MODEL-UNREADABLE",
        setting("access", to={"/srv/models/target/model.safetensors": "Permission denied"}),
        ("/srv/models/target/model.safetensors", "Permission denied", "ddtree"),
    ),
    Fault("MODEL-HIDDEN", says=("/tmp",), desired={"slots": [host.slot(model="/tmp/model")]}),
    Fault("MODEL-HIDDEN", says=("/var/lib",), desired={"slots": [host.slot(draft="/var/lib/ddtree/draft")]}),
    Fault(
        "CACHE-UNWRITABLE",
        setting("access", to={"/var/cache/ddtree/rel-1": "/var/cache may not be entered"}),
        ("/var/cache may not be entered", "down to /var/cache/ddtree/rel-1"),
    ),
    Fault("SLOT-UNIT-FOREIGN", serving(last=None), ("ddtree-gpu1.service",)),
    Fault("SLOT-ALTERED", serving(altered=["/etc/systemd/system/ddtree-gpu1.service (changed)"]), ("(changed)",)),
    Fault("SLOT-BUSY", serving(activating=True, open={"id": "a2"})),
    Fault("SLOT-OPEN", serving(open={"id": "a2"}), ("a2",)),
    Fault(
        "SLOT-REFUSED",
        serving(refused={"rel-2 digest": "crashed at import"}),
        ("rel-2", "crashed at import", "--force"),
        context={"release_id": "rel-2", "digests": {"gpu1": "digest"}},
    ),
    Fault("SLOT-QUARANTINED", serving(quarantined="GPU lost"), ("GPU lost", "--force")),
    Fault("SLOT-ORPHAN", setting("slots", to={"old": {**host.SERVING, "slot": "old"}}), ("old", "rel-1")),
    Fault(
        "RELEASE-UNKNOWN", setting("releases", to=[{"id": "rel-1"}]), ("rel-9", "rel-1"), desired={"release": "rel-9"}
    ),
]


def evaluate(fault: Fault) -> list[Any]:
    facts = host.facts()
    fault.change(facts)
    return preflight.evaluate(facts, host.stack(**fault.stack), host.desired(**fault.desired), **fault.context)


def test_a_healthy_host_violates_nothing() -> None:
    assert preflight.evaluate(host.facts(), host.stack(), host.desired(), now=host.NOW + 5) == []


def test_a_healthy_host_that_serves_already_violates_nothing() -> None:
    facts = host.facts()
    engine = host.process(pid=900, slot="gpu1", ours=True, unit="ddtree-gpu1.service")
    facts["slots"] = {"gpu1": host.SERVING}
    facts["gpus"][0].update(processes=[{**engine, "memory_mib": 60_000}], memory_used_mib=60_004)
    facts["ports"].append({"port": 30001, "addr": "127.0.0.1", **engine})
    found = preflight.evaluate(facts, host.stack(), host.desired(), release_id="rel-1", digests={"gpu1": "digest"})
    assert found == []


def test_a_host_without_gpus_is_healthy_for_a_stack_without_cuda() -> None:
    facts = host.facts()
    facts.update(gpu_source="none", gpu_state="absent", gpus=[], toolkits=[], compilers={"gcc": "", "g++": ""})
    facts["driver"].update(kernel="", library="", uvm=False)
    stack = host.stack(cuda=None, archs=[], needs_compiler=False)
    assert preflight.evaluate(facts, stack, host.desired(slots=[host.slot(gpu="none")])) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.rule}-{'-'.join(fault.says)[:24]}")
def test_each_fault_is_found_named_and_explained(fault: Fault) -> None:
    found = evaluate(fault)
    assert [item.rule for item in found] == [fault.rule]
    text = str(found[0])
    for words in fault.says:
        assert words in text
    assert found[0].found and found[0].needed and found[0].fix
    assert "{" not in text and "None" not in text
    assert found[0].stops == (rules.RULES[fault.rule].severity == rules.ERROR)


def test_every_rule_has_a_test() -> None:
    assert {fault.rule for fault in FAULTS} == set(rules.RULES)


@pytest.mark.parametrize("number", sorted([48, 64, 74, 79, 94, 95, 119, 120, 140, 154, 171]))
def test_fatal_faults_older_than_the_window_no_longer_stop(number: int) -> None:
    assert [item.rule for item in evaluate(Fault("", xid(number, age_h=23.9)))] == ["GPU-XID"]
    assert evaluate(Fault("", xid(number, age_h=24.1))) == []
    assert [item.rule for item in evaluate(Fault("", xid(number, age_h=24.1), desired={"xid_window_h": 48.0}))] == [
        "GPU-XID"
    ]


def test_a_fault_of_another_gpu_does_not_stop() -> None:
    facts = host.facts()
    facts["gpus"][1].update(ecc_uncorrected=5, remap_pending=True, processes=[host.process()])
    assert preflight.evaluate(facts, host.stack(), host.desired()) == []


def test_all_violations_are_listed_at_once_and_those_that_stop_come_first() -> None:
    facts = host.facts()
    facts["driver"]["uvm"] = False
    facts["glibc"] = "2.31"
    facts["gpus"][0]["mig"] = True
    facts["ports"].append({"port": 30001, "addr": "0.0.0.0", **host.process()})
    found = preflight.evaluate(facts, host.stack(), host.desired())
    assert {item.rule for item in found} == {"DRIVER-UVM", "HOST-GLIBC", "GPU-MIG", "PORT-FOREIGN"}
    assert found[-1].rule == "DRIVER-UVM"


def test_a_waiver_with_a_reason_lets_the_host_pass_and_stays_visible() -> None:
    found = evaluate(Fault("", gpu(ecc_uncorrected=1), desired={"waivers": {"GPU-ECC": "known, card is ordered"}}))
    assert [(item.rule, item.stops, item.waived) for item in found] == [("GPU-ECC", False, "known, card is ordered")]
    assert "known, card is ordered" in str(found[0])


def test_a_rule_that_nothing_can_survive_is_not_waived() -> None:
    found = evaluate(Fault("", listening(), desired={"waivers": {"PORT-FOREIGN": "please"}}))
    assert found[0].stops


def test_force_tries_a_release_again_that_failed_here_but_waives_nothing_else() -> None:
    facts = host.facts()
    facts["slots"] = {"gpu1": {**host.SERVING, "refused": {"rel-2 digest": "crashed"}, "quarantined": "GPU lost"}}
    facts["gpus"][0]["ecc_uncorrected"] = 1
    context: dict[str, Any] = {"release_id": "rel-2", "digests": {"gpu1": "digest"}}
    found = preflight.evaluate(facts, host.stack(), host.desired(force=True), **context)
    assert {item.rule: item.stops for item in found} == {
        "GPU-ECC": True,
        "SLOT-REFUSED": False,
        "SLOT-QUARANTINED": False,
    }


def test_another_configuration_of_a_failed_release_may_be_tried() -> None:
    change = serving(refused={"rel-2 digest": "crashed"})
    context = {"release_id": "rel-2", "digests": {"gpu1": "other"}}
    assert evaluate(Fault("", change, context=context)) == []


def test_space_is_asked_for_only_where_the_release_is_not_there_yet() -> None:
    def change(facts: Facts) -> None:
        every_disk(free_bytes=2 << 30, free_inodes=5000)(facts)
        facts["releases"] = [{"id": "rel-1"}]

    assert evaluate(Fault("", change, context={"release_id": "rel-1"})) == []
    found = evaluate(Fault("", change, context={"release_id": "rel-2"}))
    assert {item.rule for item in found} == {"DISK-SPACE", "DISK-INODES"}


def test_unlimited_inodes_are_enough() -> None:
    assert evaluate(Fault("", every_disk(free_inodes=None, total_inodes=None))) == []


def test_a_stack_that_brings_its_own_compiler_needs_no_toolkit_of_the_host() -> None:
    assert evaluate(Fault("", setting("toolkits", to=[]), stack={"ships_toolkit": True})) == []


def test_an_older_gpu_needs_no_new_toolkit() -> None:
    def change(facts: Facts) -> None:
        facts["gpus"][0]["compute_cap"] = "9.0"
        facts["toolkits"][0]["version"] = "12.4"

    assert evaluate(Fault("", change)) == []


def test_a_reserved_port_inside_the_ephemeral_range_is_fine() -> None:
    change = setting("ephemeral", "reserved", to=[[39_000, 41_000]])
    assert evaluate(Fault("", change, desired={"slots": [host.slot(port=40_000)]})) == []


def test_a_listener_on_another_address_does_not_collide() -> None:
    assert evaluate(Fault("", listening("10.200.0.200"))) == []


def test_the_driver_may_be_newer_than_needed_in_any_digit() -> None:
    assert evaluate(Fault("", updating("driver", kernel="590.9.1", library="590.9.1"))) == []
    assert [item.rule for item in evaluate(Fault("", updating("driver", kernel="580.9", library="580.9")))] == [
        "DRIVER-OLD"
    ]


def test_every_check_is_wired_in() -> None:
    for module in (checks_host, checks_gpu, checks_slot):
        defined = {
            value
            for name, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
        } - {checks_gpu.describe, checks_gpu.who}
        assert defined == set(module.CHECKS)
        assert set(module.CHECKS) <= set(preflight.CHECKS)


def test_a_stack_without_cuda_minds_neither_architecture_nor_toolkit() -> None:
    def change(facts: Facts) -> None:
        facts["gpus"][0]["compute_cap"] = "7.5"
        facts["toolkits"] = []

    assert evaluate(Fault("", change, stack={"cuda": None})) == []


def test_a_broken_driver_is_nothing_to_slots_without_a_gpu() -> None:
    change = updating(gpu_state="hang", gpu_detail="nvidia-smi does not answer", gpus=[])
    assert evaluate(Fault("", change, stack={"cuda": None}, desired={"slots": [host.slot(gpu="none")]})) == []


def test_a_gpu_that_does_not_tell_its_architecture_is_not_judged_by_it() -> None:
    assert evaluate(Fault("", gpu(compute_cap=""))) == []


def test_a_cache_of_another_owner_is_no_fault_because_starting_puts_it_right() -> None:
    assert evaluate(Fault("", setting("access", to={"/var/cache/ddtree/rel-1": "Permission denied"}))) == []
