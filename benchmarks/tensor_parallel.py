"""Tensor parallelism on paper: a step of Llama-3.1-70B on 8 and 64 H100, beside FSDP, HSDP and sequence parallelism.

    python benchmarks/tensor_parallel.py

All layouts are priced by one model of a layer, with the efficiencies, links and collectives of `plan`: matrix products and attention at
the shares that training reaches, elementwise traffic at the memory bandwidth, parameters gathered for each forward and backward while the
layer before computes, everything else exposed. Tensor parallelism is that of Megatron with sequence-parallel norms (arXiv:2205.05198): an
all-gather and a reduce-scatter of the activations for attention and for the MLP, forward, recomputation and backward. Matrix products on
narrower slices are taken to be as fast as on whole matrices, which favours it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_tune.core.topology import Group
from fsdp_tune.planner.hardware.efficiency import efficiency_of
from fsdp_tune.planner.hardware.gpus import find_hardware
from fsdp_tune.planner.predict.collectives import collective_seconds

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCABULARY = 8192, 28672, 80, 64, 8, 128256
LAYER_PARAMETERS = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN * KV_HEADS // HEADS + 3 * HIDDEN * INNER
ELEMENTWISE_BYTES = 2 * (60 * HIDDEN + 18 * INNER)
"""Memory traffic of a token in the forward of a layer, not compiled: norms, rotary embeddings, residuals, the activation of the MLP. So
many passes give the time of computing that `plan` finds in the trace of such a step."""
GPUS_PER_MACHINE = 8
HARDWARE = find_hardware("h100-sxm")
EFFICIENCY = efficiency_of(HARDWARE)


@dataclass(frozen=True)
class Layout:
    name: str
    shard: int
    """Ranks that a parameter is sharded over, besides tensor parallelism."""
    tensor: int = 1
    sequence: int = 1


def within(ranks: int, stride: int) -> Group:
    """Return the group of ranks that are `stride` apart."""
    return Group(ranks, max(1, ranks * stride // GPUS_PER_MACHINE))


def seconds(kind: str, size_bytes: float, group: Group) -> float:
    found = collective_seconds(kind, size_bytes, group, HARDWARE)
    assert found is not None
    return found


def step_seconds(layout: Layout, gpus: int, tokens: int, rows: int, *, is_lora: bool) -> float | None:
    """Return the time of a step of `rows` rows of `tokens` tokens; None if a group of ranks would have less than one row."""
    together = layout.tensor * layout.sequence
    groups = gpus // together
    if rows < groups:
        return None
    rounds = -(-rows // groups)
    own = tokens / together
    """Tokens of a row that one GPU computes, or its share of their matrix products."""
    multiplied = 2 * LAYER_PARAMETERS * own / (HARDWARE.peak_flops("bf16") * EFFICIENCY.matmul)
    attended = 2 * tokens * HIDDEN * own / HARDWARE.peak_flops("bf16")
    moved = ELEMENTWISE_BYTES * own / (HARDWARE.bandwidth_bytes_per_second * EFFICIENCY.bandwidth)
    forward = multiplied + attended / EFFICIENCY.attention_forward + moved
    # Twice the products, for inputs and weights; frozen weights have no gradient. The forward once more, for recomputation.
    backward = multiplied * (1 if is_lora else 2) + 2.5 * attended / EFFICIENCY.attention_backward + 2 * moved + forward
    shared = 0.0
    if layout.tensor > 1:
        activations = tokens * HIDDEN * 2
        pair = seconds("all_gather", activations, within(layout.tensor, 1)) + seconds(
            "reduce_scatter", activations, within(layout.tensor, 1)
        )
        shared = 2 * pair
    if layout.sequence > 1:
        exchanged = own * 2 * (HIDDEN + 2 * HIDDEN * KV_HEADS // HEADS), own * 2 * HIDDEN
        shared = sum(seconds("all_to_all", size, within(layout.sequence, 1)) for size in exchanged)
    parameters = 2 * LAYER_PARAMETERS / layout.tensor
    group = within(layout.shard, layout.tensor)
    gathered = seconds("all_gather", parameters, group)
    reduced = 0.0 if is_lora else seconds("reduce_scatter", 2 * parameters, group)  # fp32 sums
    slowed = EFFICIENCY.overlap_cost * (2 * gathered + reduced)
    micro = LAYERS * (max(forward + shared, gathered) + max(backward + 2 * shared, gathered + reduced) + slowed)
    replicas = gpus // (layout.shard * layout.tensor)
    copies = Group(replicas, replicas) if replicas > 1 else None
    sums = LAYERS * seconds("all_reduce", 4 * LAYER_PARAMETERS / layout.tensor / layout.shard, copies) if copies and not is_lora else 0.0
    head = 6 * VOCABULARY * HIDDEN * own / (HARDWARE.peak_flops("bf16") * EFFICIENCY.matmul)
    return rounds * (micro + head) + sums


def table(title: str, gpus: int, layouts: list[Layout], *, is_lora: bool) -> None:
    print(f"\n### {title}\n")
    cases = [(tokens, rows) for tokens in (4096, 8192) for rows in (gpus * 4, gpus, gpus // 4, gpus // 8) if rows]
    print("| tokens a row | rows a step | " + " | ".join(layout.name for layout in layouts) + " | fastest |")
    print("|---|---|" + "---|" * (len(layouts) + 1))
    for tokens, rows in cases:
        times = {layout.name: step_seconds(layout, gpus, tokens, rows, is_lora=is_lora) for layout in layouts}
        known = {name: value for name, value in times.items() if value is not None}
        cells = ["–" if value is None else f"{value:.2f}" for value in times.values()]
        print(f"| {tokens:,} | {rows} | {' | '.join(cells)} | {min(known, key=lambda name: known[name])} |")


def main() -> None:
    small = [
        Layout("FSDP", 8),
        *(Layout(f"FSDP × sp {n}", 8, sequence=n) for n in (4, 8)),
        *(Layout(f"FSDP × tp {n}", 8 // n, n) for n in (2, 4, 8)),
    ]
    large = [Layout("FSDP", 64), Layout("HSDP 8 × 8", 8), *(Layout(f"FSDP × sp {n}", 64, sequence=n) for n in (4, 8))]
    large += [Layout(f"FSDP × tp {n}", 64 // n, n) for n in (2, 4, 8)]
    table("8 GPUs, LoRA, seconds a step", 8, small, is_lora=True)
    table("64 GPUs, all parameters, seconds a step", 64, large, is_lora=False)


if __name__ == "__main__":
    main()
