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
            wheels = {wheel for minor in _minors(chosen, python) for wheel in chosen.lock(minor).wheels}
            wheels |= {chosen.tool(name) for name in chosen.tools}
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
            wheels = {wheel for minor in _minors(chosen, python) for wheel in chosen.lock(minor).wheels}
            wheels |= {chosen.tool(name) for name in chosen.tools}
            rows = [{**wheel.as_dict(), "present": house.has(wheel)} for wheel in sorted(wheels)]
    _end(as_json, {"wheelhouse": str(house.root), "wheels": rows}, "\n".join(_rows(rows)) or f"{house.root} is empty")


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
