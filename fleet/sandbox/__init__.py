"""The sandbox: a small fleet of real systemd hosts with simulated GPUs on one Linux machine.

Everything the toolkit does to a production host it can do to a sandbox host, over SSH, so that deployments, failures
and recoveries are tried for real before they touch a GPU server.
"""

from __future__ import annotations

from .errors import SandboxError
from .layout import DEFAULT_HOSTS, DEFAULT_SUBNET, default_state
from .sandbox import HostStatus, Sandbox

__all__ = ["DEFAULT_HOSTS", "DEFAULT_SUBNET", "HostStatus", "Sandbox", "SandboxError", "default_state"]
