"""What is made of runs: a merged model directory, its upload to the hub, and a report about one or several
runs from their files alone.

A checkpoint below a URL, as `checkpoint.mirror` leaves it, is on this disk while it is merged.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from fsdp_tune.cluster.mirror.download import fetch_checkpoint
from fsdp_tune.cluster.mirror.remote_run import Listing, RemoteCheckpoint, RemoteRun, mirror_error
from fsdp_tune.core.atomic import DISK, check_output_file, json_safe, write_file
from fsdp_tune.core.errors import FailedError, FsdpTuneError, Notice, Where, failed_error, usage_error
from fsdp_tune.core.secrets import mask_text
from fsdp_tune.core.units import format_bytes
from fsdp_tune.jobs.answers import ReportAnswer, RunFigures
from fsdp_tune.jobs.observer import Observer, session
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.merge import merging
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import MergeResult
from fsdp_tune.merge.output_directory import check_target, writing_to
from fsdp_tune.merge.publish import HubTarget, Pushed, upload
from fsdp_tune.merge.quantised import is_quantised_model, quantise_merged
from fsdp_tune.merge.source import newer_checkpoint
from fsdp_tune.recipe.rules.launch import MIRROR_URL
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.directory import CHECKPOINT_NAME, MERGE_RECORD, Checkpoint, RunDir, inspect_checkpoint
from fsdp_tune.run.find_runs import existing_run
from fsdp_tune.run.manifest import FileEntry
from fsdp_tune.run.remote_requests import ContentError, UrlError

if TYPE_CHECKING:
    from fsdp_tune.pages.report_page import Differences
    from fsdp_tune.pages.run_record import RunReader, RunRecord

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

    `url`: of a mirrored run, or of its `checkpoint-N`. A download that was interrupted is kept for the next
    call. Raises: FsdpTuneError, with exit code 2 for a URL without such a checkpoint and a store that cannot
    be used, and 1 for files that are damaged.
    """
    output = _output_of_mirrored(url, options)
    try:
        remote, found = _find(url, options, observer)
    except UrlError as error:
        raise mirror_error(mask_text(url), error, Where(mask_text(url))) from error
    found = replace(found, manifest=replace(found.manifest, files=_of_weights(found)))
    folder = output.parent / f".{output.name}.download-{xxhash.xxh3_64(url.rstrip('/').encode()).hexdigest()}"
    run = RunDir(folder / remote.url.rpartition("/")[2])
    _check_space(folder, found)
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
            "merge-incomplete-checkpoint",
            f"the checkpoint is damaged: {mask_text(str(error))}",
            where=Where(mask_text(url)),
            hint=hint,
        ) from error
    try:
        yield DownloadedCheckpoint(path, f"{remote.url}/{found.name}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _output_of_mirrored(url: str, options: MergeOptions) -> Path:
    """Return the absolute output. Raises: FsdpTuneError for options that do not fit a URL, and an output that
    cannot be written."""
    if not MIRROR_URL.fullmatch(url) or ".." in url.split("/"):
        message = f"`{mask_text(url)}` is not the URL of a mirrored run or checkpoint at s3, gs, az or file"
        raise usage_error(
            "merge-url",
            message,
            hint="for example `s3://bucket/runs/llama7b/checkpoint-500`, or a path of this machine",
        )
    if options.best or options.average is not None or options.allow_incomplete:
        raise usage_error(
            "merge-url",
            "`--best`, `--average` and `--allow-incomplete` choose among the checkpoints of a run on "
            "this disk",
            where=Where(mask_text(url)),
            hint="choose one with `--step N`",
        )
    if options.output is None:
        raise usage_error(
            "merge-no-output",
            "a URL has no default for `--output`",
            where=Where(mask_text(url)),
            hint="pass `--output DIR`",
        )
    output = options.output.absolute()
    check_target(output, overwrite=options.overwrite)
    return output


def _find(url: str, options: MergeOptions, observer: Observer) -> tuple[RemoteRun, RemoteCheckpoint]:
    """Return the run and the checkpoint that `url` and `options` name, or else the newest whose manifest is
    right.

    Raises: FsdpTuneError, UrlError.
    """
    above, _, last = url.rstrip("/").rpartition("/")
    match = CHECKPOINT_NAME.fullmatch(last)
    remote = RemoteRun(*(above if match else url.rstrip("/")).rsplit("/", 1))
    wanted = int(match[1]) if match else options.step
    if match and options.step not in (None, wanted):
        raise usage_error(
            "merge-url",
            f"`--step {options.step}` is not {last}",
            where=Where(mask_text(url)),
            hint="leave `--step` out",
        )
    listing = remote.directory.list()
    steps = remote.complete_steps(listing)
    candidates = steps if wanted is None else [step for step in steps if step == wanted]
    rejected: list[Notice] = []
    for step in candidates:
        found = remote.checkpoint(step)
        if isinstance(found, RemoteCheckpoint):
            observer.notices(rejected)
            return remote, found
        rejected.append(
            Notice("checkpoint-rejected", f"checkpoint-{step} of the mirror is not used: {found}")
        )
    if not rejected:
        raise _no_checkpoint(remote, wanted, listing)
    reasons = "; ".join(notice.message for notice in rejected[:3]) + (
        f"; and {len(rejected) - 3} more" if len(rejected) > 3 else ""
    )
    raise failed_error(
        "merge-incomplete-checkpoint",
        f"no checkpoint can be merged: {reasons}",
        where=Where(mask_text(url)),
        hint="merge the run on its own disk, or another mirror",
    )


def _no_checkpoint(remote: RemoteRun, step: int | None, listing: Listing) -> FsdpTuneError:
    what = "no complete checkpoint" if step is None else f"no complete checkpoint-{step}"
    steps = ", ".join(f"checkpoint-{each}" for each in remote.complete_steps(listing))
    model = (
        f"{mask_text(remote.url)}/merged is its merged model" if "merged/manifest.json" in listing else None
    )
    hint = (
        f"complete there: {steps}"
        if steps
        else model or ("there is nothing at this URL" if not listing else "give the URL of a run")
    )
    return usage_error("merge-url-checkpoint", f"{mask_text(remote.url)} has {what}", hint=hint)


def _of_weights(found: RemoteCheckpoint) -> dict[str, FileEntry]:
    return {
        name: entry for name, entry in found.manifest.files.items() if not name.startswith(OPTIMIZER_FILES)
    }


def _check_space(folder: Path, found: RemoteCheckpoint) -> None:
    """Raises: FailedError if what an earlier call has not downloaded into the folder does not fit."""
    kept_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    left_bytes = found.size_bytes - kept_bytes
    while not folder.exists():
        folder = folder.parent
    if (free_bytes := shutil.disk_usage(folder).free) < left_bytes:
        needed = f"the download needs {format_bytes(left_bytes)}, and {format_bytes(free_bytes)} are free"
        raise failed_error(
            "merge-disk-full",
            needed,
            where=Where(str(folder)),
            hint="free space, or give an `--output` on another disk",
        )


def _fetch(remote: RemoteRun, found: RemoteCheckpoint, run: RunDir, observer: Observer) -> Path:
    """Download a checkpoint unless an earlier call has. Returns its directory."""
    path = run.checkpoint(found.step)
    if run.is_used and isinstance(inspect_checkpoint(path, digests=True), Checkpoint):
        return path
    observer.message(
        f"downloading the weights of {found.name} ({format_bytes(found.size_bytes)}) from "
        f"{mask_text(remote.url)}"
    )
    with observer.progress("downloading", found.size_bytes, "bytes") as bar:
        return fetch_checkpoint(remote, found, run, bar.advance)


def merge_checkpoint(
    source: str | Path, options: MergeOptions = MergeOptions(), *, observer: Observer = Observer()
) -> MergeResult:
    """Merge the checkpoint that `source` and `options` name into an ordinary Hugging Face model directory,
    completely or not at all.

    `source` is a run directory, a `checkpoint-N` of any tool, a folder of `.distcp` shards or a PEFT adapter,
    or the URL of a run or checkpoint in a mirror (`checkpoint.mirror`), which needs `options.output`. No code
    from it is run. Of a run with `lora:` its `merge.adapter` decides whether the adapter is written too, into
    RUN/adapter; the result is then that of the merged model.
    Raises: FsdpTuneError, with exit code 1 for a damaged source, an output that cannot be written and weights
    that are not finite.
    """
    with session():
        if isinstance(source, str) and is_mirror_url(source):
            with downloaded(source, options, observer) as fetched:
                return _merge(fetched.path, options, observer, origin=fetched.url)
        path = Path(source)
        output = _output(path, options)
        if output == "both":
            adapter = _merge(path, replace(options, adapter=True), observer)
            observer.message(f"the adapter is in {adapter.output}")
        return _merge(path, replace(options, adapter=output == "adapter"), observer)


def _merge(
    source: Path, options: MergeOptions, observer: Observer, *, origin: str | None = None
) -> MergeResult:
    observer.phase("merging")
    result = merging.merge_checkpoint(source, options, observer.progress, origin=origin)
    observer.notices(result.notices)
    if result.to_quantise is None:
        return result
    observer.phase("quantising")
    quantised = quantise_merged(result.output, *result.to_quantise)
    size = format_bytes(quantised.size_bytes)
    observer.message(
        f"the quantised model is in {quantised.path} ({size}); its logits differ by "
        f"{quantised.difference:.1e} of their norm"
    )
    return replace(result, quantised=quantised)


def outputs_at_end(run: RunDir, recipe: Recipe) -> list[Path]:
    """Return the directories that the merge at the end of a run writes; the last one is its model."""
    if recipe.lora is None or recipe.merge.adapter == "merged":
        return [run.merged]
    return [run.adapter] if recipe.merge.adapter == "adapter" else [run.adapter, run.merged]


def missing_outputs(run: RunDir, recipe: Recipe) -> list[Path]:
    """Return those that are not there; without its quantised model, a merged one is missing too."""
    lacks_quantised = recipe.ships_quantised and not is_quantised_model(run.merged_quantised)
    return [
        each
        for each in outputs_at_end(run, recipe)
        if not each.is_dir() or (each == run.merged and lacks_quantised)
    ]


def _output(source: Path, options: MergeOptions) -> Literal["merged", "adapter", "both"]:
    """Return what to write: what `options` name, else `merge.adapter` of the run."""
    if options.adapter is not None:
        return "adapter" if options.adapter else "merged"
    run = RunDir(source)
    if options.output is not None or not run.base_json.exists():
        return "merged"
    return read_resolved(run).merge.adapter


def push(
    source: str | Path,
    *,
    to: str | None = None,
    public: bool | None = None,
    revision: str | None = None,
    adapter: bool = False,
    observer: Observer = Observer(),
) -> Pushed:
    """Upload the merged model of a run (`adapter`: its adapter), or the output of a merge.

    What is not given is that of the run's recipe (`training.hub_model_id`, `hub_private_repo`,
    `hub_revision`), else the name of the run, private, on main.
    Raises: FsdpTuneError, with exit code 1 if the hub does not take it.
    """
    path = Path(source)
    with session():
        run = RunDir(path)
        recipe = read_resolved(run) if run.is_used else None
        folder = _folder(path, run if recipe is not None else None, adapter=adapter)
        if recipe is not None:
            observer.notices(newer_checkpoint(run, folder))
        target = target_of(recipe) if recipe is not None else None
        name = to or (target.repository if target is not None else None)
        if name is None:
            raise usage_error(
                "push-name", f"`{path}` is not a run, so its repository must be named", hint="--to OWNER/NAME"
            )
        chosen = HubTarget(
            name,
            is_public=public if public is not None else bool(target and target.is_public),
            revision=revision or (target.revision if target is not None else None),
        )
        observer.phase("uploading")
        words = [
            *(["--to", to] if to else []),
            *([] if public is None else ["--public" if public else "--private"]),
            *(["--revision", revision] if revision else []),
            *(["--adapter"] if adapter else []),
        ]
        pushed = upload(folder, chosen, shlex.join(["fsdp-tune", "push", str(path), *words]))
        observer.notices(pushed.notices)
        return pushed


def target_of(recipe: Recipe) -> HubTarget:
    """Return where a recipe pushes its model."""
    training = recipe.training
    return HubTarget(
        str(training_value(training, "hub_model_id") or recipe.name),
        is_public=training_value(training, "hub_private_repo") is False,
        revision=training_value(training, "hub_revision"),
    )


def _folder(path: Path, run: RunDir | None, *, adapter: bool) -> Path:
    """Return the directory to upload. Raises: usage error if there is none."""
    if run is None:
        if not (path / MERGE_RECORD).is_file():
            message = (
                "it is neither a run nor the output of a merge" if path.exists() else "it does not exist"
            )
            raise usage_error(
                "push-not-merged",
                message,
                where=Where(str(path)),
                hint="give a run, or a directory that `merge-checkpoint` wrote",
            )
        if adapter:
            message = "`--adapter` chooses what a run has, and this is the output of a merge"
            raise usage_error(
                "usage",
                message,
                where=Where(str(path)),
                hint="leave it out: such a directory is uploaded as it is",
            )
        return path
    folder = run.adapter if adapter else run.merged
    if not (folder / MERGE_RECORD).is_file():
        how = f"fsdp-tune merge-checkpoint {'--adapter ' if adapter else ''}{shlex.quote(str(path))}"
        message = f"the run has no {'exported adapter' if adapter else 'merged model'} yet"
        raise usage_error("push-not-merged", message, where=Where(str(folder)), hint=f"`{how}`")
    return folder


@dataclass(frozen=True, slots=True)
class RunReport:
    """What is known about the runs when they are read."""

    runs: list[RunRecord]
    differences: Differences
    """Of recipes and environments; empty for a single run."""
    html: str
    """The page: a complete document below a megabyte, which needs no network."""
    page: Path | None = None
    """Where the page was written."""

    def as_dict(self) -> dict[str, Any]:
        """Return the document of `report --json`."""
        return ReportAnswer(
            page=str(self.page) if self.page is not None else None,
            runs=[RunFigures(**json_safe(run.summary())) for run in self.runs],
            recipe_differences=self.differences.recipe,
            environment_differences=self.differences.environment,
        ).as_dict()


def report(runs: Sequence[Path | str], *, output: Path | str | None = None) -> RunReport:
    """Read run directories, also of runs that are training, and compare them; with `output`, write the page
    there, replacing it.

    The umask decides who may read the page, so that it can be shared: secrets in recipes and commands are
    masked in it. No run is changed.
    Raises: FsdpTuneError `not-a-run`, and `run-unreadable` for files that are damaged or of a newer version.
    """
    page = Path(output) if output is not None else None
    if page is not None:
        check_output_file(page, replaces=True)
    found = _report([reader.read() for reader in _readers(runs)], page)
    if page is not None:
        write_file(page, found.html)
    return found


def _report(records: list[RunRecord], page: Path | None = None) -> RunReport:
    from fsdp_tune.pages.report_page import differences_of, report_page

    return RunReport(records, differences_of(records), report_page(records, _now()), page)


def follow_report(
    runs: Sequence[Path | str],
    *,
    port: int = 0,
    serving: Callable[[RunReport, str], None],
    ended: Callable[[Path, str, bool], None] | None = None,
) -> None:
    """Serve the page of `report` on this machine until the process is interrupted; in a browser it shows what
    the runs write, as they do.

    `serving` gets the runs as they are, and the URL, which contains a secret. `ended` gets the directory of
    each run that no process works on any more, how it ended, and whether no other is left; the page is served
    on. `port` 0 is a free one. No file is written.
    Raises: FsdpTuneError as `report` does, and `port-not-free`.
    """
    from fsdp_tune.launch.run_status import run_status
    from fsdp_tune.pages.report_page import LivePage, report_page

    readers = _readers(runs)  # each keeps what it has read of metrics.jsonl
    # before the port is taken, so that a mistake is reported at once
    first = _report([reader.read() for reader in readers])
    watched = [each.run for each in first.runs]

    def watch() -> None:
        for run in list(watched):
            try:
                now = run_status(run)
            except (FsdpTuneError, OSError):  # the page says that it cannot be read
                continue
            if now.has_ended:
                watched.remove(run)
                if ended is not None:
                    ended(run.path, now.state, not watched)

    page = LivePage(
        lambda: report_page([reader.read() for reader in readers], _now(), is_live=True),
        port=port,
        watch=watch,
    )
    serving(first, page.url)
    page.run()


def _readers(runs: Sequence[Path | str]) -> list[RunReader]:
    from fsdp_tune.pages.run_record import RunReader, labels_of

    found = list(dict.fromkeys(existing_run(Path(run)) for run in runs))
    return [
        RunReader(run, label)
        for run, label in zip(found, labels_of([run.path for run in found]), strict=True)
    ]


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime())
