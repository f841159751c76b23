"""Assign the factors of adapted experts (PEFT's `target_parameters`) to tensors of the base, stacked or one
for each expert. Pure.

transformers stacks the matrices of a mixture's experts in one parameter [experts, rows, columns]; the files
of most models hold one tensor for each expert, and gate and up apart (`MergeModulelist` and `Concatenate` in
transformers' `conversion_mapping`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fsdp_tune.core.expert_names import EXPERT_MODULES, EXPERT_PARTS
from fsdp_tune.core.tensors.dtypes import Shape
from fsdp_tune.merge.read.reader import LowRankOfExperts, SourceTensor


@dataclass(frozen=True, slots=True)
class Stack:
    """Experts of the base: `shape` [rows, columns] of one of them, and their tensors as (name, expert, first
    row in its matrix).

    The expert is None for one tensor with all of them.
    """

    experts: int
    shape: Shape
    tensors: tuple[tuple[str, int | None, int], ...]

    @property
    def is_one_tensor(self) -> bool:
        return self.tensors[0][1] is None


def find_stack(
    base: Mapping[str, SourceTensor], name_in_base: Callable[[str], str | None], owner: str, parameter: str
) -> Stack | None:
    """Return the experts that the model holds as `owner`.`parameter`; None if the base has neither the stack
    nor all its parts."""
    for module in dict.fromkeys(owner.replace(*spelling) for spelling in EXPERT_MODULES):
        if (name := name_in_base(f"{module}.{parameter}")) is not None and len(base[name].shape) == 3:
            return Stack(base[name].shape[0], base[name].shape[1:], ((name, None, 0),))
        for parts in EXPERT_PARTS.get(parameter, ()):
            tensors: list[tuple[str, int | None, int]] = []
            experts, rows, columns = 0, 0, {0}
            while None not in (
                names := [name_in_base(f"{module}.{experts}.{part}.weight") for part in parts]
            ):
                found = [name for name in names if name is not None]
                firsts = [sum(base[each].shape[0] for each in found[:index]) for index in range(len(found))]
                tensors += [(name, experts, first) for name, first in zip(found, firsts, strict=True)]
                rows, columns = (
                    sum(base[name].shape[0] for name in found),
                    {base[name].shape[1] for name in found},
                )
                experts += 1
            if tensors and len(columns) == 1:
                return Stack(experts, (rows, *columns), tuple(tensors))
    return None


def updates(
    stack: Stack, a: SourceTensor, b: SourceTensor, scaling: float, *, is_transposed: bool
) -> dict[str, LowRankOfExperts]:
    """Return the update of each tensor of a stack, by name."""
    return {
        name: LowRankOfExperts(scaling, b, a, stack.experts, is_transposed, expert, first_row)
        for name, expert, first_row in stack.tensors
    }


def are_transposed(stack: Stack, shape: Shape, gate_up: Stack | None) -> bool | None:
    """Return whether the matrices are [in, out] (GPT-OSS); None if they do not fit `shape` [out, in], or if
    nothing tells.

    `gate_up` tells it of a square `down_proj`: its matrices are [in, 2 · out] or [2 · out, in].
    """
    if not stack.is_one_tensor:
        return False if stack.shape == shape else None
    if shape[0] != shape[1]:
        return stack.shape != shape if stack.shape in (shape, shape[::-1]) else None
    if (
        stack.shape != shape
        or gate_up is None
        or not gate_up.is_one_tensor
        or gate_up.shape[0] == gate_up.shape[1]
    ):
        return None
    return gate_up.shape[0] == shape[0]
