"""Reads one `torch.save` archive of a whole model: Accelerate's FULL_STATE_DICT, transformers' and everybody's own."""

from __future__ import annotations

from fsdp_tune.errors import Where, failed_error
from fsdp_tune.merge.archive import StoredTensor, extent, open_archive, read_pickle
from fsdp_tune.merge.names import model_names
from fsdp_tune.merge.pickles import Refused
from fsdp_tune.merge.reader import SourceFiles
from fsdp_tune.merge.tensors import Chunk, SourceTensor


def read_pickled(files: SourceFiles, file: str) -> tuple[list[SourceTensor], list[str]]:
    """(tensors, names of entries that are none). Several names may share one storage: that is how tied weights are kept."""
    try:
        archive = open_archive(files, file, 0, files.size_bytes(file))
        state = read_pickle(archive)
        if not isinstance(state, dict):
            raise Refused("it holds no mapping from names to tensors")
        for wrapper in ("model", "state_dict"):  # as torchtune's and most trainers', and as Lightning's
            if isinstance(state.get(wrapper), dict):
                state = state[wrapper]
        names = model_names([key for key in state if isinstance(key, str)], None, "")
        tensors: list[SourceTensor] = []
        for key, name in names.items():
            stored = state[key]
            if isinstance(stored, StoredTensor):
                chunk = Chunk((0,) * len(stored.sizes), stored.sizes, extent(archive, stored))
                tensors.append(SourceTensor(name, stored.dtype, stored.sizes, (chunk,) if chunk.elements else (), files))
        if not tensors:
            raise Refused("it holds no tensor")
    except Refused as refused:
        raise failed_error(
            "merge-damaged-pickle",
            f"it cannot be used: {refused}",
            where=Where(str(files.root / file)),
            hint="copy it anew from where it was written; a file that asks to run code is not only a state dict",
        ) from refused
    taken = {tensor.name for tensor in tensors}
    return tensors, [name for name in names.values() if name not in taken]
