"""Merge a sharded checkpoint into a model directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.session import session
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.merge import merging
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import MergeResult
from fsdp_tune.run.directory import RunDir


def merge_checkpoint(source: str | Path, options: MergeOptions = MergeOptions(), *, observer: Observer = Observer()) -> MergeResult:
    """Merge the checkpoint that `source` and `options` name into an ordinary Hugging Face model directory, completely or not at all.

    `source` is a run directory, a `checkpoint-N` of any tool, a folder of `.distcp` shards or a PEFT adapter. No code from it is run.
    Of a run with `lora:` its `merge.adapter` decides whether the adapter is written too, into RUN/adapter; the result is then that of
    the merged model.
    Raises: FsdpTuneError, with exit code 1 for a damaged source, an output that cannot be written and weights that are not finite.
    """
    path = Path(source)
    with session():
        output = _output(path, options)
        if output == "both":
            adapter = _merge(path, replace(options, adapter=True), observer)
            observer.message(f"the adapter is in {adapter.output}")
        return _merge(path, replace(options, adapter=output == "adapter"), observer)


def _merge(source: Path, options: MergeOptions, observer: Observer) -> MergeResult:
    result = merging.merge_checkpoint(source, options, observer.progress)
    observer.notices(result.notices)
    return result


def _output(source: Path, options: MergeOptions) -> Literal["merged", "adapter", "both"]:
    """Return what to write: what `options` name, else `merge.adapter` of the run."""
    if options.adapter is not None:
        return "adapter" if options.adapter else "merged"
    run = RunDir(source)
    if options.output is not None or not run.base_json.exists():
        return "merged"
    return read_resolved(run).merge.adapter
