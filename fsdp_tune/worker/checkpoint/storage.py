"""Storage of DCP: bytes are hashed while they are written, and metadata is read without running code."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import shutil
import time
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.errors import FsdpTuneError, failed_error
from fsdp_tune.core.tensors.dcp_metadata import METADATA_NAME, DcpMetadata, StoredChunk
from fsdp_tune.core.tensors.dtypes import DTYPES, DType, Shape
from fsdp_tune.core.tensors.plain_pickle import Refused
from fsdp_tune.core.tensors.safetensors_header import header_bytes
from fsdp_tune.core.units import format_bytes
from fsdp_tune.model.internals.torch_internals import STORAGE_INFO
from fsdp_tune.model.shard.local import wraps_others
from fsdp_tune.run.manifest import Digester, FileEntry
from fsdp_tune.worker.checkpoint.exchange import ByteRange, ScatteredFiles

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class HashingStream(io.RawIOBase):
    """A file that is written sequentially through `DISK`, with a running digest. It cannot seek."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = DISK.open(path)
        self._digester = Digester()
        self.refused: OSError | None = None
        """The error of a write. torch.save, which writes from C++, only reports `unexpected pos`."""

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        view = memoryview(data).cast("B")
        try:
            DISK.write(self._file, view)
        except OSError as error:
            self.refused = error
            raise
        self._digester.update(view)
        return view.nbytes

    def tell(self) -> int:
        return self._digester.size_bytes

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        self.flush()  # DCP syncs through the descriptor and does not flush Python's buffer first
        return self._file.fileno()

    def close(self) -> None:
        try:
            if not self._file.closed:
                DISK.fsync(self._file)
        finally:
            # On a full disk Python's flush fails again; the descriptor must be closed regardless.
            try:
                self._file.close()
            finally:
                super().close()

    def entry(self) -> FileEntry:
        return self._digester.entry()


class HashingFileSystem(FileSystem):
    """DCP's file system with digests of the written files; `entries` maps their final names."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, FileEntry] = {}
        self.seconds = 0.0
        """For which files were open to be written."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with open(path, mode) as plain:
                yield cast(io.IOBase, plain)
            return
        started = time.perf_counter()
        stream = HashingStream(Path(path))
        try:
            yield stream
        except Exception:
            if stream.refused is not None:
                raise stream.refused from None
            raise
        finally:
            stream.close()
            self.seconds += time.perf_counter() - started
        self.entries[Path(path).name] = stream.entry()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        DISK.rename(Path(path), Path(new_path))
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


def hashing_writer(directory: Path) -> tuple[FileSystemWriter, HashingFileSystem]:
    """Return a DCP writer for a new directory, with one thread, so that the order of file operations is
    deterministic."""
    writer = FileSystemWriter(
        directory, single_file_per_rank=True, sync_files=False, thread_count=1, overwrite=False
    )
    files = HashingFileSystem()
    writer.fs = files
    return writer, files


class _HereOrFetched(FileSystem):
    """Reads a file of the checkpoint, or what was fetched of it if this machine has none, or a damaged
    one."""

    def __init__(self, usable: Collection[str], fetched: Path) -> None:
        """`usable`: the files of the checkpoint, with their folder, that are as they were written."""
        super().__init__()
        self._usable, self._fetched = usable, fetched

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        here = Path(path)
        with open(
            here if f"{here.parent.name}/{here.name}" in self._usable else self._fetched / here.name, mode
        ) as stream:
            yield cast(io.IOBase, stream)


class RestrictedReader(FileSystemReader):
    """DCP's reader for checkpoints of tensors, which cannot run code.

    DCP unpickles every entry that is not a tensor without restriction (`DefaultLoadPlanner.load_bytes`), even
    if the live state has a tensor of that name, so such entries are refused, as is a `.metadata` with other
    classes.
    """

    def __init__(self, path: Path, scattered: ScatteredFiles | None = None) -> None:
        """`scattered`: where the files are, if each machine has a part of them. Reading is then
        collective."""
        super().__init__(path)
        self._scattered = scattered

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._scattered is None:
            return super().read_data(plan, planner)
        found = [self.storage_data[item.storage_index] for item in plan.items]
        ranges = [ByteRange(str(each.relative_path), each.offset, each.length) for each in found]
        with self._scattered.ranges_of(Path(self.path).name, ranges) as fetched:
            self.fs = _HereOrFetched(self._scattered.here, fetched)
            return super().read_data(plan, planner)

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        path = Path(self.path) / METADATA_NAME
        try:
            found = DcpMetadata(path.read_bytes())
            if others := sorted(name for name in found.entries if not found.is_tensor(name)):
                raise Refused(f"`{others[0]}` is not a tensor in it")
            metadata = Metadata({}, storage_data={}, storage_meta=StorageMeta(load_id=self.load_id))
            for name in found.entries:
                _add_tensor(metadata, name, *found.tensor(name))
        except (OSError, Refused) as error:
            raise failed_error(
                "checkpoint-metadata-refused",
                f"{path}: {error}",
                hint="the file is damaged or was not written by fsdp-tune; resume from another checkpoint",
            ) from error
        return metadata


class BlocksOnHost(DefaultLoadPlanner):
    """DCP's planner, with blocks of fewer bits filled in host memory and then copied to their device.

    Where a smaller part was stored without blocks, DCP copies a plain tensor of the host into blocks, and
    torchao's `copy_` compares its values with a table on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self._on_device: dict[int, torch.Tensor] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor: torch.Tensor = super().resolve_tensor(read_item)
        if not wraps_others(type(tensor)) or tensor.device.type == "cpu":
            return tensor
        self._on_device[id(read_item)] = tensor
        return tensor.to("cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        target = self._on_device.pop(id(read_item), None)
        if target is not None:
            target.copy_(tensor)


def _add_tensor(metadata: Metadata, name: str, dtype: DType, shape: Shape, chunks: list[StoredChunk]) -> None:
    listed = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in chunks]
    properties = TensorProperties(getattr(torch, dtype.name))
    metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(shape), listed)
    for entry, chunk in zip(listed, chunks, strict=True):
        metadata.storage_data[MetadataIndex(name, entry.offsets)] = STORAGE_INFO.get()(
            chunk.file, chunk.start, chunk.length_bytes
        )


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> FileEntry:
    """Write CPU tensors in safetensors format through `DISK`; the library's own writer bypasses Python and
    creates mode 0600."""
    listed = (
        (
            name,
            DTYPES[str(tensor.dtype).removeprefix("torch.")].safetensors,
            tensor.shape,
            tensor.numel() * tensor.element_size(),
        )
        for name, tensor in tensors.items()
    )
    head = header_bytes(listed, metadata)
    stream = HashingStream(path)
    try:
        stream.write(head)
        for tensor in tensors.values():
            if tensor.numel():
                stream.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    finally:
        stream.close()
    return stream.entry()


def write_torch(path: Path, value: object) -> FileEntry:
    """Call `torch.save` on a Python file, so that the bytes are hashed and tests can inject failures."""
    stream = HashingStream(path)
    try:
        torch.save(value, cast(IO[bytes], stream))
    except Exception:
        if stream.refused is not None:
            raise stream.refused from None
        raise
    finally:
        stream.close()
    return stream.entry()


def reason_of(error: BaseException) -> str:
    """Return the system's text of an OSError; class and text of any other error."""
    return (
        error.strerror
        if isinstance(error, OSError) and error.strerror
        else f"{type(error).__name__}: {error}"
    )


def with_free_space(error: FsdpTuneError, folder: Path, needed_bytes: int) -> FsdpTuneError:
    """If the disk is full, add the free space and the size of a checkpoint (0: unknown) to an error."""
    problem = error.problems[0]
    if not any(os.strerror(number) in problem.message for number in (errno.ENOSPC, errno.EDQUOT)):
        return error
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError:
        return error
    takes = f"a checkpoint takes {format_bytes(needed_bytes)}, " if needed_bytes else ""
    message = f"{problem.message}; {takes}{format_bytes(free_bytes)} are free"
    return type(error)(dataclasses.replace(problem, message=message), exit_code=error.exit_code)
