"""Host memory of a rank while it loads a model and trains LoRA or QLoRA adapters: ours, and TRL's SFTTrainer with PEFT.

    python benchmarks/lora_memory.py --trl-python VENV/bin/python [--parameters 500m] [--rounds 1]

Writes a random Llama in bf16 and trains adapters of it for three steps on two CPU ranks (gloo), one row of 64 tokens a rank and step. TRL
runs with Accelerate's FSDP2, with `cpu_ram_efficient_loading` and without, and in 4 bits with bitsandbytes. Memory is the rise of a rank's
peak resident set over the moment before the model is built, in two phases: until the first step, and during the steps; pages of mapped
files count in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import step_ranks
from load import HIDDEN, write_model
from step_inputs import BITSANDBYTES, LORA, Size, recipe_of, write_rows

HERE = Path(__file__).resolve().parent
RESULT = "LORA_MEMORY_RESULT"
RANKS, STEPS, TOKENS, VOCABULARY = 2, 3, 64, 32000
OURS = {"ours, LoRA": False, "ours, QLoRA": True}
"""Whether the base is in 4 bits."""
TRL: dict[str, dict[str, Any]] = {
    "TRL, LoRA": {"efficient_loading": False, "in_4_bits": False},
    "TRL, LoRA, cpu_ram_efficient_loading": {"efficient_loading": True, "in_4_bits": False},
    "TRL, QLoRA": {"efficient_loading": True, "in_4_bits": True},
}
AS_BF16 = {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "bfloat16"}
"""Accelerate shards weights of bitsandbytes only if they are stored as floats."""
GIB = 1 << 30


class PeakMemory:
    """Peak resident memory of this process by phase, above that at the start."""

    def __init__(self) -> None:
        self._reset_peak()
        self._start = self._peak_bytes()
        self._phases: dict[str, int] = {}

    def end_phase(self, name: str) -> None:
        self._phases[name] = self._peak_bytes() - self._start
        self._reset_peak()

    def write(self) -> None:
        Path(f"{os.environ[RESULT]}-{os.environ['RANK']}.json").write_text(json.dumps(self._phases), encoding="utf-8")

    @staticmethod
    def _reset_peak() -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # see proc(5): the peak becomes the current size

    @staticmethod
    def _peak_bytes() -> int:
        (line,) = [line for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024


def memory_callback(memory: PeakMemory) -> Any:
    from transformers import TrainerCallback

    class Measured(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            memory.end_phase("loading")

        def on_step_end(self, _arguments: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == STEPS:
                memory.end_phase("training")
                memory.write()
                os._exit(0)

    return Measured()


# ---- The ranks


def ours(run_dir: str) -> int:
    """Run the worker, measured from the call that loads the model."""
    from fsdp_tune.worker import __main__ as worker
    from fsdp_tune.worker import setup

    memories: list[PeakMemory] = []
    load = setup.load

    def measured_load(*arguments: Any, **named: Any) -> Any:
        memories.append(PeakMemory())
        return load(*arguments, **named)

    setup.load = measured_load
    setup._extra_callbacks = lambda _recipe: [memory_callback(memories[0])]
    return worker.main([run_dir])


def trl(task: dict[str, Any], rank: int) -> int:
    """Run SFTTrainer on a model directory, measured from its construction, in which it loads the model."""
    step_ranks.join(task, rank)
    from datasets import Dataset
    from transformers import AutoTokenizer, BitsAndBytesConfig, LlamaForCausalLM  # noqa: F401  the import is not the model's memory
    from trl import SFTConfig, SFTTrainer

    options = step_ranks.options_of(task) | {"bf16": True, "max_length": TOKENS, "gradient_checkpointing": False}
    options["fsdp_config"] |= {"cpu_ram_efficient_loading": task["efficient_loading"]}
    arguments = SFTConfig(**options, model_init_kwargs={"dtype": "bfloat16"})
    rows = Dataset.from_dict({"input_ids": step_ranks.rows_of(task)})
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    memory = PeakMemory()
    SFTTrainer(
        model=task["base"],
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=step_ranks.lora_config(task),
        quantization_config=BitsAndBytesConfig(**BITSANDBYTES, **AS_BF16) if task["in_4_bits"] else None,
        callbacks=[memory_callback(memory)],
    ).train()
    return 0


# ---- The command


def measure_ours(size: Size, folder: Path, environment: dict[str, str], *, in_4_bits: bool) -> list[dict[str, int]]:
    from fsdp_tune.launch.command.accelerate import launch_plan
    from fsdp_tune.recipe.schema import Recipe
    from fsdp_tune.run.directory import RunDir

    run, file = RunDir(folder / "run"), folder / "recipe.json"
    file.write_text(json.dumps(recipe_of(size, folder.parent, run.path, lora=True, in_4_bits=in_4_bits)), encoding="utf-8")
    command = [sys.executable, "-m", "fsdp_tune", "train", "--config", str(file), "--no-start", "--ignore-plan"]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    recipe = Recipe.model_validate_json(run.recipe_json.read_bytes())
    plan = launch_plan(recipe, run, worker_module="lora_memory", inherited=environment | {RESULT: str(folder / "memory")})
    return finished([subprocess.Popen(plan.argv, env=plan.env, stdout=subprocess.DEVNULL)], folder)


def measure_trl(size: Size, folder: Path, environment: dict[str, str], way: dict[str, Any], python: str) -> list[dict[str, int]]:
    inputs = folder.parent
    task = {
        "world_size": RANKS,
        "device": "cpu",
        "base": str(inputs / "base"),
        "lora": LORA,
        **way,
        "batch": size.batch,
        "logging_steps": 1,
        "rows": str(inputs / "rows.jsonl"),
        "tokenizer": str(inputs / "tokenizer"),
        "folder": str(folder),
        "rendezvous": str(folder / "meeting"),
    }
    command = [python, str(HERE / "lora_memory.py"), "--rank-task", json.dumps(task)]
    environment = environment | {RESULT: str(folder / "memory")}
    return finished([subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.DEVNULL) for rank in range(RANKS)], folder)


def finished(processes: list[subprocess.Popen[bytes]], folder: Path) -> list[dict[str, int]]:
    """Wait for the processes, and return what each rank wrote."""
    for process in processes:
        process.wait()
    files = [folder / f"memory-{rank}.json" for rank in range(RANKS)]
    if not all(file.exists() for file in files):
        raise SystemExit(f"exit codes {[process.returncode for process in processes]}, no result in {folder}")
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def report(rounds: dict[str, list[list[dict[str, int]]]], base_bytes: int) -> None:
    print(f"{base_bytes / GIB:.2f} GiB of base weights in bf16, {base_bytes / RANKS / GIB:.2f} a rank")
    print("| | " + " | ".join(f"{phase}: rank {rank}" for phase in ("loading", "training") for rank in range(RANKS)) + " |")
    print("| --- |" + " ---: |" * 2 * RANKS)
    for name, found in rounds.items():
        cells = [
            statistics.median(ranks[rank][phase] for ranks in found) / GIB for phase in ("loading", "training") for rank in range(RANKS)
        ]
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", choices=sorted(HIDDEN), default="500m")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--trl-python", help="an interpreter that can import trl and bitsandbytes; without it ours runs alone")
    options = parser.parse_args()
    model = {"vocab_size": VOCABULARY}  # of the rows; the model is read from its directory
    size = Size(model, 1, TOKENS, (), rows=16, precision="bf16", world_size=RANKS)
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    rounds: dict[str, list[list[dict[str, int]]]] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-lora-memory-") as scratch:
        inputs = Path(scratch)
        write_rows(size, None, inputs)
        write_model(inputs / "base", options.parameters, "bfloat16")
        base_bytes = sum(file.stat().st_size for file in (inputs / "base").glob("*.safetensors"))
        for _ in range(options.rounds):
            for name, in_4_bits in OURS.items():
                folder = Path(tempfile.mkdtemp(dir=inputs))
                rounds.setdefault(name, []).append(measure_ours(size, folder, environment, in_4_bits=in_4_bits))
            for name, way in TRL.items() if options.trl_python else ():
                folder = Path(tempfile.mkdtemp(dir=inputs))
                rounds.setdefault(name, []).append(measure_trl(size, folder, environment, way, options.trl_python))
        report(rounds, base_bytes)


if __name__ == "__main__":
    if "--rank-task" in sys.argv:
        sys.exit(trl(json.loads(sys.argv[2]), int(sys.argv[3])))
    if "RANK" in os.environ:
        sys.exit(ours(sys.argv[1]))
    main()
