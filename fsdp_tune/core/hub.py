"""The Hugging Face hub: check once whether it is reachable, and convert its errors to problems.

Without a network, the libraries retry each file for half a minute. A single connection attempt detects that
in seconds; files in the local cache are then used without a query.
"""

from __future__ import annotations

import functools
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fsdp_tune.core.errors import NOWHERE, FsdpTuneError, Where, usage_error
from fsdp_tune.core.library_errors import first_line
from fsdp_tune.core.tensors.weight_files import UnusableIndexError, list_directory

CONNECT_SECONDS = 5.0
SAFETENSORS, PICKLED_WEIGHTS = (
    ("*.safetensors", "*.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
)
COMPANION_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
MODEL_FILES = (*SAFETENSORS, *COMPANION_FILES)
LOGIN = "`hf auth login`"
# Names of exceptions of huggingface_hub, of the HTTP clients of its versions, and of `requests`.
AWAY = {
    "LocalEntryNotFoundError",
    "IncompleteSnapshotError",
    "OfflineModeIsEnabled",
    "ConnectError",
    "ConnectTimeout",
    "ConnectionError",
    "ProxyError",
}
BROKEN_OFF = {"RemoteProtocolError", "ReadTimeout", "ReadError"}
NO_SUCH_FILE = {"EntryNotFoundError", "RemoteEntryNotFoundError"}


@functools.cache
def hub_is_reachable() -> bool:
    """Return False under HF_HUB_OFFLINE, or if no connection to the hub (or its proxy) opens within
    CONNECT_SECONDS."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    host, port = _first_hop(constants.ENDPOINT)
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def unreachable(
    what: str, name: str, key: str, *, is_data_set: bool = False, where: Where = NOWHERE
) -> FsdpTuneError:
    """Return a usage error (exit 2) that names the missing resource and the offline alternatives."""
    from huggingface_hub import constants

    download = f"hf download {'--repo-type dataset ' if is_data_set else ''}{name}"
    offline = constants.HF_HUB_OFFLINE
    why = (
        "HF_HUB_OFFLINE keeps this command off the Hugging Face hub"
        if offline
        else "the Hugging Face hub cannot be reached"
    )
    return usage_error(
        "hub-unreachable",
        f"{what} `{name}` is not in the local cache, and {why}",
        where=where,
        ways_out=(
            f"give a local path in `{key}`",
            f"download it on a machine with network access (`{download}`), and copy the cache here (HF_HOME)",
            *(["unset HF_HUB_OFFLINE, if there is a network"] if offline else []),
        ),
    )


@dataclass(frozen=True, slots=True)
class HubResource:
    """A resource on the hub, with the parts of its error messages."""

    what: str
    """A noun: `model`, `tokenizer`, `chat template of`."""
    name: str
    """ORG/NAME."""
    key: str
    """The recipe key or option that sets another name or a local path."""
    not_found: str
    """Code of the problem if the repository does not exist."""
    where: Where = NOWHERE
    or_else: str = ""
    """Alternative values of `key`, for the hint."""

    def unreachable(self) -> FsdpTuneError:
        return unreachable(f"the {self.what}", self.name, self.key, where=self.where)

    def problem(self, error: BaseException) -> FsdpTuneError | None:
        """Return a usage error for an error of the hub or the network; None if `error` has another cause."""
        causes = causes_of(error)
        kinds = {type(cause).__name__ for cause in causes}
        responses = [getattr(cause, "response", None) for cause in causes]
        status = next((int(response.status_code) for response in responses if response is not None), None)
        name, where = f"`{self.name}`", self.where
        if kinds & BROKEN_OFF or (status is not None and (status == 429 or status >= 500)):
            how = (
                f"the hub responds with {status} repeatedly"
                if status is not None
                else "the connection to the hub breaks off repeatedly"
            )
            return usage_error(
                "hub-busy", f"{name}: {how}", hint="try again later, or give a local path", where=where
            )
        if "GatedRepoError" in kinds:
            hint = f"request access on {self._page()}, then {LOGIN}"
            return usage_error(
                "gated", f"{name} is gated: your account has no access", hint=hint, where=where
            )
        if "HFValidationError" in kinds:
            message = (
                f"{name} does not exist on this disk, and is not a valid name of a repository on the hub "
                "(ORG/NAME)"
            )
            return usage_error(
                self.not_found, message, hint=f"correct `{self.key}`{self.or_else}", where=where
            )
        if "RevisionNotFoundError" in kinds:
            hint = f"set a branch, a tag or a full commit of {self._page()}"
            return usage_error(
                self.not_found, f"{name} on the hub has no such revision", hint=hint, where=where
            )
        if "RepositoryNotFoundError" in kinds:
            message = f"{name} is neither on this disk nor accessible to your account on the hub"
            hint = f"correct `{self.key}`{self.or_else}, or log in with {LOGIN} if it is private"
            return usage_error(self.not_found, message, hint=hint, where=where)
        if status in (401, 403):
            hint = f"{LOGIN} with a token that may read it, or unset HF_TOKEN if the repository is public"
            message = f"{name}: the hub responds with {status}: this account or token has no access"
            return usage_error("hub-refused", message, hint=hint, where=where)
        if status is not None and status >= 400 and not kinds & NO_SUCH_FILE:
            hint = f"check {self._page()}, or give a local path"
            return usage_error("hub-refused", f"{name}: {first_line(error)}", hint=hint, where=where)
        return self.unreachable() if kinds & AWAY else None

    def _page(self) -> str:
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.name}"


def causes_of(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def snapshot(wanted: HubResource, files: Sequence[str], *, revision: str | None = None) -> Path:
    """Return the local directory of a repository's `files`, downloaded if the hub is reachable. Raises: usage
    error (exit 2)."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  its progress bar is untyped

    try:
        return Path(
            snapshot_download(
                wanted.name,
                revision=revision,
                allow_patterns=list(files),
                local_files_only=not hub_is_reachable(),
            )
        )
    except Exception as error:
        if (problem := wanted.problem(error)) is None:
            raise
        raise problem from error


def model_snapshot(wanted: HubResource, files: Sequence[str], *, revision: str | None = None) -> Path:
    """Return the local directory of a model with `files` and its weights: safetensors, or files of
    `torch.save` if it has no others.

    They are downloaded if the hub is reachable. Raises: usage error (exit 2), also for an unusable index.
    """
    folder = snapshot(wanted, (*files, *SAFETENSORS), revision=revision)
    try:
        listed = list_directory(folder)
    except UnusableIndexError as error:
        message, hint = f"`{wanted.name}`: {error}", "name another revision, or give a local path"
        raise usage_error("hub-refused", message, hint=hint, where=Where(str(folder / error.file))) from error
    if listed is not None and not listed.is_pickled:
        return folder
    return snapshot(wanted, (*files, *PICKLED_WEIGHTS), revision=revision)


def download_model(name: str, revision: str) -> Path:
    """Return the local directory of the files of a model repository that training reads."""
    return model_snapshot(
        HubResource("model", name, "model.name_or_path", "model-not-found"),
        COMPANION_FILES,
        revision=revision,
    )


def cached_model_file(name: str, revision: str, file: str) -> Path | None:
    """Return a file of a model repository in the local cache, in the directory of its commit; None if it is
    not cached."""
    from huggingface_hub import constants

    repository = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    try:
        commit = (repository / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        commit = revision
    path = repository / "snapshots" / commit / file
    return path if path.is_file() else None


def _first_hop(endpoint: str) -> tuple[str, int]:
    url = urllib.parse.urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


@contextmanager
def cache_only() -> Iterator[None]:
    """Prevent `datasets` from querying the hub, for which it has no argument and would retry for half a
    minute."""
    import datasets.config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def resolves_inside(path: Path, folder: Path) -> bool:
    """Return whether `path`, with all its links followed, is in `folder` or is a file of the hub's cache,
    whose snapshots are links."""
    from huggingface_hub import constants

    target = path.resolve()
    if target.is_relative_to(folder.resolve()):
        return True
    cache = Path(constants.HF_HUB_CACHE).resolve()
    return (target.is_relative_to(cache) and target.parent.name == "blobs") or target.parent == _blobs(folder)


def _blobs(snapshot: Path) -> Path | None:
    """Return the store of a snapshot in a cache at another place:
    `…/models--ORG--NAME/{snapshots/COMMIT,blobs}`."""
    store = snapshot.resolve().parent
    return (
        store.parent / "blobs"
        if store.name == "snapshots" and store.parent.name.startswith("models--")
        else None
    )
