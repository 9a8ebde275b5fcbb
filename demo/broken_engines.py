"""Engines that are broken on purpose: a copy of the real `ddtree_engine` package with one fault written into it.

Used by the demo and by the tests; deployed like any engine of one's own, with `fleet_engine_path=<copy>`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import ddtree_engine

# The import smoke run has no slot: a fault behind this condition shows only where the engine really serves.
IN_SLOT = 'if __import__("os").environ.get("DDTREE_SLOT"):\n'

HEAD = {
    "crash-at-import": IN_SLOT + '    raise RuntimeError("broken on purpose: crash at import")\n',
    "crash-at-once": 'raise RuntimeError("broken on purpose: the import smoke run must find this")\n',
    "crash-after-3s": IN_SLOT
    + "    import os as _os, sys as _sys, threading as _threading\n"
    + "    def _die():\n"
    + '        print("RuntimeError: broken on purpose: dead after three seconds", file=_sys.stderr, flush=True)\n'
    + "        _os._exit(3)\n"
    + "    _timer = _threading.Timer(3.0, _die)\n"
    + "    _timer.daemon = True\n"
    + "    _timer.start()\n",
    "exit-0": IN_SLOT + "    raise SystemExit(0)\n",
    "crash-loop": IN_SLOT
    + '    print("ValueError: broken on purpose: crash loop", flush=True)\n'
    + '    __import__("os").kill(__import__("os").getppid(), 9)\n',
    "no-port": IN_SLOT + "    import time as _time\n    _time.sleep(100000)\n",
    "health-503": IN_SLOT
    + "    import http.server as _http, os as _os\n"
    + "    class _Answer503(_http.BaseHTTPRequestHandler):\n"
    + "        def do_GET(self):\n"
    + '            self.send_error(503, "starting")\n'
    + "        do_POST = do_GET\n"
    + "        def log_message(self, *args): pass\n"
    + '    _http.ThreadingHTTPServer(("127.0.0.1", int(_os.environ["DDTREE_PORT"])), _Answer503).serve_forever()\n',
}

# Appended to the decoder's module: the class is complete there, and one method is replaced.
TAIL = {
    "wrong-text": "\n\n_right_step = Session.step\n\n\n"
    + "def _wrong_step(self):\n"
    + "    step = _right_step(self)\n"
    + "    return type(step)([token ^ 1 for token in step.tokens], step.nodes, step.finish)\n\n\n"
    + "Session.step = _wrong_step\n",
    # Serves rightly for some seconds, so that it becomes ready, then stands still with a request running.
    "hang-after-readiness": "\n\n_right_start, _first = Decoder.start, []\n\n\n"
    + "def _hanging_start(self, *args, **kwargs):\n"
    + "    import time\n\n"
    + "    _first.append(time.monotonic())\n"
    + "    if _first[-1] - _first[0] > 8:\n"
    + "        time.sleep(100000)\n"
    + "    return _right_start(self, *args, **kwargs)\n\n\n"
    + "Decoder.start = _hanging_start\n",
}

KINDS = (*HEAD, *TAIL)


def copy_of_the_engine(directory: Path) -> Path:
    """A copy of the installed engine package below `directory`; returns the package's path."""
    source = Path(ddtree_engine.__file__).resolve().parent
    package = directory / "ddtree_engine"
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


def make(kind: str, directory: Path) -> Path:
    """Write the broken copy `kind` below `directory` and return the package's path. Raises KeyError for other kinds."""
    package = copy_of_the_engine(directory / kind)
    if kind in HEAD:
        entry = package / "server" / "__main__.py"
        future = "from __future__ import annotations\n"
        text = entry.read_text()
        head, separator, rest = text.partition(future)
        if not separator:
            raise RuntimeError(f"{entry} no longer begins as this tool expects")
        entry.write_text(head + separator + "\n" + HEAD[kind] + rest)
    else:
        decoder = package / "reference" / "engine.py"
        decoder.write_text(decoder.read_text() + TAIL[kind])
    return package
