"""What is sent of a run: its small files, and the errors for files that are not what was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdp_tune.cluster.mirror.remote_run import RUN_FILES
from fsdp_tune.core.errors import FailedError
from fsdp_tune.core.files import read_regular
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.manifest import MANIFEST_NAME, list_files
from fsdp_tune.run.metrics_file import METRICS_BYTES
from fsdp_tune.run.remote_requests import ContentError
from fsdp_tune.run.written_files import model_files


@contextmanager
def as_content_errors(folder: str) -> Iterator[None]:
    """Raise ContentError for files that are not what was written."""
    try:
        yield
    except FailedError as error:
        names = [f"{Path(str(each.where.source)).name}: {each.message}" for each in error.problems]
        raise ContentError(
            f"{folder}/{names[0]}" + (f" (and {len(names) - 1} more)" if names[1:] else "")
        ) from error


def read_run_files(run: RunDir) -> tuple[dict[str, bytes], set[str]]:
    """Return the small files of a run, and which only their owner may read. Lines of metrics.jsonl that are
    being written are left out."""
    contents: dict[str, bytes] = {}
    private: set[str] = set()
    names = [*RUN_FILES, *(f"model/{name}" for name in [*list_files(model_files(run)), MANIFEST_NAME])]
    for name in names:
        with suppress(FileNotFoundError):
            data = read_regular(run.path / name, most_bytes=METRICS_BYTES)
            if not (run.path / name).stat().st_mode & 0o077:
                private.add(name)
            contents[name] = data[: data.rfind(b"\n") + 1] if name.endswith(".jsonl") else data
    return contents, private
