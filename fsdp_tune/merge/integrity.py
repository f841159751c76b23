"""Check the output as an external reader parses it: headers, index, names, shapes, and (`full`) the bytes on
the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import xxhash

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error
from fsdp_tune.merge.copy.gather import BUFFER_BYTES
from fsdp_tune.merge.copy.layout import Layout
from fsdp_tune.merge.read.reader import SourceFiles
from fsdp_tune.merge.read.safetensors_files import read_header, read_index
from fsdp_tune.merge.weight_formats import INDEX_NAME


def check_headers(stage: Path, layout: Layout) -> None:
    """Raises: FailedError unless files and index hold exactly the planned tensors, with their dtypes and
    shapes."""
    with SourceFiles(stage) as files:
        wanted = layout.tensors
        found: dict[str, str] = {}
        for file in layout.files:
            for entry in read_header(files, file.name):
                placed = wanted.get(entry.name)
                if placed is None or entry.name in found:
                    raise _output_differs(
                        stage / file.name, f"it holds `{entry.name}`, which the model does not have there"
                    )
                if (entry.dtype, entry.shape, entry.first_byte) != (
                    placed.dtype.safetensors,
                    placed.shape,
                    placed.first_byte,
                ):
                    raise _output_differs(
                        stage / file.name,
                        f"`{entry.name}` is {entry.dtype} {list(entry.shape)} instead of "
                        f"{placed.dtype.safetensors} {list(placed.shape)}",
                    )
                found[entry.name] = file.name
        if missing := sorted(wanted.keys() - found.keys()):
            raise _output_differs(stage, f"`{missing[0]}` is missing ({len(missing)} in all)")
        if layout.index is not None and read_index(files) != found:
            raise _output_differs(stage / INDEX_NAME, "it and the files disagree")


def check_bytes_on_disk(
    stage: Path, layout: Layout, digests: Mapping[str, str], advance: Callable[[int], None]
) -> None:
    """Re-read every tensor, past the page cache where the system allows it, and compare its digest."""
    for file in layout.files:
        with open(stage / file.name, "rb", buffering=0) as handle:
            os.fsync(handle.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            buffer = memoryview(bytearray(BUFFER_BYTES))
            for placed in file.tensors:
                handle.seek(placed.first_byte)
                digest, left = xxhash.xxh3_128(), placed.size_bytes
                while left and (got := handle.readinto(buffer[: min(left, BUFFER_BYTES)])):
                    digest.update(buffer[:got])
                    left -= got
                    advance(got)
                if left or digest.hexdigest() != digests[placed.name]:
                    raise _output_differs(
                        stage / file.name,
                        f"`{placed.name}` reads back from the disk otherwise than it was written",
                    )


def _output_differs(path: Path, why: str) -> FsdpTuneError:
    return failed_error(
        "merge-verify",
        f"the output is not what was planned: {why}",
        where=Where(str(path)),
        hint="merge again, to another disk; nothing was published",
    )
