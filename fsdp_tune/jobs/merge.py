"""Merge a sharded checkpoint into a model directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.session import session
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.merge import merging
from fsdp_tune.merge.merging import MergeOptions, MergeResult
from fsdp_tune.run.directory import RunDir


def merge_checkpoint(source: str | Path, options: MergeOptions = MergeOptions(), *, observer: Observer = Observer()) -> MergeResult:
    """Merge the checkpoint that `source` and `options` name into an ordinary Hugging Face model directory, completely or not at all.

    `source` is a run directory, a `checkpoint-N` of any tool, a folder of `.distcp` shards or a PEFT adapter. No code from it is run.
    Of a run with `lora:` its `merge.adapter` decides whether the adapter is written too, into RUN/adapter; the result is then that of
    the merged model.
    Raises: FsdpTuneError, with exit code 1 for a damaged source, an output that cannot be written and weights that are not finite.
    """
    with session():
        first, *second = _outputs(Path(source), options)
        result = _merge(Path(source), options, observer, writes_adapter=first)
        for writes_adapter in second:
            observer.message(f"the adapter is in {result.output}")
            result = _merge(Path(source), options, observer, writes_adapter=writes_adapter)
        return result


def _merge(source: Path, options: MergeOptions, observer: Observer, *, writes_adapter: bool) -> MergeResult:
    result = merging.merge_checkpoint(source, replace(options, adapter=writes_adapter), observer.progress)
    observer.notices(result.notices)
    return result


def _outputs(source: Path, options: MergeOptions) -> tuple[bool, ...]:
    """Return for each output whether it is the adapter alone."""
    run = RunDir(source)
    if options.adapter is not None or options.output is not None or not run.base_json.exists():
        return (bool(options.adapter),)
    return {"merged": (False,), "adapter": (True,), "both": (True, False)}[read_resolved(run).merge.adapter]
