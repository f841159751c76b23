"""The stock stack: transformers.Trainer and Accelerate's own FSDP on CPU ranks. Rank functions for
test_stack.py."""

from __future__ import annotations

import os
from typing import Any


def rows(count: int = 32) -> list[dict[str, Any]]:
    import torch

    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 257, (16,), generator=draw) for _ in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def make_trainer(model: str, folder: str, *, configured: bool = True, **options: Any) -> Any:
    """Build a stock Trainer. `configured` sets Accelerate's state so that it takes its FSDP branch on CPU."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    if configured:
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        options |= {"accelerator_config": {"use_configured_state": True}}
    options = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "fsdp": True,
        "fsdp_config": {"version": 2},
    } | options
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        logging_steps=1,
        save_strategy=options.pop("save_strategy", "no"),
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    return Trainer(model=AutoModelForCausalLM.from_pretrained(model), args=arguments, train_dataset=rows())


def history(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def train(model: str, folder: str, **options: Any) -> list[dict[str, float]]:
    trainer = make_trainer(model, folder, **options)
    trainer.train()
    return history(trainer)


def units(model: str, folder: str, **options: Any) -> dict[str, Any]:
    """What the stock path wraps, and in what precision."""
    from torch.distributed.fsdp import FSDPModule

    trainer = make_trainer(model, folder, **options)
    trainer.train()
    wrapped = trainer.model_wrapped
    policies = [
        module._get_fsdp_state()._mp_policy for module in wrapped.modules() if isinstance(module, FSDPModule)
    ]
    return {
        "wrapper": type(wrapped).__name__,
        "units": len(policies),
        "reduce_dtype": {str(policy.reduce_dtype) for policy in policies},
        "output_dtype": {str(policy.output_dtype) for policy in policies},
    }


def raised(model: str, folder: str, **options: Any) -> str:
    try:
        train(model, folder, **options)
    except Exception as error:  # noqa: BLE001  the message is what the test looks at
        return f"{type(error).__name__}: {error}"
    return "nothing"


def offload_policy(model: str, folder: str, **options: Any) -> str:
    return type(make_trainer(model, folder, **options).accelerator.state.fsdp_plugin.cpu_offload).__name__


def scaler(model: str, folder: str) -> tuple[str, bool]:
    trainer = make_trainer(model, folder, fp16=True)
    return repr(trainer.accelerator.scaler), bool(trainer.accelerator.native_amp)


def resumed_rate(model: str, folder: str) -> list[float]:
    """Learning rates of a run that is resumed at step 2 with ten times the rate."""
    train(
        model,
        folder,
        max_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=2,
    )
    _fresh_state()
    trainer = make_trainer(model, folder, max_steps=4, learning_rate=1e-2, lr_scheduler_type="constant")
    trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))  # noqa: PTH118
    return [entry["learning_rate"] for entry in history(trainer)]


def unsharded_bytes(wrapped: Any) -> int:
    """Bytes of unsharded gradients that FSDP2 keeps at this moment."""
    from fsdp_tune.model.shard.wrap import fsdp_groups

    total = 0
    for parameter in (parameter for group in fsdp_groups(wrapped) for parameter in group.fsdp_params):
        whole = getattr(parameter, "_unsharded_param", None)
        gradients = [parameter.unsharded_accumulated_grad, whole.grad if whole is not None else None]
        total += sum(gradient.nbytes for gradient in gradients if gradient is not None)
    return total


def kept_unsharded(model: str, folder: str) -> int:
    """Return the bytes of unsharded gradients between the first and the second micro-batch."""
    from transformers import TrainerCallback

    seen: list[int] = []

    class Watch(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(unsharded_bytes(trainer.model_wrapped))

    trainer = make_trainer(
        model, folder, gradient_accumulation_steps=2, per_device_train_batch_size=2, max_steps=1
    )
    trainer.add_callback(Watch())
    trainer.train()
    return seen[0]


def run_watching_gradients(path: str) -> dict[str, Any]:
    """On a rank: our worker; writes the largest number of bytes of unsharded gradients that any micro-batch
    left."""
    from unittest.mock import patch

    from fsdp_tune.worker.trainer import FsdpTrainer
    from tests.parity.runs import run_worker

    original, seen = FsdpTrainer.training_step, [0]

    def training_step(self: Any, *arguments: Any) -> Any:
        loss = original(self, *arguments)
        seen.append(unsharded_bytes(self.wrapped))
        return loss

    with patch.object(FsdpTrainer, "training_step", training_step):
        outcome = run_worker(path)
    return outcome | {"unsharded_bytes": max(seen)}


def saved_files(model: str, folder: str) -> list[str]:
    trainer = make_trainer(
        model, folder, max_steps=1, fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
    )
    trainer.train()
    trainer.save_model(folder)
    return sorted(os.listdir(folder))  # noqa: PTH208


def _fresh_state() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
