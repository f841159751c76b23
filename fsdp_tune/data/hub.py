"""Whether the Hugging Face hub can be reached, asked once and quickly.

The libraries retry each file for half a minute before they say that there is no network. One connection attempt first
tells it in seconds; what is in the local cache is then used without asking.
"""

from __future__ import annotations

import functools
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_tune.errors import FsdpTuneError, usage_error

CONNECT_SECONDS = 5.0
MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt")


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


def unreachable(what: str, name: str, key: str, *, is_data_set: bool = False) -> FsdpTuneError:
    """Exit 2 that says what was wanted and how to do without the network."""
    download = f"hf download {'--repo-type dataset ' if is_data_set else ''}{name}"
    return usage_error(
        "hub-unreachable",
        f"{what} `{name}` is not in the local cache, and the Hugging Face hub cannot be reached",
        ways_out=(
            f"give a local path in `{key}`",
            f"download it where there is a network (`{download}`), and bring the cache here (HF_HOME)",
            "unset HF_HUB_OFFLINE, if that is what keeps it off",
        ),
    )


def _first_hop(endpoint: str) -> tuple[str, int]:
    url = urllib.parse.urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


@contextmanager
def cache_only() -> Iterator[None]:
    """Keeps `datasets` from asking the hub: it has no argument for that, and would retry for half a minute."""
    import datasets.config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def download_model(name: str, revision: str) -> str:
    """Fetches what training reads of a model repository into the local cache; gives the folder. Exit 2 when it cannot."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  its progress bar is untyped
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if not hub_is_reachable():
        raise unreachable("the model", name, "model.name_or_path")
    try:
        return snapshot_download(name, revision=revision, allow_patterns=list(MODEL_FILES))
    except LocalEntryNotFoundError as error:
        raise unreachable("the model", name, "model.name_or_path") from error
    except HfHubHTTPError as error:
        first_line = str(error).strip().splitlines()[0]
        raise usage_error(
            "model-not-found", f"`{name}` cannot be downloaded: {first_line}", hint="`hf auth login`, if it is private or gated"
        ) from error
