"""Runs another module with `--api-key KEY` added, the key read from a file: `... keyed FILE MODULE ARGUMENTS...`

For engines that take their key only as an argument. The process's command line, which every user of the host can
read, never holds it; only the module's own `sys.argv` does.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    key_file, module, *arguments = sys.argv[1:]
    key = Path(key_file).read_text(encoding="ascii").strip()
    sys.argv = [module, *arguments, "--api-key", key]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
