"""Drop the biases of zeros that old AutoGPTQ wrote next to the codes of every layer, also of those that have
none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fsdp_tune.core.errors import Where, failed_error
from fsdp_tune.core.expert_names import is_in_experts, stack_of
from fsdp_tune.merge.copy.gather import BUFFER_BYTES, read_in_full
from fsdp_tune.merge.load_check import Child
from fsdp_tune.merge.read.reader import SourceTensor


def without_foreign_biases(base: Mapping[str, SourceTensor], folder: Path) -> dict[str, SourceTensor]:
    """Return the tensors of a base without the biases of zeros next to decoded weights that the class of its
    config.json lacks.

    `folder`: of the base. If its class is not known, nothing is dropped. Raises: FailedError for such a bias
    with other values.
    """
    owners = [name.removesuffix("weight") for name, tensor in base.items() if tensor.encoded is not None]
    if not any(f"{owner}bias" in base for owner in owners):
        return dict(base)
    with Child("names", folder) as child:
        answer = child.answer()
    parameters: Mapping[str, object] = {} if isinstance(answer, str) else answer["parameters"]
    stacks = {name.rpartition(".")[0] for name in parameters if is_in_experts(name)}
    biased = {name.rpartition(".")[0] for name in parameters if name.endswith("_bias")}
    foreign = {
        f"{owner}bias"
        for owner in owners
        if f"{owner}weight" in parameters and f"{owner}bias" not in parameters
    }
    foreign |= {f"{owner}bias" for owner in owners if stack_of(owner) in stacks - biased}
    scratch = np.empty(BUFFER_BYTES, np.uint8)
    for name in sorted(foreign & base.keys()):
        if read_in_full(base[name], scratch).any():
            message = (
                f"its `{name}` is a bias of a quantised layer, which has none in the class of its config.json"
            )
            hint = "give the same model in 16 bits: `--base MODEL`"
            raise failed_error("merge-adapter-base", message, where=Where(str(folder)), hint=hint)
    return {name: tensor for name, tensor in base.items() if name not in foreign}
