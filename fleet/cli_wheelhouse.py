"""`fleet wheelhouse`: the control node's store of every wheel that a stack names."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})

StackName = Annotated[
    str | None, typer.Option("--stack", "-s", help="A stack of stacks/, such as cpu.", metavar="NAME")
]
Minor = Annotated[
    str | None, typer.Option("--python", help="Only this Python minor, such as 3.11; default: all.", metavar="MINOR")
]
Root = Annotated[
    Path | None,
    typer.Option(
        "--wheelhouse",
        "-w",
        help="Folder of the wheelhouse (as fleet_wheelhouse); default: ~/.cache/ddtree-fleet/wheelhouse.",
        metavar="DIR",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


@app.callback()
def _main() -> None:
    """Keep every wheel that a stack's lock names on this machine, by its hash, ready to be sent to hosts.

    `fleet deploy` completes the wheelhouse by itself; these commands do it ahead of time, and check it.
    """


@app.command(
    epilog="Files come from wherever pip is configured to look on this machine, then from the places that the stack "
    "names. A file is kept only if its sha256 is the lock's and it is a wheel in order, so it does not matter which "
    "source it came from. Run it again after an interruption: what is there stays, a part is continued."
)
def build(
    stack: Annotated[str, typer.Option("--stack", "-s", help="A stack of stacks/, such as cpu.", metavar="NAME")],
    python: Minor = None,
    wheelhouse: Root = None,
    as_json: Json = False,
) -> None:
    """Fetch the wheels of a stack that are not there yet."""
    from fleet import stack as stacks
    from fleet.wheelhouse import Wheelhouse

    house = Wheelhouse(wheelhouse)
    with _explained(as_json):
        chosen = stacks.load(stack)
        done = []
        for minor in _minors(chosen, python):
            with _progress(as_json, f"{stack}, Python {minor}") as report:
                result = house.complete(chosen, minor, report)
            done.append(
                {
                    "python": minor,
                    "fetched": [wheel.filename for wheel in result.fetched],
                    "made": [wheel.filename for wheel in result.made],
                    "present": result.present,
                    "bytes": result.bytes,
                    "seconds": round(result.seconds, 2),
                }
            )
            _say(
                as_json,
                f"stack {stack}, Python {minor}: {len(result.fetched)} wheels fetched ({_mib(result.bytes)}), "
                f"{result.present} were there, {result.seconds:.1f} s",
            )
            for wheel in result.made:
                _say(as_json, f"made {wheel.filename} from the lock's wheel and the stack's patches")
        _end(as_json, {"wheelhouse": str(house.root), "stack": stack, "done": done}, f"wheelhouse: {house.root}")


@app.command(
    epilog="Exit status 0: all in order; 1: something is missing or damaged, which `fleet wheelhouse build` mends."
)
def verify(stack: StackName = None, python: Minor = None, wheelhouse: Root = None, as_json: Json = False) -> None:
    """Read every file in full: its hash, its name, its metadata and its list of files have to agree.

    With --stack, files that the stack's lock names but the wheelhouse lacks are problems too.
    """
    from fleet import stack as stacks
    from fleet.wheelhouse import Wheelhouse

    house = Wheelhouse(wheelhouse)
    with _explained(as_json):
        if stack is None:
            checked, problems = len(house.entries()), house.verify()
        else:
            chosen = stacks.load(stack)
            wheels = {wheel for minor in _minors(chosen, python) for wheel in chosen.all_wheels(minor)}
            checked, problems = len(wheels), house.verify(sorted(wheels))
    text = "\n".join(problems) or f"{checked} wheels in {house.root}: all in order"
    _end(as_json, {"wheelhouse": str(house.root), "checked": checked, "problems": problems}, text, bool(problems))


@app.command("list")
def list_(stack: StackName = None, python: Minor = None, wheelhouse: Root = None, as_json: Json = False) -> None:
    """Show what is there, or with --stack what a stack needs and whether it is there."""
    from fleet import stack as stacks
    from fleet.wheelhouse import Wheelhouse

    house = Wheelhouse(wheelhouse)
    with _explained(as_json):
        if stack is None:
            rows = [{"filename": e.filename, "sha256": e.sha256, "size": e.size} for e in house.entries()]
        else:
            chosen = stacks.load(stack)
            wheels = {wheel for minor in _minors(chosen, python) for wheel in chosen.all_wheels(minor)}
            rows = [{**wheel.as_dict(), "present": house.has(wheel)} for wheel in sorted(wheels)]
    _end(as_json, {"wheelhouse": str(house.root), "wheels": rows}, "\n".join(_rows(rows)) or f"{house.root} is empty")


Stacks = Annotated[
    list[str] | None,
    typer.Option(
        "--stack", "-s", help="A stack of stacks/; may be given more than once; default: all.", metavar="NAME"
    ),
]


@app.command(
    epilog="Removes wheels that no lock of the stacks names, and parts of interrupted downloads. Releases on hosts are "
    "not concerned: they hold their own files."
)
def prune(
    stack: Stacks = None,
    check: Annotated[bool, typer.Option("--check", help="Only say what would be removed.")] = False,
    wheelhouse: Root = None,
    as_json: Json = False,
) -> None:
    """Make room: keep only what the stacks of this installation need, or only those named."""
    from fleet import stack as stacks
    from fleet.wheelhouse import Wheelhouse
    from fleet.wheelhouse_prune import prune as remove

    house = Wheelhouse(wheelhouse)
    with _explained(as_json):
        done = remove(house, _wheels_of(stack or stacks.available(), None), check=check)
    said = "would be removed" if check else "removed"
    text = [*done.removed, f"{len(done.removed)} {said} ({_mib(done.bytes)}), {done.kept} wheels kept in {house.root}"]
    document = {"wheelhouse": str(house.root), "check": check, "removed": done.removed, "bytes": done.bytes}
    _end(as_json, {**document, "kept": done.kept}, "\n".join(text))


@app.command(
    epilog="The file holds the wheels of the stacks with their hashes, patched ones included. An export that was "
    "interrupted goes on where it stopped. On the other side: fleet wheelhouse import FILE"
)
def export(
    file: Annotated[Path, typer.Argument(help="The file to write, such as stack.tar.", metavar="FILE")],
    stack: Stacks = None,
    python: Minor = None,
    wheelhouse: Root = None,
    as_json: Json = False,
) -> None:
    """Write the wheels of stacks into one file, for a control node without network."""
    from fleet import stack as stacks
    from fleet import wheelhouse_archive
    from fleet.wheelhouse import Wheelhouse

    house, names = Wheelhouse(wheelhouse), stack or stacks.available()
    with _explained(as_json):
        wheels = _wheels_of(names, python)
        with _progress(as_json, f"export to {file.name}") as report:
            done = wheelhouse_archive.export(house, names, wheels, file, report)
    document = {"file": str(file), "stacks": names, "wheels": done.wheels, "bytes": done.bytes}
    again = f", {done.continued} of them written before" if done.continued else ""
    text = f"{file}: {done.wheels} wheels of {', '.join(names)}{again}, {_mib(done.bytes)}"
    _end(as_json, {**document, "continued": done.continued}, text)


@app.command(
    "import",
    epilog="Every wheel is hashed and opened before it is kept. What is there already is skipped, so an import that "
    "was interrupted goes on. Exit status 1: the file is damaged or cut off; what came before the damage is kept.",
)
def import_(
    file: Annotated[Path, typer.Argument(help="What `fleet wheelhouse export` wrote.", metavar="FILE")],
    wheelhouse: Root = None,
    as_json: Json = False,
) -> None:
    """Take the wheels of an exported file into the wheelhouse, and say whether its stacks are complete now."""
    from fleet import stack as stacks
    from fleet import wheelhouse_archive
    from fleet.wheelhouse import Wheelhouse

    house = Wheelhouse(wheelhouse)
    with _explained(as_json):
        with _progress(as_json, f"import of {file.name}") as report:
            done = wheelhouse_archive.import_(house, file, report)
        complete = {}
        for name in done.stacks:
            if name in stacks.available():
                for minor in stacks.load(name).python:
                    complete[f"{name}, Python {minor}"] = len(house.missing(stacks.load(name).all_wheels(minor)))
    text = [f"{len(done.added)} wheels taken into {house.root}, {done.present} were there"]
    text += [f"stack {name}: {f'{count} wheels missing' if count else 'complete'}" for name, count in complete.items()]
    text += [f"stack {name} is unknown to this fleet" for name in done.stacks if name not in stacks.available()]
    document = {"wheelhouse": str(house.root), "added": [wheel.filename for wheel in done.added]}
    _end(as_json, {**document, "present": done.present, "missing": complete}, "\n".join(text))


def _wheels_of(names: Iterable[str], python: str | None) -> set[Any]:
    from fleet import stack as stacks

    chosen = [stacks.load(name) for name in names]
    return {wheel for item in chosen for minor in _minors(item, python) for wheel in item.all_wheels(minor)}


def _rows(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        mark = "" if row.get("present", True) else "   missing"
        yield f"{row['size']:>12,}  {row['sha256'][:12]}  {row['filename']}{mark}"


def _minors(chosen: Any, python: str | None) -> list[str]:
    """The Python minors meant; a lock that does not exist is named by the stack itself."""
    if python is not None:
        chosen.lock(python)
        return [python]
    return list(chosen.python)


@contextmanager
def _explained(as_json: bool) -> Iterator[None]:
    """A problem that has a name ends the command with it and status 1."""
    from fleet.stack import StackError
    from fleet.wheelhouse import WheelhouseError

    try:
        yield
    except (StackError, WheelhouseError) as error:
        problems = getattr(error, "problems", [])
        _end(as_json, {"error": str(error), "problems": problems}, str(error), failed=True)


@contextmanager
def _progress(as_json: bool, title: str) -> Iterator[Any]:
    if as_json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[file]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(title, total=None, file="")
        yield lambda progress: bars.update(
            task,
            total=progress.bytes,
            completed=progress.bytes_done,
            file=f"{progress.files_done}/{progress.files} {progress.filename}",
        )


def _say(as_json: bool, text: str) -> None:
    if not as_json:
        print(text)


def _end(as_json: bool, document: dict[str, Any], text: str, failed: bool = False) -> None:
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        print(text, file=sys.stderr if failed else sys.stdout)
    if failed:
        raise typer.Exit(1)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
