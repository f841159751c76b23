"""The kernels for stacked experts that transformers has (`experts_implementation`), and what each needs to
train."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from fsdp_tune.core.flash_kernels import without_kernels


@dataclass(frozen=True, slots=True)
class ExpertsKernel:
    """One implementation. Without `generations` it is plain PyTorch, which runs on any device in any
    dtype."""

    generations: frozenset[int] = frozenset()
    """Major numbers of the compute capabilities that it has kernels for."""
    distributions: tuple[str, ...] = ()
    """Packages that it needs, by their names in pip; transformers has their versions."""
    repository: str | None = None
    """The repository of the hub whose code it downloads and runs."""
    gate: str | None = None
    """The one activation function by which it gates, in place of the model's own code; None: it calls the
    model's."""
    compiles: bool = True
    """Whether `torch.compile` takes it: it starts no work whose size depends on the routing."""
    why_not: str | None = None
    """Why it cannot train."""
    divided_in: frozenset[str] = frozenset()
    """Compute dtypes in which ranks may divide its experts (`fsdp.ep_size`): it then adds the gradients of
    many rows in fp32."""

    def against(self, name: str, capability: tuple[int, int]) -> str | None:
        """Return why it does not run on a GPU of this name and compute capability; None if it does."""
        return without_kernels("SonicMoE", self.generations, name, capability) if self.generations else None


# Sources: transformers 5.17 and 5.24 (`integrations/moe.py`, `sonicmoe.py`, `deepgemm.py`), and the README of
# Dao-AILab/sonic-moe (2026).
EXPERTS_KERNELS = MappingProxyType(
    {
        "grouped_mm": ExpertsKernel(divided_in=frozenset({"fp32", "bf16"})),
        # It indexes all stacks by the expert of each row, and the backward of an index adds the rows in the
        # dtype of the stack.
        "batched_mm": ExpertsKernel(divided_in=frozenset({"fp32"})),
        "eager": ExpertsKernel(compiles=False, divided_in=frozenset({"fp32", "bf16"})),
        "sonicmoe": ExpertsKernel(
            frozenset({9, 10, 12}),
            ("kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi"),
            "kernels-community/sonic-moe",
            gate="silu",
        ),
        "deepgemm": ExpertsKernel(
            why_not="transformers' DeepGEMM kernels compute no gradients, so experts would not be trained"
        ),
    }
)
"""By transformers' name. `grouped_mm` is its own choice: one product for all experts, or one for each where
torch has none for all."""
