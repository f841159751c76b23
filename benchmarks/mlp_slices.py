"""Peak resident memory and time of one step of a long row on the CPU, with and without `kernels.mlp_slice_tokens`.

    PYTHONPATH=$PWD python benchmarks/mlp_slices.py --tokens 16384 --slice 1024

Each case runs in a process of its own, since resident memory has one peak for each process.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

CONFIG = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
}


def measure(tokens: int, slice_tokens: int | None, recomputation: str) -> None:
    import torch

    from fsdp_tune.model.kernels.install import install_kernels
    from fsdp_tune.model.loading.construct import build_full
    from fsdp_tune.model.shard.recompute import recompute_activations
    from tests.model.recipes import recipe_of

    recipe = recipe_of(
        {"from_config": CONFIG | {"max_position_embeddings": tokens}},
        kernels={"mlp_slice_tokens": slice_tokens},
        fsdp={"activation_checkpointing": recomputation},
        data={"train": [{"path": "made"}], "max_length": tokens},
    )
    model = build_full(recipe).train()
    install_kernels(recipe, model, "cpu")
    recompute_activations(recipe, model)
    ids = torch.arange(tokens)[None] % CONFIG["vocab_size"]
    before, start = _peak_mib(), time.perf_counter()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    seconds = time.perf_counter() - start
    norm = sum(float(parameter.grad.double().norm()) for parameter in model.parameters() if parameter.grad is not None)
    print(f"| {recomputation} | {slice_tokens or 'null'} | {_peak_mib() - before:,.0f} MiB | {seconds:.1f} s | {norm:.9f} |")


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--slice", type=int, default=1024)
    parser.add_argument("--case", nargs=2, metavar=("SLICE", "RECOMPUTATION"), help="measure this case in this process")
    given = parser.parse_args()
    if given.case is not None:
        measure(given.tokens, int(given.case[0]) or None, given.case[1])
        return
    print("| activation_checkpointing | mlp_slice_tokens | memory of the step | time | norm of the gradients |")
    print("| --- | --- | ---: | ---: | ---: |")
    for recomputation in ("none", "full"):
        for slice_tokens in (0, given.slice):
            case = ("--tokens", str(given.tokens), "--case", str(slice_tokens), recomputation)
            subprocess.run([sys.executable, __file__, *case], check=True)


if __name__ == "__main__":
    main()
