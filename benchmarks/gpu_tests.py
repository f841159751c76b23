"""The parts of a GPU day that are tests: each test is a row, written when it ends, with its message if it
failed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from gpu_bench import Bench
from gpu_machine import ROOT
from gpu_runs import TimeIsUp

from tests.gpu.failures import RESULTS

Row = dict[str, Any]
COLUMNS = (("name", "", ""), ("outcome", "", ""), ("seconds", "s", ".1f"), ("measured", "measured", ""))
POLL_SECONDS = 0.2
WORKERS_AT_MOST = 8
"""Of pytest: each holds a context of the device, half a GiB."""
UNEXPLAINED = (
    "test_adapters.py::test_compiled_layers_with_adapters_have_the_same_losses[QLoRA]",
    "test_numbers.py::test_loss_curve_in_bf16_stays_close_to_fp32",
    "test_numbers.py::test_packed_examples_are_isolated[flex_attention]",
    "test_numbers.py::test_recomputation_with_dropout_has_the_same_gradients[selective]",
    "test_varlen.py::test_compiled_and_recomputed_layers_keep_losses[selective]",
    "test_varlen.py::test_packed_rows_without_a_mask_take_less_memory",
    "test_witness.py::test_witness_compares_every_step[fp32]",
)
"""Of tests/gpu."""


def unexplained(bench: Bench) -> Iterator[Row]:
    return _tests(
        bench, "gpu", [f"tests/gpu/{name}" for name in UNEXPLAINED if f"tests/gpu/{name}" not in bench.done]
    )


def kernels(bench: Bench) -> Iterator[Row]:
    left_out = [f"--deselect=tests/gpu/{name}" for name in UNEXPLAINED]
    return _tests(bench, "gpu", ["tests/gpu", *left_out, *_deselected(bench)])


def parity(bench: Bench) -> Iterator[Row]:
    if importlib.util.find_spec("datasets") is None:
        return iter(
            [{"name": "parity", "reason": "not available: its ranks import datasets, which is not installed"}]
        )
    return _tests(bench, "one_gpu", ["tests/parity", *_deselected(bench)])


def _deselected(bench: Bench) -> list[str]:
    return [f"--deselect={name}" for name in sorted(bench.done)]


def _tests(bench: Bench, mark: str, arguments: Sequence[str]) -> Iterator[Row]:
    """Run tests in parallel: they check numbers, and nothing is measured meanwhile. Raises: TimeIsUp."""
    if not arguments:
        return
    from fsdp_tune.core.parent_death import ends_with_parent

    results, log = bench.run.folder / "tests.jsonl", bench.run.folder / "tests.log"
    results.touch()
    workers = ["-n", str(max(1, min(WORKERS_AT_MOST, (os.cpu_count() or 1) // 2))), "--dist", "load"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.gpu.failures",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        *workers,
    ]
    count = 0
    with log.open("wb") as out:
        process = subprocess.Popen(
            # in a session of its own, that of the part does not reach it
            ends_with_parent([*command, "-q", "-m", mark, *arguments]),
            cwd=ROOT,
            env=os.environ | {RESULTS: str(results)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            while True:
                has_ended = process.poll() is not None
                lines = [
                    line
                    for line in results.read_text(encoding="utf-8").splitlines(keepends=True)
                    if line.endswith("\n")
                ]
                yield from map(json.loads, lines[count:])
                count = len(lines)
                if has_ended:
                    break
                if bench.run.left() <= 0:
                    raise TimeIsUp("the time of the part was up during its tests")
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode not in (0, 1, 5):  # passed, failed, none left
        raise RuntimeError("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]))
