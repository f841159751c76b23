"""Time and peak memory of the head and its loss, forward and backward: all logits at once against slices.

    python benchmarks/loss.py [--tokens 2048] [--width 512] [--vocabulary 50257] [--dtype fp32] [--rounds 5]

Each way runs in a process of its own, so that its peak resident memory is its own; the time is the median of the rounds.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

WAYS = ("full", "slices", "slices of 1/4")


def measure(way: str, tokens: int, width: int, vocabulary: int, dtype_name: str, rounds: int) -> tuple[float, float]:
    """(median seconds, MiB by which the peak is above inputs and weights) of one way."""
    import torch

    from fsdp_tune.model.kernels import linear_loss
    from fsdp_tune.model.loss import shift_labels, summed_token_loss

    torch.set_num_threads(1)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype_name]
    hidden = torch.randn(1, tokens, width).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (1, tokens))
    if way == "slices of 1/4":
        linear_loss.SLICE_ELEMENTS = min(linear_loss.SLICE_ELEMENTS, tokens * vocabulary) // 4
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds: list[float] = []
    for _ in range(rounds):
        hidden.grad = weight.grad = None
        started = time.monotonic()
        if way == "full":
            loss = summed_token_loss(torch.nn.functional.linear(hidden, weight), shift_labels(labels))
        else:
            targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
            loss = linear_loss.summed_linear_loss(hidden[0], weight, None, targets, linear_loss.LossOptions())
        loss.backward()
        seconds.append(time.monotonic() - started)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return statistics.median(seconds), grown_mib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 2048), ("width", 512), ("vocabulary", 50257), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = (arguments.tokens, arguments.width, arguments.vocabulary, arguments.dtype, arguments.rounds)
    if arguments.way:
        seconds, mib = measure(arguments.way, *sizes)
        print(f"{seconds} {mib}")
        return
    logits = f"{arguments.tokens:,} tokens × {arguments.vocabulary:,} logits"
    size_mib = arguments.tokens * arguments.vocabulary * 4 / 2**20
    print(f"{logits} ({size_mib:,.0f} MiB in fp32), width {arguments.width}, {arguments.dtype}")
    for way in WAYS:
        child = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--way", way], capture_output=True, text=True, check=True)
        seconds, mib = map(float, child.stdout.split())
        print(f"  {way:14} {seconds * 1000:8.0f} ms   peak {mib:8,.0f} MiB above inputs and weights")


if __name__ == "__main__":
    main()
