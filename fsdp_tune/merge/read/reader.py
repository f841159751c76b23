"""What a source of tensors is: named tensors made of chunks, the location of each chunk's elements, and
positional reads of them.

Reads are exact and bounded, through descriptors that all threads share. The model's entries of a checkpoint
are selected and mapped to its parameter names; docs/guide/merging.md has the table.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error
from fsdp_tune.core.files import is_inside, open_descriptor
from fsdp_tune.core.tensors.dtypes import DType, Extent, Shape
from fsdp_tune.core.tensors.plain_pickle import Refused
from fsdp_tune.core.tensors.quantised_weight import Encoded

NAMES_SHOWN = 5
"""Of many tensors or folders, in a message."""
# Inserted into names by FSDP1, activation checkpointing and torch.compile; models never use them.
WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
_OF_PEFT = re.compile(r"\.(lora_|modules_to_save\.|token_adapter\.)")
MODEL_ROOTS = ("model", "state_dict", "module", "model_state_dict")
OPTIMIZER_ROOTS = frozenset(
    {
        f"{name}{end}"
        for name in ("optimizer", "optim", "opt")
        for end in ("", "s", "_state", "_states", "_state_dict")
    }
    - {"opt", "opts"}
)
_OPTIMIZER_VALUES = frozenset(
    {
        *(
            "exp_avg",
            "exp_avg_sq",
            "max_exp_avg_sq",
            "exp_avg_sq_row",
            "exp_avg_sq_col",
            "exp_avg_diff",
            "exp_inf",
            "momentum_buffer",
        ),
        *("square_avg", "grad_avg", "acc_delta", "master_param", "param_groups"),
    }
)
"""The last parts of names in the state of torch's and common optimizers; no model has them."""
# torchtitan, torchtune and most loops save these next to a model at the top level.
OTHER_ROOTS = OPTIMIZER_ROOTS | frozenset(
    {
        "lr_scheduler",
        "scheduler",
        "dataloader",
        "train_state",
        "extra_state",
        "rng",
        "rng_state",
        "step",
    }
)


def optimizer_state(names: Sequence[str]) -> frozenset[str]:
    """Return the names that are an optimizer's: under its key, or values of its state with what is next to
    them (`step`)."""
    parts = {name: name.split(".") for name in names}
    parents = {tuple(split[:-1]) for split in parts.values() if split[-1] in _OPTIMIZER_VALUES}
    return frozenset(
        name
        for name, split in parts.items()
        if OPTIMIZER_ROOTS.intersection(split[:-1])
        or "param_groups" in split
        or (len(split) > 1 and tuple(split[:-1]) in parents)
    )


def model_names(keys: Sequence[str], planner_data: object, directory: str) -> dict[str, str]:
    """{key of the checkpoint: the model's name}, in the order of the keys. Refused when two keys get one
    name.

    `planner_data` is what DCP's default planner leaves: {key: path through the nested dictionaries that were
    saved}.
    """
    paths = _paths(keys, planner_data, directory)
    roots = {root for path in paths.values() if (root := _model_root(path))}
    if len(roots) > 1:
        raise Refused(f"it holds several models: {', '.join(sorted('.'.join(root) for root in roots))}")
    if roots:
        (root,) = roots
        chosen = {key: path[len(root) :] for key, path in paths.items() if path[: len(root)] == root}
    else:
        chosen = {key: path for key, path in paths.items() if path[0] not in OTHER_ROOTS}
    names = {key: _unwrapped(".".join(path)) for key, path in chosen.items()}
    if names and all(name.startswith("module.") for name in names.values()):  # DistributedDataParallel
        names = {key: name.removeprefix("module.") for key, name in names.items()}
    if len(set(names.values())) < len(names):
        raise Refused("two of its entries have the same name once wrappers are left out")
    return names


def _paths(keys: Sequence[str], planner_data: object, directory: str) -> dict[str, tuple[str, ...]]:
    known = planner_data if isinstance(planner_data, dict) else {}
    paths: dict[str, tuple[str, ...]] = {}
    for key in keys:
        path = known.get(key)
        parts = [key, *(str(part) for part in path)] if isinstance(path, tuple) else [key]
        if not key or not all(part.isprintable() for part in parts):
            raise Refused(f"an entry has no name that can be printed: {key!r}")
        if isinstance(path, tuple) and path:
            paths[key] = tuple(str(part) for part in path)
        elif directory.startswith("pytorch_model_fsdp") and key.startswith("model."):
            # Accelerate saves {"model": …}, whichever planner wrote it
            paths[key] = ("model", key.removeprefix("model."))
        else:
            paths[key] = (key,)
    return paths


def _model_root(path: tuple[str, ...]) -> tuple[str, ...] | None:
    """`("app", "model", "norm.weight")` → `("app", "model")`; None for what lies flat or belongs to something
    else."""
    if path[0] in OTHER_ROOTS:
        return None
    for index, part in enumerate(path[:-1]):
        if part in OPTIMIZER_ROOTS:
            return None
        if part in MODEL_ROOTS:
            return path[: index + 1]
    return None


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_peft(names: Iterable[str]) -> bool:
    """Return whether names of tensors are those of a PEFT model."""
    return any(_OF_PEFT.search(name) for name in names)


_SAMPLES = 32


class SourceFiles:
    """Read positional ranges of the files of a checkpoint. Threads share descriptors, since `pread` needs no
    position.

    At most `limit` files stay open in addition to those being read: a checkpoint of a thousand ranks has more
    files than a process may open. `is_vouched`: a manifest has digests of the files, so checksums inside them
    are not compared.
    """

    def __init__(self, root: Path, *, is_vouched: bool = False, limit: int = 256) -> None:
        self.root, self.is_vouched = root, is_vouched
        self.checked: set[tuple[str, int]] = set()
        """(file, first byte) of the storages whose checksum was compared in a pass of its own."""
        self._open = functools.lru_cache(maxsize=limit)(self._open_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.cache_clear()

    def size_bytes(self, name: str) -> int:
        return os.fstat(self._open(name).number).st_size

    def read(self, name: str, offset: int, count: int) -> bytes:
        """Return `count` bytes at `offset`. Raises: FailedError naming a file that ends before them."""
        data = bytearray(count)
        self.read_into(name, offset, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        file, done = self._open(name), 0
        while done < len(buffer):
            try:
                got = os.preadv(file.number, [buffer[done:]], offset + done)
            except OSError as error:
                raise unreadable(self.root / name, error.strerror or str(error)) from error
            if got == 0:
                raise unreadable(
                    self.root / name,
                    f"it ends at byte {offset + done}, where {len(buffer) - done} more bytes are due",
                )
            done += got

    def drop_cached(self, name: str, offset: int, count: int) -> None:
        """Drop pages from the page cache that were read for this merge alone."""
        file = self._open(name)
        if file.was_cold:
            advise(file.number, offset, count, "DONTNEED")

    def _open_file(self, name: str) -> _File:
        if not is_inside(name):
            raise failed_error(
                "merge-path-traversal",
                f"the checkpoint names the file `{name}`, which leads out of its directory",
                where=Where(str(self.root)),
            )
        path = self.root / name
        try:
            if (path.is_symlink() or "/" in name) and not path.resolve().is_relative_to(
                _owned_by(self.root.resolve())
            ):
                raise failed_error(
                    "merge-path-traversal",
                    f"`{name}` is a link that leads out of the checkpoint",
                    where=Where(str(path)),
                )
            return _File(open_descriptor(path))
        except FileNotFoundError as error:
            raise failed_error(
                "merge-shard-missing",
                f"the checkpoint needs `{name}`, which is not there",
                where=Where(str(path)),
                hint="copy the file from where the checkpoint was written, or merge another checkpoint "
                "with `--step N`",
            ) from error
        except OSError as error:
            raise unreadable(path, error.strerror or str(error)) from error


class _File:
    """An open descriptor, closed when no thread uses it any more."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.was_cold = is_cold(number)

    def __del__(self) -> None:
        os.close(self.number)


def is_cold(descriptor: int) -> bool:
    """Return whether most of a file is not in the page cache; False if the system cannot report it.

    Reads at random positions, since the kernel fetches a page that was missing and a second call must not
    find it.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    size, cached = os.fstat(descriptor).st_size, 0
    for position in (random.randrange(max(size, 1)) for _ in range(_SAMPLES)):
        try:
            cached += os.preadv(descriptor, [bytearray(1)], position, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
        except OSError:  # a file system without RWF_NOWAIT
            return False
    return size > 0 and cached < _SAMPLES // 2


def advise(descriptor: int, offset: int, count: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, count, getattr(os, f"POSIX_FADV_{advice}"))


def _owned_by(root: Path) -> Path:
    """Return the directory that links may point into: a snapshot in the hub's cache links to the blobs of its
    repository."""
    repository = root.parent.parent
    return repository if root.parent.name == "snapshots" and (repository / "blobs").is_dir() else root


def unreadable(path: Path, why: str) -> FsdpTuneError:
    return failed_error(
        "merge-damaged-file",
        f"cannot be read: {why}",
        where=Where(str(path)),
        hint="copy the file again from where it was written, or merge another checkpoint with `--step N`",
    )


@dataclass(frozen=True, slots=True)
class ArchiveExtent:
    """A chunk as one `torch.save` archive at `offset` of `file`; its contents are read when it is opened."""

    file: str
    offset: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """A box of what is stored at `place` with the shape `sizes`: its first element, and the dimensions that
    are kept, in their order."""

    place: ArchiveExtent | Extent | ChunkPart
    sizes: Shape
    start: Shape
    axes: Shape


@dataclass(frozen=True, slots=True)
class Chunk:
    """The box at `offsets` of the whole tensor, of shape `sizes` (both in elements per dimension)."""

    offsets: Shape
    sizes: Shape
    place: ArchiveExtent | Extent | ChunkPart

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of the model, in `files`. Its chunks cover it exactly: no gap, no overlap, replicas left
    out."""

    name: str
    dtype: DType
    shape: Shape
    chunks: tuple[Chunk, ...]
    files: SourceFiles
    update: LowRank | LowRankOfExperts | None = None
    nf4_scales: Literal["fp32", "bf16"] | None = None
    """Round the values as a run did that held them in 4 bits, with scales of this dtype."""
    encoded: EncodedTensor | None = None
    """The quantised weight that the values are decoded from; it has no `chunks`."""
    is_carried: bool = False
    """Whether it is written with the dtype and bytes that the base has."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * self.dtype.item_bytes


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """The codes of a quantised weight, with the further tensors that decode them."""

    weight: Encoded
    codes: SourceTensor
    scales: SourceTensor
    others: tuple[SourceTensor | None, ...]
    """As `weight.others`."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The update of a tensor by a LoRA adapter: scaling · b @ a, its transpose where `is_transposed`; without
    `a`, scaling · b.

    `a` is [rank, in], `b` is [out, rank]; the tensor is [out, in], or [in, out] where `is_transposed`.
    `magnitude` [out] is DoRA's: each row of the sum is scaled to this length (arXiv:2402.09353, equation 5).
    """

    scaling: float
    b: SourceTensor
    a: SourceTensor | None
    is_transposed: bool = False
    magnitude: SourceTensor | None = None


@dataclass(frozen=True, slots=True)
class LowRankOfExperts:
    """The update of stacked matrices by one adapter for all of them (`ParamWrapper.get_delta_weight`, PEFT
    0.21).

    `a` is [experts · rank, in], `b` is [out, rank · experts]: expert e of the tensor [experts, out, in], or
    [experts, in, out] where `is_transposed`, gets scaling · b[:, e::experts] @ a[e · rank : (e + 1) · rank].
    `expert` is that of a tensor that holds one expert alone, from `first_row` of its update.
    """

    scaling: float
    b: SourceTensor
    a: SourceTensor
    experts: int
    is_transposed: bool
    expert: int | None
    first_row: int
