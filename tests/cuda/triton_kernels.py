"""Compile what Inductor generates for a GPU that is not there, and say what each kernel takes of it:
registers, stack and shared memory.

The emulated device tells Inductor what the GPU is like; Triton compiles for a named target wherever its
package is installed. Launches are left out, so values of compiled parts are never computed here. Run as a
module, it prints the table of one GPU as JSON; it belongs into an environment of `with_gpus(…, triton=1)`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

# Llama 3 8B's layer; a few tokens, since the products around the kernels run on the CPU.
LAYER = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 256,
}
TOKENS = 32
_USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack_bytes>\d+)")


class Compiled:
    """Collects the kernels that Inductor asks Triton for, each compiled for the GPU in all its
    configurations, instead of running them."""

    def __init__(self) -> None:
        self.part = ""
        self.kernels: list[dict[str, Any]] = []

    def install(self) -> None:
        import triton
        from torch._inductor import config
        from torch._inductor.runtime import triton_helpers, triton_heuristics

        config.compile_threads, config.fx_graph_cache = 1, False
        torch._functorch.config.enable_autograd_cache = False  # type: ignore[attr-defined]  # the cache would keep the kernels from us
        triton.runtime.driver.set_active(_Driver())
        triton_helpers.set_driver_to_gpu = lambda: None
        torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(  # type: ignore[attr-defined]
            size, stride, dtype=dtype, device="cuda"
        )
        triton_heuristics.CachingAutotuner.precompile = lambda tuner, *_, **__: self._add(tuner)  # type: ignore[method-assign]
        triton_heuristics.CachingAutotuner.run = lambda *_, **__: None  # type: ignore[method-assign]

    def _add(self, tuner: Any) -> None:
        import triton
        from torch._inductor.runtime.triton_heuristics import ASTSource, GPUTarget

        for config in tuner.configs:
            meta = tuner._create_compile_meta(config)
            binary = triton.compile(
                ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]),
                target=GPUTarget(meta["device_type"], meta["cc"], 32),
                options=tuner._create_compile_options(config, meta),
            )
            found = {
                "part": self.part,
                "kernel": tuner.inductor_meta["kernel_name"],
                "target": f"sm_{meta['cc']}",
            }
            found |= {"warps": config.num_warps, "shared_bytes": binary.metadata.shared} | _usage(
                binary.asm["cubin"]
            )
            if found not in self.kernels:
                self.kernels.append(found)


class _Driver:
    """What Triton asks its driver while it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = torch.cuda.get_device_capability()
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def _usage(cubin: bytes) -> dict[str, int]:
    """What NVIDIA's disassembler says of a kernel. Registers that did not fit are on its stack."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = _USAGE.search(said)
    assert usage is not None, said
    return {name: int(value) for name, value in usage.groupdict().items()}


def dequantise() -> None:
    """The weights of a 4-bit layer: the operator that a GPU runs, with both kinds of scales."""
    from fsdp_tune.model.adapters.nf4 import dequantise

    for scale_bytes in (4, 2):
        packed = torch.zeros(
            LAYER["hidden_size"], LAYER["hidden_size"] // 2, dtype=torch.uint8, device="cuda"
        )
        scales = torch.zeros(
            LAYER["hidden_size"], LAYER["hidden_size"] // 64 * scale_bytes, dtype=torch.uint8, device="cuda"
        )
        dequantise(packed, scales, torch.bfloat16)


def decoder_layer() -> None:
    """A layer's forward and backward as `kernels.compile` has them, with recomputation."""
    from fsdp_tune.model.kernels.compiled import compile_layers
    from fsdp_tune.model.loading.construct import build_empty
    from fsdp_tune.model.shard.recompute import recompute_activations
    from tests.model.recipes import recipe_of

    recipe = recipe_of(
        {"from_config": LAYER},
        ranks=1,
        fsdp={"activation_checkpointing": "selective"},
        kernels={"compile": True, "loss": "full"},
    )
    model = build_empty(recipe).to_empty(device="cuda").to(torch.bfloat16).train()
    recompute_activations(recipe, model)
    compile_layers(recipe, model)
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()


def main() -> None:
    compiled = Compiled()
    compiled.install()
    for part in (dequantise, decoder_layer):
        compiled.part = part.__name__
        part()
    json.dump(compiled.kernels, sys.stdout)


if __name__ == "__main__":
    main()
