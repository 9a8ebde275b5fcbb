"""An engine that does what it is told, in the place of SGLang: `--do BEHAVIOUR` with the options below."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--do", default="serve")
    parser.add_argument("--status", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--api-key", default="")
    given = parser.parse_args()
    if given.folder:
        facts = {"argv": sys.argv, "pid": os.getpid(), "notify": os.environ.get("NOTIFY_SOCKET")}
        facts["cmdline"] = Path("/proc/self/cmdline").read_text()
        partial = given.folder / "facts.part"
        partial.write_text(json.dumps(facts))
        partial.rename(given.folder / "facts.json")
    if given.do == "exit":
        time.sleep(given.seconds)
        sys.exit(given.status)
    if given.do == "signal":
        os.kill(os.getpid(), given.status)
    if given.do == "idle":
        time.sleep(3600)
    until = time.monotonic() + given.seconds
    while given.do == "compute" and time.monotonic() < until:
        sum(range(20000))
    with tempfile.NamedTemporaryFile() as weights:
        weights.write(bytes(1 << 20))
        weights.flush()
        while given.do == "read" and time.monotonic() < until:
            Path(weights.name).read_bytes()
            time.sleep(0.5)
    if given.do == "helper":
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        (given.folder / "helper").write_text(str(helper.pid))
    if given.do == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if given.do == "killed-by-own-stop":
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(os.getpid(), signal.SIGKILL))
    if given.do == "bad-stop":
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(9))

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: object) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def do_GET(self) -> None:
            if self.path == "/die":
                os._exit(given.status)
            if given.api_key and self.headers["Authorization"] != f"Bearer {given.api_key}":
                self.answer(401, {})
            elif self.path == "/health" and given.do == "unhealthy":
                self.answer(503, {"stage": "capturing graphs"})
            elif self.path == "/health_generate" and given.do == "no-tokens":
                self.answer(503, {})
            else:
                self.answer(200, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["model"] != "scripted":
                self.answer(404, {"error": "no such model"})
            else:
                text = "" if given.do == "empty" else " ok"
                self.answer(200, {"choices": [{"text": text}]})

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
