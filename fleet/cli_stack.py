"""`fleet stack`: the locks of stacks, made again, checked, and proven."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})

StackName = Annotated[str, typer.Argument(help="A stack of stacks/, such as cpu.", metavar="STACK")]
Minor = Annotated[
    str | None, typer.Option("--python", help="Only this Python minor, such as 3.11; default: all.", metavar="MINOR")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


@app.callback()
def _main() -> None:
    """Make the locks of a stack, see whether they have drifted, and prove that what they name works together."""


@app.command(
    epilog="Exit status 0: written, or with --check nothing has drifted; 1: drift, or it cannot be resolved. Versions "
    "of the present lock are kept while they fit; --upgrade lets them move."
)
def lock(
    stack: StackName,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail when a lock has drifted.")] = False,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Take the newest versions that fit.")] = False,
    patched: Annotated[
        bool, typer.Option("--patched", help="Only pin the patched wheels again, after a change of patches/.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Resolve requirements.in and pin one wheel per package, for every Python minor of the stack."""
    from fleet import stack as stacks
    from fleet import stack_lock

    try:
        chosen = stacks.load(stack)
        if check:
            found = list(stack_lock.drift(chosen))
            good = f"the locks of stack {stack} are what requirements.in resolves to"
            _end(as_json, {"stack": stack, "drift": found}, "\n".join(found) or good, bool(found))
            return
        written = stack_lock.write_patched(chosen) if patched else stack_lock.write(chosen, upgrade=upgrade)
    except stacks.StackError as error:
        _end(as_json, {"stack": stack, "error": str(error)}, str(error), failed=True)
        return
    _end(as_json, {"stack": stack, "written": written}, "\n".join(str(item["text"]) for item in written))


@app.command(
    epilog="The venvs and everything unpacked for them are removed afterwards (--keep-cache keeps the unpacked wheels "
    "for the next proof). Exit status 0: proven; 1: not, with the reason."
)
def prove(
    stack: StackName,
    python: Minor = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="Whose modules to import; default: the stack's first.", metavar="NAME"),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option("--work", help="Folder for venvs; default: beside the wheelhouse.", metavar="DIR"),
    ] = None,
    wheelhouse: Annotated[
        Path | None, typer.Option("--wheelhouse", "-w", help="Folder of the wheelhouse.", metavar="DIR")
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", help="Also write the figures into this file.", metavar="FILE")
    ] = None,
    keep_cache: Annotated[bool, typer.Option("--keep-cache", help="Keep the unpacked wheels.")] = False,
    as_json: Json = False,
) -> None:
    """Install a lock into a venv, import all that a server imports, and compile a kernel with the venv's own compiler.

    A resolver shows only that names and versions agree. Where there is no driver a stand-in for libcuda.so.1 is used;
    no GPU is needed.
    """
    from fleet import stack as stacks
    from fleet.proof import run
    from fleet.proof.environment import ProofError
    from fleet.proof.standin import StandinError
    from fleet.wheelhouse import Wheelhouse, WheelhouseError

    folder = work or run.default_folder()
    document: dict[str, Any] = {
        **run.machine(),
        "command": shlex.join(["fleet", *sys.argv[1:]]),
        "proofs": [],
    }
    try:
        chosen, house = stacks.load(stack), Wheelhouse(wheelhouse)
        for minor in [python] if python else chosen.python:
            chosen.lock(minor)
            say = (lambda text: None) if as_json else (lambda text: print(text, flush=True))
            document["proofs"].append(run.prove(chosen, minor, engine or chosen.engines[0], house, folder, say))
    except (stacks.StackError, WheelhouseError, ProofError, StandinError) as error:
        document["error"] = str(error)
    finally:
        if not keep_cache:
            shutil.rmtree(folder / "cache", ignore_errors=True)
    if record is not None and "error" not in document:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(document, indent=1) + "\n")
    failed = "error" in document
    _end(as_json, document, document.get("error") or f"stack {stack} is proven", failed)


def _end(as_json: bool, document: dict[str, Any], text: str, failed: bool = False) -> None:
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        print(text, file=sys.stderr if failed else sys.stdout)
    if failed:
        raise typer.Exit(1)
