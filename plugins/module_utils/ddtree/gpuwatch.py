"""Looks after one GPU while a gate runs, in a thread of its own: nvidia-smi may hang when a GPU is lost."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from . import signatures
from .process import run

SANDBOX_MARK = Path("/etc/sandbox-host")
SANDBOX_KERNEL_LOG = Path("/run/sandbox-kernel.log")
INTERVAL_S = 1.0
# After a death the verdict is due within a second; a GPU that takes longer to answer is judged by what was seen before.
LOOK_S = 0.5


def kernel_gpu_lines(since: float) -> list[str]:
    """Kernel lines of the NVIDIA driver since `since` (epoch seconds); on sandbox hosts the simulation's own file."""
    if SANDBOX_MARK.exists():
        try:
            if SANDBOX_KERNEL_LOG.stat().st_mtime < since:
                return []
            return [line for line in SANDBOX_KERNEL_LOG.read_text().splitlines() if "NVRM" in line]
        except OSError:
            return []
    result = run("journalctl", "-k", "-q", "--no-pager", "-o", "cat", f"--since=@{since:.0f}", check=False, timeout=10)
    return [line for line in result.out.splitlines() if "NVRM" in line]


class GpuWatch:
    """Fault of the GPU with `uuid` since the watch began, or None. Without a GPU (uuid empty) it never finds any."""

    def __init__(self, uuid: str, since: float, before: int = 0) -> None:
        self.uuid = uuid
        self.since = since
        self.bus = ""
        self._skip = before
        self._fault: str | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        if self.uuid:
            threading.Thread(target=self._watch, name="gpu-watch", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def fault(self, look: bool = False) -> str | None:
        """What was found so far; `look`: look once more, but wait no longer than LOOK_S for a slow nvidia-smi."""
        if look and self.uuid and not self._fault:
            looker = threading.Thread(target=self._look, name="gpu-look", daemon=True)
            looker.start()
            looker.join(LOOK_S)
        return self._fault

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        with self._lock:
            known = self._kernel() if self.bus else None  # the quick look first, once it is known whose lines to read
            self._fault = self._fault or known or self._present() or self._kernel()

    def _present(self) -> str | None:
        result = run("nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader", check=False, timeout=8)
        if result.code == 127:
            return None  # no driver at all: preflight's business, and no fault that came up meanwhile
        if result.code == 124:
            return f"nvidia-smi does not answer: GPU {self.uuid} or its driver hangs"
        for line in result.out.splitlines():
            uuid, _, bus = line.partition(",")
            if uuid.strip() == self.uuid:
                self.bus = bus.strip()
                return None
        words = next((line.strip() for line in result.out.splitlines() if "GPU" in line or "NVIDIA" in line), "")
        return f"GPU {self.uuid} is not there any more" + (f": {words}" if words else "")

    def _kernel(self) -> str | None:
        for line in kernel_gpu_lines(self.since)[self._skip :]:
            signature = signatures.match(line)
            if signature and signature.verdict == "host_fault" and self._ours(line):
                return f"{signature.cause}: {line.strip()}"
        return None

    def _ours(self, line: str) -> bool:
        """Whether a kernel line speaks of this GPU; lines without a bus address count for every GPU."""
        found = re.search(r"PCI:([0-9a-fA-F:.]+)", line)
        if not found:
            return True
        return _bus_key(found.group(1)) == _bus_key(self.bus)


def _bus_key(text: str) -> str:
    """`0000:29:00`, `00000000:29:00.0` and `0000:29:00.0` name the same device: bus and device number."""
    parts = text.lower().split(".")[0].split(":")
    return ":".join(parts[-2:])
