"""Where the Ansible content lies: the checkout when running from one, else the copy inside the installed package."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


class ContentMissing(RuntimeError):
    """Neither a checkout nor a complete installation: nothing could be deployed from here."""


def in_checkout() -> bool:
    root = PACKAGE.parent
    return (root / "pyproject.toml").is_file() and (root / "deploy.yml").is_file() and (root / "playbooks").is_dir()


def root() -> Path:
    """The folder that holds deploy.yml, playbooks/, roles/, plugins/, stacks/ and templates/."""
    if in_checkout():
        return PACKAGE.parent
    packaged = PACKAGE / "_content"
    if (packaged / "deploy.yml").is_file():
        return packaged
    raise ContentMissing(
        f"the Ansible content is neither beside {PACKAGE} nor in {packaged}: install the ddtree-fleet wheel again, "
        "or run from a complete checkout"
    )


def config() -> Path:
    return root() / "ansible.cfg"


def playbook(name: str) -> Path:
    path = root() / "playbooks" / f"{name}.yml"
    if not path.is_file():
        raise ContentMissing(f"{path} does not exist: this installation is incomplete")
    return path


def default_inventory() -> Path:
    """The inventory that ansible.cfg names: the sandbox fleet, where one has been made."""
    return root() / "inventory" / "sandbox" / "hosts.yml"


def host_code() -> Path:
    return root() / "plugins" / "module_utils"


def add_host_code() -> Path:
    """Make the hosts' own code importable here as `ddtree`, so that both sides run the same functions."""
    path = host_code()
    if str(path) not in sys.path:
        sys.path.append(str(path))
    return path


def state_home() -> Path:
    """Where this user's runs are kept."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "ddtree-fleet"


def version() -> str:
    try:
        return importlib.metadata.version("ddtree-fleet")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
