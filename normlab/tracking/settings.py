"""The services of a run, and W&B's mode and login as far as they are known without importing wandb."""

from __future__ import annotations

import netrc
import os
from collections.abc import Sequence
from urllib.parse import urlsplit

from normlab.errors import notify

TENSORBOARD = "tensorboard"
SENDING_MODES = ("auto", "online", "offline")
SILENT_MODES = ("off", "disabled")
_CREDENTIALS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def services_of(wandb: str, also: Sequence[str]) -> list[str]:
    """Return the services of a run: the mode of W&B (auto, online or offline) if it sends, and tensorboard.

    Args:
        wandb: The option `tracking.wandb`.
        also: The option `tracking.also`.
    """
    mode = current_name((wandb == "auto" and os.environ.get("WANDB_MODE")) or wandb)
    if mode not in SENDING_MODES + SILENT_MODES:
        notify(f"WANDB_MODE={mode}: W&B has no such mode, and receives nothing; set online, offline or disabled")
    return [*([mode] if mode in SENDING_MODES else []), *also]


def current_name(mode: str) -> str:
    """Return the name of a mode of W&B, which has older names too."""
    return {"run": "online", "shared": "online", "dryrun": "offline"}.get(mode, mode)


def may_have_login() -> bool:
    """Whether there may be credentials for W&B's server. Only the follower, which imports wandb, knows its address."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    # `wandb login --host` writes the address of another server into the settings.
    folders = [os.path.expanduser(folder), os.path.join(os.environ.get("WANDB_DIR") or ".", "wandb")]
    # `Path.is_file` raises an error for a folder that cannot be searched.
    return has_credentials(host, or_other_host=any(os.path.isfile(os.path.join(each, "settings")) for each in folders))


def has_credentials(host: str, *, or_other_host: bool = False) -> bool:
    """Whether the variables, or the file in which `wandb login` stores keys, have credentials for a host."""
    if any(os.environ.get(name) for name in _CREDENTIALS):
        return True
    try:
        entries = netrc.netrc(os.path.expanduser(os.environ.get("NETRC") or "~/.netrc"))
    except (OSError, netrc.NetrcParseError):
        return False
    hosts = entries.hosts if or_other_host else [host]
    return any((entry := entries.authenticators(each)) and entry[2] for each in hosts)
