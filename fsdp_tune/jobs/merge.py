"""Merge a sharded checkpoint into a model directory."""

from __future__ import annotations

from pathlib import Path

from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.session import session
from fsdp_tune.merge import merging
from fsdp_tune.merge.merging import MergeOptions, MergeResult


def merge_checkpoint(source: str | Path, options: MergeOptions = MergeOptions(), *, observer: Observer = Observer()) -> MergeResult:
    """Merge the checkpoint that `source` and `options` name into an ordinary Hugging Face model directory, completely or not at all.

    `source` is a run directory, a `checkpoint-N` of any tool, a folder of `.distcp` shards or a PEFT adapter. No code from it is run.
    Raises: FsdpTuneError, with exit code 1 for a damaged source, an output that cannot be written and weights that are not finite.
    """
    with session():
        result = merging.merge_checkpoint(Path(source), options, observer.progress)
        observer.notices(result.notices)
        return result
