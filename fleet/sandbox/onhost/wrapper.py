#!/usr/bin/python3 -I
"""A foreign service on a sandbox host: something that ran before the fleet came and has to be left alone.

It answers every GET with who it is and since when, so that anybody can see that it is still the same process.
"""

from __future__ import annotations

import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STARTED = time.time()


class Wrapper(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answer = {"service": "wrapper", "pid": os.getpid(), "started": STARTED, "path": self.path}
        body = (json.dumps(answer) + "\n").encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not worth a line each."""


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", int(os.environ.get("PORT", "30000"))), Wrapper).serve_forever()
