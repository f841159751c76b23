"""Whether the Hugging Face hub can be reached, asked once and quickly.

The libraries retry each file for half a minute before they say that there is no network. One connection attempt first
tells it in seconds; what is in the local cache is then used without asking.
"""

from __future__ import annotations

import functools
import socket
import urllib.parse
import urllib.request

from fsdp_tune.errors import FsdpTuneError, usage_error

CONNECT_SECONDS = 5.0


@functools.cache
def hub_is_reachable() -> bool:
    """False under HF_HUB_OFFLINE, or when no connection to the hub (or to the proxy before it) opens within seconds."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    host, port = _first_hop(constants.ENDPOINT)
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def unreachable(what: str, name: str, key: str) -> FsdpTuneError:
    """Exit 2 that says what was wanted and how to do without the network."""
    return usage_error(
        "hub-unreachable",
        f"{what} `{name}` is not in the local cache, and the Hugging Face hub cannot be reached",
        ways_out=(
            f"give a local path: `--set {key}=/path/to/it`",
            f"download it where there is a network (`hf download {name}`), and bring the cache here (HF_HOME)",
            "unset HF_HUB_OFFLINE, if that is what keeps it off",
        ),
    )


def _first_hop(endpoint: str) -> tuple[str, int]:
    url = urllib.parse.urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
