"""Inventories, right and wrong: every problem of every host is found at once and named by its path."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from fleet import content, desired, varspec
from fleet.desired import InvalidInventory

FIRST = "GPU-11111111-2222-3333-4444-555555555555"
SECOND = "GPU-99999999-8888-7777-6666-555555555555"
GOOD: dict[str, Any] = {
    "fleet_stack": "cpu",
    "fleet_slots": [
        {"name": "gpu1", "gpu": FIRST, "port": 30001},
        {"name": "gpu2", "gpu": SECOND, "port": 30002},
    ],
}


def inventory(changes: Mapping[str, Any]) -> dict[str, Any]:
    """GOOD with changes; `slot.KEY` changes a key of the first slot, `slot2.KEY` of the second; ... removes it."""
    values = copy.deepcopy(GOOD)
    for name, value in changes.items():
        place, key = values, name
        if name.startswith(("slot.", "slot2.")):
            slot, _, key = name.partition(".")
            place = values["fleet_slots"][0 if slot == "slot" else 1]
        if value is ...:
            place.pop(key)
        else:
            place[key] = value
    return values


def problems(changes: Mapping[str, Any], **options: Any) -> list[varspec.Problem]:
    return desired.check_host(inventory(changes), "ct200", **options)[1]


def test_a_right_inventory_is_resolved_with_every_default() -> None:
    found = desired.resolve(inventory({}), "ct200")
    assert (found.host, found.stack, found.engine, found.root) == ("ct200", "cpu", "standalone", "/opt/ddtree")
    assert (found.keep_releases, found.force, found.waves, found.waivers) == (3, False, ["100%"], {})
    assert found.gate.model_dump() == {
        "no_progress_s": 120.0,
        "cap_s": 3600.0,
        "probe_timeout_s": 10.0,
        "completions": 3,
        "soak_s": 3.0,
        "min_acceptance": 0.0,
    }
    assert found.slots[0].model_dump() == {
        "name": "gpu1",
        "gpu": FIRST,
        "port": 30001,
        "bind": "127.0.0.1",
        "model": "embedded",
        "draft": "embedded",
        "served_model": "demo-code",
        "context_length": 1024,
        "mode": "tree",
        "budget": 15,
        "topk": 8,
        "max_concurrent": 4,
        "threads": 1,
        "env": {},
        "extra_args": [],
    }


def test_a_rich_inventory_keeps_what_it_says() -> None:
    changes = {
        "slot.model": "/srv/models/Qwen3.6-27B",
        "slot.draft": "/srv/models/dflash_v2",
        "slot.bind": "0.0.0.0",
        "slot.env": {"TOKENIZERS_PARALLELISM": "false"},
        "slot.extra_args": ["--speculative-ddtree-allow-hybrid-unsafe", "--mem-fraction=0.8"],
        "slot2.gpu": "none",
        "slot2.draft": "none",
        "slot2.mode": "ar",
        "fleet_gate": {"cap_s": 7200, "completions": 5},
        "fleet_waves": [1, "25%", "100%"],
        "fleet_waivers": {"GPU-XID": "known and mended"},
        "fleet_max_unavailable": 2,
        "fleet_reason": "trying 'budget' 15; see change #12",
        "fleet_api_key": "s3cret",
    }
    found = desired.resolve(inventory(changes), "ct200")
    assert found.slots[0].served_model == "Qwen3.6-27B"
    assert (found.gate.cap_s, found.gate.completions, found.gate.soak_s) == (7200.0, 5, 3.0)
    assert found.waves == [1, "25%", "100%"]
    assert found.api_key_set and "s3cret" not in str(found.model_dump())


def test_every_variable_of_the_specification_is_resolved() -> None:
    fields = {f"fleet_{name}" for name in desired.Desired.model_fields} - {"fleet_host", "fleet_api_key_set"}
    # the key must not lie among the facts; which hosts are meant is no state of a host
    assert fields | {"fleet_api_key", "fleet_hosts"} == set(desired.options())
    slot = desired.options()["fleet_slots"].options
    assert set(desired.Slot.model_fields) == set(slot)
    assert set(desired.Gate.model_fields) == set(desired.options()["fleet_gate"].options)
    assert all(option.description for option in [*desired.options().values(), *slot.values()])


BAD: list[tuple[dict[str, Any], str, str]] = [
    # names and types
    ({"fleet_slot": []}, "fleet_slot", "did you mean fleet_slots"),
    ({"fleet_keep_release": 3}, "fleet_keep_release", "did you mean fleet_keep_releases"),
    ({"slot.prot": 30001}, "fleet_slots[0].prot", "did you mean port"),
    ({"fleet_gate": {"soak": 3}}, "fleet_gate.soak", "did you mean soak_s"),
    ({"slot.port": "30001"}, "fleet_slots[0].port", "write it without quotes: 30001"),
    ({"slot.port": 30001.5}, "fleet_slots[0].port", "a whole number"),
    ({"slot.port": True}, "fleet_slots[0].port", "true or false"),
    ({"slot.budget": True}, "fleet_slots[0].budget", "true or false"),
    ({"slot.port": None}, "fleet_slots[0].port", "nothing (null)"),
    ({"slot.port": ...}, "fleet_slots[0].port", "is missing"),
    ({"slot.name": ...}, "fleet_slots[0].name", "is missing"),
    ({"slot.gpu": ...}, "fleet_slots[0].gpu", "is missing"),
    ({"fleet_keep_releases": "3"}, "fleet_keep_releases", "write it without quotes: 3"),
    ({"fleet_force": "yes"}, "fleet_force", "true or false"),
    ({"fleet_force": 1}, "fleet_force", "true or false"),
    ({"fleet_gate": {"cap_s": "3600"}}, "fleet_gate.cap_s", "write it without quotes"),
    ({"fleet_gate": {"cap_s": float("nan")}}, "fleet_gate.cap_s", "a number"),
    ({"fleet_gate": []}, "fleet_gate", "a mapping"),
    ({"fleet_slots": {"name": "gpu1"}}, "fleet_slots", "a list"),
    ({"fleet_slots": ["gpu1"]}, "fleet_slots[0]", "a mapping"),
    ({"fleet_slots": []}, "fleet_slots", "--limit"),
    ({"fleet_slots": ...}, "fleet_slots", "is missing"),
    ({"fleet_slots": None}, "fleet_slots", "nothing (null)"),
    ({"slot.mode": "trees"}, "fleet_slots[0].mode", "did you mean tree"),
    ({"fleet_engine": "vllm"}, "fleet_engine", "standalone, sglang"),
    ({"fleet_engine": "sglang"}, "fleet_engine", "does not hold engine sglang"),
    ({"slot.extra_args": "--foo --bar"}, "fleet_slots[0].extra_args", "a list"),
    ({"slot.extra_args": ["--mem", 3]}, "fleet_slots[0].extra_args[1]", 'put it in quotes: "3"'),
    ({"slot.env": {"A": 1}}, "fleet_slots[0].env.A", 'put it in quotes: "1"'),
    # values
    ({"fleet_stack": "cpuu"}, "fleet_stack", "did you mean cpu"),
    ({"fleet_stack": "../cpu"}, "fleet_stack", "unknown stack"),
    ({"slot.port": 80}, "fleet_slots[0].port", "between 1024 and 65535"),
    ({"slot.port": 65536}, "fleet_slots[0].port", "between 1024 and 65535"),
    ({"slot.budget": 0}, "fleet_slots[0].budget", "between 1 and 1024"),
    ({"slot.budget": 1025}, "fleet_slots[0].budget", "between 1 and 1024"),
    ({"slot.topk": 0}, "fleet_slots[0].topk", "between 1"),
    ({"slot.name": "GPU1"}, "fleet_slots[0].name", "lower-case"),
    ({"slot.name": "-x"}, "fleet_slots[0].name", "lower-case"),
    ({"slot.name": "x" * 33}, "fleet_slots[0].name", "1 to 32"),
    ({"slot.name": "recover"}, "fleet_slots[0].name", "ddtree-recover"),
    ({"slot.gpu": 1}, "fleet_slots[0].gpu", "UUID"),
    ({"slot.gpu": "1"}, "fleet_slots[0].gpu", "by its index"),
    ({"slot.gpu": "GPU-1111"}, "fleet_slots[0].gpu", "not a GPU UUID"),
    ({"slot.gpu": "MIG-11111111-2222-3333-4444-555555555555"}, "fleet_slots[0].gpu", "MIG"),
    ({"slot.bind": "localhost"}, "fleet_slots[0].bind", "not an IP address"),
    ({"slot.model": ""}, "fleet_slots[0].model", "is empty"),
    ({"slot.model": "models/qwen", "slot.draft": "/m"}, "fleet_slots[0].model", "absolute path"),
    ({"slot.model": "/srv/../etc/x", "slot.draft": "/m"}, "fleet_slots[0].model", "'..'"),
    ({"slot.model": "/srv/model"}, "fleet_slots[0].draft", "embedded drafter"),
    ({"slot.draft": "/srv/draft"}, "fleet_slots[0].draft", "embedded model"),
    ({"slot.draft": "none"}, "fleet_slots[0].draft", "mode: ar"),
    ({"fleet_root": "/opt"}, "fleet_root", "too near the root"),
    ({"fleet_root": "opt/ddtree"}, "fleet_root", "absolute"),
    ({"fleet_state": "/run/ddtree"}, "fleet_state", "/run"),
    ({"fleet_cache": "/opt/ddtree/cache"}, "fleet_cache", "inside one another"),
    ({"fleet_user": "root"}, "fleet_user", "must not run as root"),
    ({"fleet_user": "Me Too"}, "fleet_user", "not a user name"),
    ({"fleet_python": "python3"}, "fleet_python", "absolute"),
    ({"fleet_keep_releases": 0}, "fleet_keep_releases", "between 1"),
    ({"fleet_max_unavailable": 0}, "fleet_max_unavailable", "between 1"),
    ({"fleet_release": "../x"}, "fleet_release", "release id"),
    ({"fleet_reason": "one\ntwo"}, "fleet_reason", "one line"),
    ({"fleet_engine_path": "/nowhere"}, "fleet_engine_path", "__init__.py"),
    ({"fleet_gate": {"cap_s": 60}}, "fleet_gate.cap_s", "no_progress_s"),
    ({"fleet_gate": {"completions": 0}}, "fleet_gate.completions", "between 1"),
    ({"fleet_waves": ["10"]}, "fleet_waves[0]", "write it without quotes: 10"),
    ({"fleet_waves": [0]}, "fleet_waves[0]", "at least 1"),
    ({"fleet_waves": ["0%"]}, "fleet_waves[0]", "share"),
    ({"fleet_waves": ["half"]}, "fleet_waves[0]", "share"),
    ({"fleet_waves": [1.5]}, "fleet_waves[0]", "not a wave"),
    ({"fleet_waves": [True]}, "fleet_waves[0]", "not a wave"),
    ({"fleet_waves": []}, "fleet_waves", "no host would ever be reached"),
    ({"fleet_waivers": {"GPU-XDI": "x"}}, "fleet_waivers.GPU-XDI", "did you mean GPU-XID"),
    ({"fleet_waivers": {"GPU-XID": ""}}, "fleet_waivers.GPU-XID", "needs a reason"),
    ({"fleet_waivers": {"GPU-XID": True}}, "fleet_waivers.GPU-XID", "needs a reason"),
    ({"fleet_waivers": {"PORT-FOREIGN": "x"}}, "fleet_waivers.PORT-FOREIGN", "cannot be waived"),
    # what belongs to the toolkit
    ({"slot.env": {"CUDA_VISIBLE_DEVICES": "0"}}, "fleet_slots[0].env.CUDA_VISIBLE_DEVICES", "set by the toolkit"),
    ({"slot.env": {"LD_LIBRARY_PATH": "/x"}}, "fleet_slots[0].env.LD_LIBRARY_PATH", "no library path"),
    ({"slot.env": {"DDTREE_PORT": "1"}}, "fleet_slots[0].env.DDTREE_PORT", "belong to the toolkit"),
    ({"slot.env": {"A-B": "1"}}, "fleet_slots[0].env.A-B", "not the name"),
    ({"slot.extra_args": ["--port=1"]}, "fleet_slots[0].extra_args[0]", "set port instead"),
    ({"slot.extra_args": ["--api-key", "x"]}, "fleet_slots[0].extra_args[0]", "fleet_api_key"),
    ({"slot.extra_args": [""]}, "fleet_slots[0].extra_args[0]", "empty"),
    # twice
    ({"slot2.port": 30001}, "fleet_slots[1].port", "taken by fleet_slots[0]"),
    ({"slot2.gpu": FIRST.upper().replace("GPU", "GPU")}, "fleet_slots[1].gpu", "taken by fleet_slots[0]"),
    ({"slot2.name": "gpu1"}, "fleet_slots[1].name", "taken by fleet_slots[0]"),
]


@pytest.mark.parametrize(("changes", "path", "words"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_value_is_named_by_its_path_with_cause_and_fix(changes: dict[str, Any], path: str, words: str) -> None:
    found = problems(changes)
    assert [problem.path for problem in found] == [f"hosts.ct200.{path}"]
    assert words in str(found[0])
    assert found[0].cause and found[0].fix


HOSTILE = [
    "$(id)",
    "`id`",
    "a;b",
    "a\nb",
    "a%i",
    'a"b',
    "a'b",
    "a\\b",
    "a\0b",
    "a|b",
    "a&b",
    "a<b",
    "a>b",
    "a*b",
    "a{b}",
    "ä",
]
BOUND: dict[str, dict[str, Any]] = {
    "fleet_slots[0].name": {"slot.name": "{}"},
    "fleet_slots[0].gpu": {"slot.gpu": "{}"},
    "fleet_slots[0].bind": {"slot.bind": "{}"},
    "fleet_slots[0].model": {"slot.model": "/srv/{}", "slot.draft": "/srv/draft"},
    "fleet_slots[0].draft": {"slot.model": "/srv/model", "slot.draft": "/srv/{}"},
    "fleet_slots[0].served_model": {"slot.served_model": "{}"},
    "fleet_slots[0].extra_args[0]": {"slot.extra_args": ["--x={}"]},
    "fleet_slots[0].env.X": {"slot.env": {"X": "{}"}},
    "fleet_root": {"fleet_root": "/opt/{}"},
    "fleet_state": {"fleet_state": "/var/lib/{}"},
    "fleet_cache": {"fleet_cache": "/var/cache/{}"},
    "fleet_python": {"fleet_python": "/usr/bin/{}"},
    "fleet_user": {"fleet_user": "{}"},
    "fleet_release": {"fleet_release": "{}"},
    "fleet_stack": {"fleet_stack": "{}"},
}


def filled(value: Any, hostile: str) -> Any:
    if isinstance(value, dict):
        return {key: filled(item, hostile) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, hostile) for item in value]
    return value.replace("{}", hostile)


@pytest.mark.parametrize("hostile", HOSTILE, ids=ascii)
@pytest.mark.parametrize("path", BOUND)
def test_what_a_unit_or_shell_would_interpret_is_refused_everywhere(path: str, hostile: str) -> None:
    found = problems(filled(BOUND[path], hostile))
    assert f"hosts.ct200.{path}" in [problem.path for problem in found]


def test_an_api_key_that_a_header_cannot_carry_is_refused_and_never_shown() -> None:
    (problem,) = problems({"fleet_api_key": "s3cret key"})
    assert problem.path == "hosts.ct200.fleet_api_key"
    assert "s3cret" not in str(problem)
    (problem,) = problems({"fleet_api_key": 531_867})
    assert "531867" not in str(problem).replace(problem.fix, "")


def test_all_problems_are_listed_at_once() -> None:
    changes = {"slot.port": "30001", "slot2.gpu": 2, "fleet_stack": "x", "fleet_slot": 1, "fleet_waves": [0]}
    with pytest.raises(InvalidInventory) as raised:
        desired.resolve(inventory(changes), "ct200")
    assert len(raised.value.problems) == 5
    assert str(raised.value).startswith("5 problems in the inventory:")


def test_scalars_given_on_the_command_line_are_text_and_converted_nested_ones_are_not() -> None:
    changes = {"fleet_keep_releases": "5", "fleet_force": "true", "fleet_disk_reserve_gib": "2.5"}
    found = desired.resolve(inventory(changes), "ct200", extra=changes)
    assert (found.keep_releases, found.force, found.disk_reserve_gib) == (5, True, 2.5)
    bad = {"fleet_keep_releases": "five", "slot.port": "30001"}
    paths = [problem.path for problem in problems(bad, extra=("fleet_keep_releases", "fleet_slots"))]
    assert sorted(paths) == ["hosts.ct200.fleet_keep_releases", "hosts.ct200.fleet_slots[0].port"]


class Unreadable(Mapping[str, Any]):
    """Variables of which one cannot be evaluated, as an undefined template or a vault value without password."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values_, self.name = values, name

    def __getitem__(self, name: str) -> Any:
        if name == self.name:
            raise RuntimeError("'nothing' is undefined")
        return self.values_[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.values_, self.name: 0})

    def __len__(self) -> int:
        return len(self.values_) + 1


def test_a_value_that_cannot_be_evaluated_is_a_problem_and_not_a_crash() -> None:
    (problem,) = desired.check_host(Unreadable(GOOD, "fleet_root"), "ct200")[1]
    assert problem.path == "hosts.ct200.fleet_root"
    assert "'nothing' is undefined" in problem.cause


def test_other_variables_of_the_inventory_are_none_of_our_business() -> None:
    assert problems({"ansible_host": "x", "my_fleet_size": 3, "ddtree_facts": {}}) == []


def test_a_gpu_listed_on_two_hosts_is_found() -> None:
    other = {"fleet_slots": [{"name": "gpu1", "gpu": SECOND.lower(), "port": 30001}]}
    found, wrong = desired.check_fleet({"ct129": GOOD, "ct200": other})
    assert set(found) == {"ct129", "ct200"}
    assert [problem.path for problem in wrong] == ["hosts.ct200.fleet_slots[0].gpu"]
    assert "ct129" in wrong[0].cause


def test_the_same_problem_of_a_whole_group_is_told_once() -> None:
    hosts = {
        f"gpu{number}.example.org": {
            "fleet_stack": "wrong",
            "fleet_slots": [{"name": "a", "gpu": f"GPU-00000000-0000-0000-0000-{number:012d}", "port": 30001}],
        }
        for number in range(300)
    }
    _, wrong = desired.check_fleet(hosts)
    assert len(wrong) == 1
    assert "also on gpu1.example.org" in wrong[0].cause and "296 more" in wrong[0].cause


def test_status_needs_no_slots() -> None:
    found, wrong = desired.check_host({"fleet_stack": "cpu"}, "ct200", slots_required=False)
    assert wrong == []
    assert found is not None and found.slots == []


def test_a_gpu_is_needed_where_the_stack_has_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = desired.stack.load("cpu").model_copy(update={"cuda": 13})
    monkeypatch.setattr(desired.stack, "load", lambda name: chosen)
    (problem,) = problems({"slot.gpu": "none"})
    assert (problem.path, "needs a GPU" in problem.cause) == ("hosts.ct200.fleet_slots[0].gpu", True)


def test_an_sglang_probe_must_be_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = desired.stack.load("cpu").model_copy(update={"engines": ["sglang"]})
    monkeypatch.setattr(desired.stack, "load", lambda name: chosen)
    (problem,) = problems({"fleet_engine": "sglang", "fleet_gate": {"probe_timeout_s": 1}})
    assert problem.path == "hosts.ct200.fleet_gate.probe_timeout_s"


def test_the_example_inventory_is_right() -> None:
    folder = content.root() / "inventory" / "example"
    group = yaml.safe_load((folder / "group_vars" / "gpu_hosts.yml").read_text())
    hosts = {
        name: {**group, **yaml.safe_load((folder / "host_vars" / f"{name}.yml").read_text())}
        for name in ("ct129", "ct200")
    }
    found, wrong = desired.check_fleet(hosts)
    assert wrong == []
    assert [slot.name for slot in found["ct200"].slots] == ["gpu1", "gpu2"]
