"""The rank processes of `step.py`, of one contender: each runs the requested number of steps, and prints what
they took.

    step_ranks.py TASK.json RANK   a contender of others: bare, hf, trl, padding
    -m step_ranks RUN_DIR          ours: the worker as `accelerate launch` starts it

Only torch, transformers and TRL are imported for the others' contenders, and nothing of the package.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any
from unittest.mock import patch

AUTHORITY = b"benchmark"
ADDRESS, NAME, WARM_UP_STEPS = "STEP_BENCHMARK_ADDRESS", "STEP_BENCHMARK_NAME", "STEP_BENCHMARK_WARM_UP_STEPS"


class Gate:
    """Called after each optimizer step; stands still between two rounds."""

    def __init__(self) -> None:
        self._to_controller = Client(os.environ[ADDRESS], "AF_UNIX", authkey=AUTHORITY)
        self._left = int(os.environ[WARM_UP_STEPS])
        self._started: tuple[float, float] | None = None

    def __call__(self) -> None:
        self._left -= 1
        if self._left:
            return
        finish_queue()
        if self._started is None:
            self._to_controller.send((os.environ[NAME], int(os.environ["RANK"])))
        else:
            wall, cpu = time.perf_counter(), time.process_time()
            self._to_controller.send((wall - self._started[0], cpu - self._started[1]))
        self._left = self._to_controller.recv()
        if self._left == 0:
            sys.stdout.flush()
            os._exit(0)
        self._started = time.perf_counter(), time.process_time()


class Stopwatch:
    """In the gate's place where a loop runs alone: times the steps after the first ones, writes what they
    took, and ends the process."""

    def __init__(self, result: str, steps: int, warm_up_steps: int) -> None:
        self._result, self._steps, self._warm_up_steps = Path(result), steps, warm_up_steps
        self._count, self._started = 0, 0.0

    def __call__(self) -> None:
        self._count += 1
        if self._count == self._warm_up_steps:
            finish_queue()
            self._started = time.perf_counter()
        elif self._count == self._warm_up_steps + self._steps:
            finish_queue()
            step_seconds = (time.perf_counter() - self._started) / self._steps
            self._result.write_text(json.dumps({"step_seconds": step_seconds, **peaks()}), encoding="utf-8")
            sys.stdout.flush()
            os._exit(0)


def finish_queue() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def peaks() -> dict[str, float | None]:
    import torch

    if not torch.cuda.is_initialized():
        return {"allocated_gib": None, "reserved_gib": None}
    return {
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def gate_callback() -> Any:
    from transformers import TrainerCallback

    class Gated(TrainerCallback):
        def __init__(self) -> None:
            self._gate = Gate()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self._gate()

    return Gated()


def ours(run_dir: str) -> int:
    """`python -m fsdp_tune.worker RUN_DIR`, with one callback more."""
    from fsdp_tune.worker import __main__ as worker
    from fsdp_tune.worker.main import read_recipe, run_directory
    from fsdp_tune.worker.rank import set_environment

    run = run_directory(run_dir)
    recipe = read_recipe(run)
    set_environment(recipe, run)  # before transformers is imported, as the worker does
    from fsdp_tune.worker import setup

    if recipe.launch.device == "cuda" and recipe.lora is None:
        from gpu_runs import draw_on_the_device

        draw_on_the_device()

    patch.object(
        setup, "user_callbacks", lambda _recipe: [gate_callback()]
    ).start()  # raises if it was renamed
    return worker.main([run_dir])


def join(task: dict[str, Any], rank: int) -> None:
    import torch
    import torch.distributed as dist

    size, device = task["world_size"], task["device"]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    # Accelerate asks for them; the ranks have met already
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    if device == "cuda":
        torch.cuda.set_device(rank)
        own: dict[str, Any] = {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", rank)}
    else:
        torch.set_num_threads(1)
        own = {"backend": "gloo"}
    meeting = f"file://{task['rendezvous']}"
    dist.init_process_group(
        init_method=meeting, rank=rank, world_size=size, timeout=timedelta(minutes=30), **own
    )


def rows_of(task: dict[str, Any]) -> list[list[int]]:
    return [
        json.loads(line)["input_ids"] for line in Path(task["rows"]).read_text(encoding="utf-8").splitlines()
    ]


def new_model(task: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**task["model"])
    with torch.device(task["device"]):
        return AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, task["dtype"]), attn_implementation="sdpa"
        ).train()


def lora_config(task: dict[str, Any]) -> Any:
    """Return PEFT's configuration of the adapters that are trained, or None."""
    from peft import LoraConfig

    return None if task["lora"] is None else LoraConfig(task_type="CAUSAL_LM", **task["lora"])


def adapted(model: Any, task: dict[str, Any]) -> Any:
    from peft import get_peft_model

    return model if task["lora"] is None else get_peft_model(model, lora_config(task))


def bare(task: dict[str, Any], rank: int) -> None:
    """The loop that one would write by hand: `fully_shard` with the same units, a loss weighted by tokens,
    clipping, AdamW, a schedule.

    `dtype`: of the stored weights; `compute_dtype`: what the units are cast to; `recompute`: every decoder
    layer.
    """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    size, device = task["world_size"], task["device"]
    model = sharded(task)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 1_000_000))
    rows, batch = torch.tensor(rows_of(task)), task["batch"]
    gate = Stopwatch(task["result"], task["steps"], task["warm_up_steps"]) if "result" in task else Gate()
    logged = torch.zeros((), dtype=torch.float64, device=device)
    for step in range(1, 1_000_000):
        order = torch.arange(step * batch, (step + 1) * batch) * size + rank
        ids = rows[order % len(rows)]
        targets = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
        tokens = (targets != -100).sum().double()
        dist.all_reduce(tokens)
        share = size / tokens.item()
        ids, targets = ids.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        logits = model(input_ids=ids, use_cache=False).logits.float()
        loss = F.cross_entropy(
            logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-100, reduction="sum"
        )
        (loss * share).float().backward()
        logged += loss.detach() * (share / size)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % task["logging_steps"] == 0:
            dist.all_reduce(logged)
            print(step, logged.item() / task["logging_steps"], norm.full_tensor().item(), flush=True)  # pyright: ignore[reportAttributeAccessIssue]  a DTensor
            logged.zero_()
        gate()


def sharded(task: dict[str, Any]) -> Any:
    """The model with FSDP2's units: layers, embedding, norm with the head, and the root."""
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = adapted(new_model(task), task)
    if task["lora"] is not None:
        model = model.get_base_model()  # PEFT's layers are in it
    compute = getattr(torch, task["compute_dtype"])
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == torch.float32 else compute, reduce_dtype=torch.float32
    )
    options: dict[str, Any] = {
        "mesh": init_device_mesh(task["device"], (task["world_size"],)),
        "mp_policy": policy,
    }
    for number, layer in enumerate(model.model.layers):
        if task["recompute"]:
            model.model.layers[number] = layer = checkpoint_wrapper(layer)
        fully_shard(layer, **options)
    fully_shard(model.model.embed_tokens, **options)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    if task["lora"] is not None:  # else the backward would gather the frozen embedding again
        model.model.layers[0].set_modules_to_backward_prefetch([model.model.layers[0]])
    return model


def options_of(task: dict[str, Any]) -> dict[str, Any]:
    """Of TrainingArguments, the same for each trainer. Accelerate takes FSDP on CPU ranks only from a state
    that says so."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    return {
        "output_dir": task["folder"],
        "use_cpu": True,
        "accelerator_config": {"use_configured_state": True},
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        "per_device_train_batch_size": task["batch"],
        "max_steps": 1_000_000,
        "learning_rate": 1e-4,
        "weight_decay": 0.1,
        "bf16": False,
        "logging_steps": task["logging_steps"],
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def hf(task: dict[str, Any], _rank: int) -> None:
    """transformers' Trainer with Accelerate's FSDP, as documented."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    rows = rows_of(task)
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    model = adapted(new_model(task), task)
    Trainer(
        model=model,
        args=TrainingArguments(**options_of(task)),
        train_dataset=data,
        callbacks=[gate_callback()],
    ).train()


def padding(task: dict[str, Any], _rank: int) -> None:
    """The usual tutorial: `tokenizer(…, padding="max_length", truncation=True)`, and labels that leave the
    padding out."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    width, columns = task["max_length"], {"input_ids": [], "attention_mask": [], "labels": []}  # type: ignore[var-annotated]
    for row in (row[:width] for row in rows_of(task)):
        rest = width - len(row)
        columns["input_ids"].append(row + [0] * rest)
        columns["attention_mask"].append([1] * len(row) + [0] * rest)
        columns["labels"].append(row + [-100] * rest)
    model, arguments = adapted(new_model(task), task), TrainingArguments(**options_of(task))
    Trainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict(columns), callbacks=[gate_callback()]
    ).train()


def trl(task: dict[str, Any], _rank: int) -> None:
    """TRL's SFTTrainer on rows that are tokenised already; with packing it is best-fit decreasing, as
    ours."""
    from datasets import Dataset
    from transformers import AutoTokenizer, BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    options = options_of(task) | {
        "max_length": task["max_length"],
        "packing": task["packing"],
        "gradient_checkpointing": False,
    }
    quantised = task["bitsandbytes"]
    trainer = SFTTrainer(
        model=task["base"] if quantised else new_model(task),
        args=SFTConfig(**options),
        train_dataset=Dataset.from_dict({"input_ids": rows_of(task)}),
        processing_class=AutoTokenizer.from_pretrained(task["tokenizer"]),
        peft_config=lora_config(task),
        quantization_config=BitsAndBytesConfig(**quantised, bnb_4bit_quant_storage=task["dtype"])
        if quantised
        else None,
        callbacks=[gate_callback()],
    )
    rows: Any = trainer.train_dataset
    lengths = [sum(row["seq_lengths"]) if "seq_lengths" in row else len(row["input_ids"]) for row in rows]
    Path(task["folder"], "tokens_per_row").write_text(str(sum(lengths) / len(lengths)), encoding="ascii")
    trainer.train()


CONTENDERS = {"bare": bare, "hf": hf, "trl": trl, "padding": padding}


def main(arguments: list[str]) -> int:
    if len(arguments) == 1:
        return ours(arguments[0])
    task = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    join(task, int(arguments[1]))
    CONTENDERS[task["contender"]](task, int(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
