"""Progress of a run as JSON lines: Ansible plugins write them, `fleet` shows them.

The stream is a file named by the environment variable DDTREE_PROGRESS; without it nothing is written, so that plain
`ansible-playbook` behaves the same.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any


def emit(*, host: str, stage: str, message: str = "", slot: str | None = None, **fields: Any) -> None:
    """Append one line; a progress line is never worth failing a deployment, so errors of the file are ignored."""
    path = os.environ.get("DDTREE_PROGRESS")
    if not path:
        return
    record = {"t": time.time(), "host": host, "slot": slot, "stage": stage, "message": message, **fields}
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, (json.dumps(record, default=str) + "\n").encode())
        finally:
            os.close(descriptor)
    except OSError:
        return
