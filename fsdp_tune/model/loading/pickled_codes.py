"""Refuse quantised weights in files of `torch.save`, since they are decoded from safetensors alone.

transformers would cast their codes to floats, and training would start from those.
"""

from __future__ import annotations

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.tensors.quantised_formats import find_encodings, method_of, settings_of_files
from fsdp_tune.model.loading.stored_tensors import Find, read_objects
from fsdp_tune.model.loading.tensor_account import IN_16_BITS, BaseTensors, unread_problems


def refuse_pickled_codes(name: str, find: Find, base: BaseTensors | None = None) -> None:
    """Refuse a model without safetensors files that is quantised, by its settings or by the types of its
    tensors. Raises: usage error.

    `base`: the tensors of its files, if they are on this machine.
    """
    types, files = (base.types, base.files) if base is not None else ({}, {})
    if settings := settings_of_files(read_objects(find), types):
        path = next(iter(files.values()), None)
        what = f"in {path.name}" if path is not None else "not in safetensors files"
        message = (
            f"the weights of {name} are quantised ({method_of(settings)}) and {what}: they are decoded "
            "from safetensors files alone"
        )
        where = Where(str(path) if path is not None else None, key="model.name_or_path")
        raise usage_error("model-quantised", message, where=where, hint=IN_16_BITS)
    if problems := unread_problems(find_encodings(types, {}).unread, files):
        raise FsdpTuneError(*problems)
