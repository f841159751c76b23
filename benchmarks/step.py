"""What a step costs: ours, a bare `fully_shard` loop, transformers' Trainer, TRL's SFTTrainer, and the
tutorial that pads every row.

    python benchmarks/step.py overhead [--contenders ours,bare,hf] [--rounds 7] [--steps 20]
    python benchmarks/step.py compute [--lora --trl-python VENV/bin/python]
    python benchmarks/step.py compute --qlora --trl-python VENV/bin/python --contenders ours,trl
    python benchmarks/step.py gsm8k --gsm8k train.jsonl --trl-python VENV/bin/python
    python benchmarks/step.py accumulated --rounds 5 --steps 2
    python benchmarks/step.py gpu --json FILE

Each contender is two CPU ranks over gloo, one thread each, that live through the whole measurement and stand
still while another one
runs: the rounds go in turn, and the order moves on by one each time. Ours is the worker, started by
`accelerate launch` on a run directory that `fsdp-tune train --no-start` wrote. `overhead` has tiny layers,
`compute` 34 million parameters and 512 tokens a rank; both have full rows, fp32, clipping, fused AdamW and a
line every ten steps. In `gsm8k` rows differ in length: ours and TRL pack to 512 tokens, the tutorial pads to
them. `accumulated` has four micro-batches a step: ours alone, with and without `fsdp.reshard_after_backward`,
under FULL_SHARD and SHARD_GRAD_OP. `gpu` is one rank on a GPU, which all contenders share: 0.95 billion
parameters, 4,096 tokens, bf16 over fp32 weights; there wall time is what it is, since the machine's speed is
not the GPU's. With `--lora` every contender trains the same LoRA adapters of PEFT, of rank 16 on all linear
layers but the head, over a frozen base; with `--qlora` ours and TRL hold the base in NF4, TRL by
bitsandbytes.

CPU time is that of a rank's whole process. Wall time is divided by how much slower than usual a fixed matrix
product was beside that round. Medians over the rounds; ratios are medians of the ratios round by round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import numpy as np
from step_inputs import (
    BITSANDBYTES,
    LOGGING_STEPS,
    LORA,
    OURS,
    SIZES,
    Size,
    recipe_of,
    write_base,
    write_rows,
)
from step_ranks import ADDRESS, AUTHORITY, NAME, WARM_UP_STEPS

HERE = Path(__file__).resolve().parent
START_SECONDS = 150


@dataclass
class Contender:
    name: str
    processes: list[subprocess.Popen[bytes]]
    log: Path
    pipes: dict[int, Connection] = field(default_factory=dict[int, Connection])
    cpu_seconds: list[float] = field(default_factory=list[float])
    """Of a step, mean of the ranks, for each round."""
    wall_seconds: list[float] = field(default_factory=list[float])
    tokens_per_row: float = 0.0

    def round(self, steps: int) -> None:
        for pipe in self.pipes.values():
            pipe.send(steps)
        took = [pipe.recv() for pipe in self.pipes.values()]
        self.wall_seconds.append(max(wall for wall, _ in took) / steps)
        self.cpu_seconds.append(statistics.mean(cpu for _, cpu in took) / steps)

    def log_tails(self) -> str:
        logs = [self.log, *sorted(self.log.parent.glob(f"{self.name}/logs/*.log"))]
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in logs)

    def end(self) -> None:
        for pipe in self.pipes.values():
            pipe.send(0)
        for process in self.processes:
            process.wait(60)


def start_ours(
    name: str, size: Size, folder: Path, environment: dict[str, str], adapters: dict[str, bool]
) -> Contender:
    from fsdp_tune.core.parent_death import ends_with_parent
    from fsdp_tune.launch.command.accelerate import launch_plan
    from fsdp_tune.recipe.schema.recipe import Recipe
    from fsdp_tune.run.directory import RunDir

    file, run = folder / f"{name}.json", RunDir(folder / name)
    recipe_keys = recipe_of(size, folder, run.path, **adapters) | {"fsdp": OURS[name]}
    file.write_text(json.dumps(recipe_keys), encoding="utf-8")  # JSON is YAML
    writes = [
        sys.executable,
        "-m",
        "fsdp_tune",
        "train",
        "--config",
        str(file),
        "--no-start",
        "--ignore-plan",
    ]
    subprocess.run(writes, check=True, env=environment, stdout=subprocess.DEVNULL)
    recipe = Recipe.model_validate_json(run.recipe_json.read_bytes())
    plan = launch_plan(recipe, run, worker_module="step_ranks", inherited=environment | {NAME: name})
    contender = Contender(name, [], folder / f"{name}.log")
    with contender.log.open("wb") as log:
        contender.processes.append(
            subprocess.Popen(
                ends_with_parent(plan.argv), env=plan.env, stdout=log, stderr=log, start_new_session=True
            )
        )
    contender.tokens_per_row = mean_length(json.loads(run.data_json.read_text(encoding="utf-8"))["train"])
    return contender


def mean_length(store: str) -> float:
    from fsdp_tune.data.store import RowStore

    return float(RowStore(store).lengths.mean())


def start_other(
    name: str, size: Size, folder: Path, environment: dict[str, str], python: str, adapters: dict[str, bool]
) -> Contender:
    from fsdp_tune.core.parent_death import ends_with_parent

    contender = Contender(name, [], folder / f"{name}.log")
    (folder / name).mkdir()
    task = {
        "contender": name,
        "world_size": size.world_size,
        "device": size.device,
        "dtype": "float32",
        "compute_dtype": "bfloat16" if size.precision == "bf16" else "float32",
        "recompute": False,
        "model": size.model,
        "lora": LORA if adapters["lora"] else None,
        "bitsandbytes": BITSANDBYTES if adapters["in_4_bits"] else None,
        "base": str(folder / "base"),
        "batch": size.batch,
        "max_length": size.max_length,
        "packing": size.packing,
        "logging_steps": LOGGING_STEPS,
        "rows": str(folder / "rows.jsonl"),
        "tokenizer": str(folder / "tokenizer"),
        "folder": str(folder / name),
        "rendezvous": str(folder / f"{name}.meeting"),
    }
    (folder / f"{name}.json").write_text(json.dumps(task), encoding="utf-8")
    for rank in range(size.world_size):
        command = [python, str(HERE / "step_ranks.py"), str(folder / f"{name}.json"), str(rank)]
        with contender.log.open("ab") as log:
            started = subprocess.Popen(
                ends_with_parent(command),
                env=environment | {NAME: name},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        contender.processes.append(started)
    return contender


def meet(listener: Listener, contenders: list[Contender], world_size: int) -> None:
    """Waits until every rank of every contender stands at its gate."""
    deadline, by_name, unknown = (
        time.monotonic() + START_SECONDS,
        {one.name: one for one in contenders},
        list[Connection](),
    )
    accepted = 0
    while any(len(one.pipes) < world_size for one in contenders):
        for one in contenders:
            if any(process.poll() is not None for process in one.processes) or (
                time.monotonic() > deadline and len(one.pipes) < world_size
            ):
                raise SystemExit(
                    f"{one.name} has {len(one.pipes)} of {world_size} ranks ready\n{one.log_tails()}"
                )
        if accepted < world_size * len(contenders) and wait([listener._listener._socket], 0.2):  # type: ignore[attr-defined]
            unknown.append(listener.accept())
            accepted += 1
        for pipe in wait(unknown, 0.2):
            assert isinstance(pipe, Connection)
            unknown.remove(pipe)
            with contextlib.suppress(EOFError):  # whose process has ended is seen above
                name, rank = pipe.recv()
                by_name[name].pipes[rank] = pipe


class Speedometer:
    """How fast the machine is now: a fixed product of matrices."""

    def __init__(self) -> None:
        self._matrix = np.random.default_rng(0).standard_normal((600, 600)).astype(np.float32)
        self.seconds: list[float] = []

    def __call__(self) -> float:
        started = time.perf_counter()
        for _ in range(60):
            self._matrix @ self._matrix
        self.seconds.append(time.perf_counter() - started)
        return self.seconds[-1]


def measure(contenders: list[Contender], rounds: int, steps: int, *, corrected: bool) -> Speedometer:
    speed = Speedometer()
    beside: dict[str, list[float]] = {one.name: [] for one in contenders}
    for number in range(rounds + 1):  # the first finds cold caches
        order = contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
        for one in order:
            before = speed()
            one.round(steps)
            beside[one.name].append((before + speed()) / 2)
    usual = statistics.median(speed.seconds)
    for one in contenders:
        if corrected:
            one.wall_seconds = [
                wall * usual / product
                for wall, product in zip(one.wall_seconds, beside[one.name], strict=True)
            ]
        del one.wall_seconds[0], one.cpu_seconds[0]
    return speed


def report(contenders: list[Contender], size: Size, speed: Speedometer, against: str) -> None:
    base = next((one for one in contenders if one.name == against), contenders[0])
    spread = (max(speed.seconds) - min(speed.seconds)) / statistics.median(speed.seconds)
    print(
        f"the fixed product took {statistics.median(speed.seconds):.3f} s; fastest to slowest differ "
        f"by {spread:.0%}"
    )
    print(
        f"| | CPU ms a step and rank | wall ms | CPU / {base.name} | wall / {base.name} | real "
        f"tokens / s | tokens/s / {base.name} |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for one in contenders:
        cpu, wall = statistics.median(one.cpu_seconds), statistics.median(one.wall_seconds)
        cpu_ratios, wall_ratios = (
            ratios(one.cpu_seconds, base.cpu_seconds),
            ratios(one.wall_seconds, base.wall_seconds),
        )
        tokens = one.tokens_per_row * size.rows_per_step
        gain = one.tokens_per_row / base.tokens_per_row / statistics.median(wall_ratios)
        told = [
            f"{1000 * cpu:.1f}",
            f"{1000 * wall:.1f}",
            median_and_range(cpu_ratios),
            median_and_range(wall_ratios),
        ]
        print("|", " | ".join([one.name, *told, f"{tokens / wall:,.0f}", f"{gain:.2f}"]), "|")


def figures(contenders: list[Contender], size: Size) -> dict[str, dict[str, Any]]:
    return {
        one.name: {
            "wall_seconds": one.wall_seconds,
            "cpu_seconds": one.cpu_seconds,
            "tokens_per_step": one.tokens_per_row * size.rows_per_step,
        }
        for one in contenders
    }


def ratios(one: list[float], other: list[float]) -> list[float]:
    return [a / b for a, b in zip(one, other, strict=True)]


def median_and_range(found: list[float]) -> str:
    return f"{statistics.median(found):.3f} ({min(found):.2f} to {max(found):.2f})"


def run(options: argparse.Namespace, folder: Path) -> None:
    size = SIZES[options.size]
    names: list[str] = options.contenders.split(",") if options.contenders else list(size.contenders)
    if "trl" in names and options.trl_python is None:
        print("trl: not installed (--trl-python names an interpreter that has it)")
        names.remove("trl")
    address = str(folder / "gate")
    tokens_per_row = write_rows(size, options.gsm8k, folder)
    adapters = {"lora": options.lora or options.qlora, "in_4_bits": options.qlora}
    if adapters["lora"]:
        write_base(size, folder / "base")
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    # this checkout's, whichever is installed
    paths = os.pathsep.join([str(HERE.parent), str(HERE), *inherited])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    environment |= {ADDRESS: address, WARM_UP_STEPS: str(options.steps)}
    contenders: list[Contender] = []
    with Listener(address, "AF_UNIX", backlog=16, authkey=AUTHORITY) as listener:
        try:
            for name in names:
                if name in OURS:
                    contenders.append(start_ours(name, size, folder, environment, adapters))
                    continue
                python = options.trl_python if name == "trl" else sys.executable
                contenders.append(start_other(name, size, folder, environment, python, adapters))
            meet(listener, contenders, size.world_size)
            for one in contenders:
                told = folder / one.name / "tokens_per_row"
                one.tokens_per_row = one.tokens_per_row or (
                    float(told.read_text()) if told.exists() else tokens_per_row
                )
            speed = measure(contenders, options.rounds, options.steps, corrected=size.device == "cpu")
            report(contenders, size, speed, "bare" if "bare" in names else "ours")
            if options.json:
                from fsdp_tune.core.atomic import write_json

                write_json(options.json, figures(contenders, size))
            for one in contenders:
                one.end()
        finally:
            for process in (
                process for one in contenders for process in one.processes if process.poll() is None
            ):
                os.killpg(process.pid, 9)
            if options.keep:
                shutil.copytree(
                    folder, options.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("gate")
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", choices=sorted(SIZES))
    parser.add_argument("--contenders", help="some of ours,bare,hf,trl,padding")
    parser.add_argument("--lora", action="store_true", help="train LoRA adapters instead of all weights")
    parser.add_argument(
        "--qlora", action="store_true", help="the same on a base in 4 bits; contenders: ours,trl"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="of each contender in each round")
    parser.add_argument("--trl-python", help="an interpreter that can import trl")
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's train.jsonl (question, answer)")
    parser.add_argument("--json", type=Path, help="where the figures of each round are written")
    parser.add_argument("--keep", type=Path, help="where run directory and logs are copied to")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the contenders end too
    if options.qlora and options.contenders not in ("ours", "ours,trl"):
        parser.error("--qlora needs --contenders ours,trl: the loops have no base in 4 bits")
    if options.size == "gsm8k" and options.gsm8k is None:
        parser.error("--gsm8k FILE is needed")
    with tempfile.TemporaryDirectory(prefix="benchmark-step-") as folder:
        started = time.monotonic()
        run(options, Path(folder))
        print(f"{time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    main()
