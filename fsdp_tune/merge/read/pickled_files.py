"""Tensors of one `torch.save` archive of a full model, such as Accelerate's FULL_STATE_DICT."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error, usage_error
from fsdp_tune.core.tensors.archive import StoredTensor, extent, open_archive, read_pickle
from fsdp_tune.core.tensors.plain_pickle import Refused
from fsdp_tune.core.units import enumerated, shown
from fsdp_tune.merge.read.dcp import only_optimizer_state
from fsdp_tune.merge.read.reader import (
    MODEL_ROOTS,
    NAMES_SHOWN,
    Chunk,
    SourceFiles,
    SourceTensor,
    model_names,
    optimizer_state,
)


def read_pickled(files: SourceFiles, file: str) -> tuple[list[SourceTensor], list[str]]:
    """Return (tensors, names of other entries). Tied weights share one storage under several names.

    Raises: FailedError for a file that cannot be read or has no tensors, usage error for several models or
    the state of an optimizer.
    """
    where = Where(str(files.root / file))
    try:
        archive = open_archive(files, file, 0, files.size_bytes(file))
        state = read_pickle(archive)
        if not isinstance(state, dict):
            raise Refused("it is not a mapping from names to tensors")
        state = _model_of(state, where)
        names = model_names([key for key in state if isinstance(key, str)], None, "")
        tensors: list[SourceTensor] = []
        for key, name in names.items():
            stored = state[key]
            if isinstance(stored, StoredTensor):
                chunk = Chunk((0,) * len(stored.sizes), stored.sizes, extent(archive, stored))
                tensors.append(
                    SourceTensor(name, stored.dtype, stored.sizes, (chunk,) if chunk.elements else (), files)
                )
    except Refused as refused:
        raise failed_error(
            "merge-damaged-pickle",
            f"it cannot be used: {refused}",
            where=where,
            hint="copy it again from where it was written; a file that runs code when it is loaded is not "
            "supported",
        ) from refused
    if not tensors:
        raise (
            only_optimizer_state(files.root)
            if optimizer_state(list(names.values()))
            else _no_tensors(list(names), where)
        )
    taken = {tensor.name for tensor in tensors}
    return tensors, [name for name in names.values() if name not in taken]


def _model_of(state: dict[object, object], where: Where) -> dict[object, object]:
    """Return the innermost mapping under the keys of a model: W of {"model": {"state_dict": W}}. Raises:
    usage error for two such keys."""
    for _ in MODEL_ROOTS:  # at most so many levels, since a pickled mapping may contain itself
        inner = {name: value for name in MODEL_ROOTS if isinstance(value := state.get(name), dict)}
        if len(inner) > 1:
            raise usage_error(
                "merge-several-weights",
                f"it holds several models: {', '.join(f'`{name}`' for name in inner)}",
                where=where,
                hint="save one of them in a file of its own: "
                f'`torch.save(torch.load(FILE)["{next(iter(inner))}"], NEW)`',
            )
        state = next(iter(inner.values()), state)
    return state


def _no_tensors(names: Sequence[str], where: Where) -> FsdpTuneError:
    others = ", ".join(f"`{shown(name)}`" for name in names[:NAMES_SHOWN]) + (
        ", …" if len(names) > NAMES_SHOWN else ""
    )
    hint = f"save the weights alone, or under {enumerated([f'`{name}`' for name in MODEL_ROOTS], 'or')}"
    message = f"it holds no tensor of a model, only {others}" if names else "it is an empty mapping"
    return failed_error("merge-nothing-found", message, where=where, hint=hint)
