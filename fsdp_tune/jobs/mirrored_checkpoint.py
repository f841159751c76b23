"""A checkpoint below a URL, as `checkpoint.mirror` leaves it, on this disk while it is merged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.errors import FailedError, FsdpTuneError, Notice, Where, failed_error, usage_error
from fsdp_tune.core.secrets import mask_text
from fsdp_tune.core.units import format_bytes
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.launch.mirror.fetch import fetch_checkpoint
from fsdp_tune.launch.mirror.remote_run import Listing, RemoteCheckpoint, RemoteRun, mirror_error
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.output_directory import check_target, writing_to
from fsdp_tune.recipe.rules.launch import MIRROR_URL
from fsdp_tune.run.directory import CHECKPOINT_NAME, Checkpoint, RunDir, inspect_checkpoint
from fsdp_tune.run.manifest import FileEntry
from fsdp_tune.run.remote_files import ContentError, UrlError

OPTIMIZER_FILES = ("optimizer_0/", "optimizer.safetensors", "rng_state_")
"""Beginnings of the names of files that a merge does not read: two thirds of a checkpoint."""


@dataclass(frozen=True, slots=True)
class DownloadedCheckpoint:
    path: Path
    url: str


def is_mirror_url(source: str) -> bool:
    return "://" in source


@contextmanager
def downloaded(url: str, options: MergeOptions, observer: Observer) -> Iterator[DownloadedCheckpoint]:
    """Download the weights of a checkpoint next to the output of a merge, and remove them at the end.

    `url`: of a mirrored run, or of its `checkpoint-N`. A download that was interrupted is kept for the next call. Raises: FsdpTuneError,
    with exit code 2 for a URL without such a checkpoint and a store that cannot be used, and 1 for files that are damaged.
    """
    output = _output(url, options)
    try:
        remote, found = _find(url, options, observer)
    except UrlError as error:
        raise mirror_error(mask_text(url), error, Where(mask_text(url))) from error
    found = replace(found, manifest=replace(found.manifest, files=_of_weights(found)))
    folder = output.parent / f".{output.name}.download-{xxhash.xxh3_64(url.rstrip('/').encode()).hexdigest()}"
    run = RunDir(folder / remote.url.rpartition("/")[2])
    _check_space(folder.parent, found)
    try:
        with writing_to(output):
            DISK.mkdir(folder)
            folder.chmod(0o700)  # the recipe of the run is in it
            path = _fetch(remote, found, run, observer)
    except FailedError:  # a full disk
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except UrlError as error:
        raise mirror_error(mask_text(url), error, Where(mask_text(url))) from error
    except ContentError as error:
        shutil.rmtree(folder, ignore_errors=True)
        hint = "merge another checkpoint of the run: `--step N`"
        raise failed_error(
            "merge-incomplete-checkpoint", f"the checkpoint is damaged: {mask_text(str(error))}", where=Where(mask_text(url)), hint=hint
        ) from error
    try:
        yield DownloadedCheckpoint(path, f"{remote.url}/{found.name}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _output(url: str, options: MergeOptions) -> Path:
    """Return the absolute output. Raises: FsdpTuneError for options that do not fit a URL, and an output that cannot be written."""
    if not MIRROR_URL.fullmatch(url) or ".." in url.split("/"):
        message = f"`{mask_text(url)}` is not the URL of a mirrored run or checkpoint at s3, gs, az or file"
        raise usage_error("merge-url", message, hint="for example `s3://bucket/runs/llama7b/checkpoint-500`, or a path of this machine")
    if options.best or options.average is not None or options.allow_incomplete:
        raise usage_error(
            "merge-url",
            "`--best`, `--average` and `--allow-incomplete` choose among the checkpoints of a run on this disk",
            where=Where(mask_text(url)),
            hint="choose one with `--step N`",
        )
    if options.output is None:
        raise usage_error("merge-no-output", "a URL has no default for `--output`", where=Where(mask_text(url)), hint="pass `--output DIR`")
    output = options.output.absolute()
    check_target(output, overwrite=options.overwrite)
    return output


def _find(url: str, options: MergeOptions, observer: Observer) -> tuple[RemoteRun, RemoteCheckpoint]:
    """Return the run and the checkpoint that `url` and `options` name, or else the newest whose manifest is right.

    Raises: FsdpTuneError, UrlError.
    """
    above, _, last = url.rstrip("/").rpartition("/")
    match = CHECKPOINT_NAME.fullmatch(last)
    remote = RemoteRun(*(above if match else url.rstrip("/")).rsplit("/", 1))
    wanted = int(match[1]) if match else options.step
    if match and options.step not in (None, wanted):
        raise usage_error("merge-url", f"`--step {options.step}` is not {last}", where=Where(mask_text(url)), hint="leave `--step` out")
    listing = remote.directory.list()
    steps = remote.complete_steps(listing)
    candidates = steps if wanted is None else [step for step in steps if step == wanted]
    rejected: list[Notice] = []
    for step in candidates:
        found = remote.checkpoint(step)
        if isinstance(found, RemoteCheckpoint):
            observer.notices(rejected)
            return remote, found
        rejected.append(Notice("checkpoint-rejected", f"checkpoint-{step} of the mirror is not used: {found}"))
    if not rejected:
        raise _no_checkpoint(remote, wanted, listing)
    reasons = "; ".join(notice.message for notice in rejected)
    raise failed_error("merge-incomplete-checkpoint", f"no checkpoint can be merged: {reasons}", where=Where(mask_text(url)))


def _no_checkpoint(remote: RemoteRun, step: int | None, listing: Listing) -> FsdpTuneError:
    what = "no complete checkpoint" if step is None else f"no complete checkpoint-{step}"
    steps = ", ".join(f"checkpoint-{each}" for each in remote.complete_steps(listing))
    model = f"{mask_text(remote.url)}/merged is its merged model" if "merged/manifest.json" in listing else None
    hint = f"complete there: {steps}" if steps else model or ("there is nothing at this URL" if not listing else "give the URL of a run")
    return usage_error("merge-url-checkpoint", f"{mask_text(remote.url)} has {what}", hint=hint)


def _of_weights(found: RemoteCheckpoint) -> dict[str, FileEntry]:
    return {name: entry for name, entry in found.manifest.files.items() if not name.startswith(OPTIMIZER_FILES)}


def _check_space(folder: Path, found: RemoteCheckpoint) -> None:
    while not folder.exists():
        folder = folder.parent
    if (free_bytes := shutil.disk_usage(folder).free) < found.size_bytes:
        needed = f"the download needs {format_bytes(found.size_bytes)}, and {format_bytes(free_bytes)} are free"
        raise failed_error("merge-disk-full", needed, where=Where(str(folder)), hint="free space, or give an `--output` on another disk")


def _fetch(remote: RemoteRun, found: RemoteCheckpoint, run: RunDir, observer: Observer) -> Path:
    """Download a checkpoint unless an earlier call has. Returns its directory."""
    path = run.checkpoint(found.step)
    if run.is_used and isinstance(inspect_checkpoint(path, digests=True), Checkpoint):
        return path
    observer.message(f"downloading the weights of {found.name} ({format_bytes(found.size_bytes)}) from {mask_text(remote.url)}")
    with observer.progress("downloading", found.size_bytes, "bytes") as bar:
        return fetch_checkpoint(remote, found, run, bar.advance)
