"""Planted bugs, each of a kind that such software has had: the parity check must detect every one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from tests.parity.runs import run_worker


def run_broken(path: str, name: str) -> dict[str, Any]:
    """Run the worker on a rank with one bug. The checks before step 1 are disabled, so that the numbers must
    show the bug."""
    no_differences = patch("fsdp_tune.worker.readback.report.differences", lambda *arguments: [])
    no_isolation_check = patch(
        "fsdp_tune.worker.callbacks.RunCallback._check_what_tokens_see", lambda callback: None
    )
    with no_differences, no_isolation_check, BREAKS[name]():
        return run_worker(path)


def run_broken_with_checks(path: str, name: str) -> dict[str, Any]:
    """Run the worker on a rank with one bug, and with the checks that every run has."""
    with BREAKS[name]():
        return run_worker(path)


@contextmanager
def average_loss_per_rank() -> Iterator[None]:
    """Each rank divides by its own tokens, and the ranks' means are averaged (transformers#34191)."""
    import torch.distributed as dist

    from fsdp_tune.worker.trainer import FsdpTrainer

    original = FsdpTrainer.get_batch_samples

    def get_batch_samples(self: Any, *arguments: Any) -> Any:
        batches, total = original(self, *arguments)
        mine = sum(batch.supervised_tokens for batch in batches)
        return batches, 0 * total + max(1, mine) * dist.get_world_size()

    with patch.object(FsdpTrainer, "get_batch_samples", get_batch_samples):
        yield


@contextmanager
def average_loss_per_micro_batch() -> Iterator[None]:
    import torch.distributed as dist

    from fsdp_tune.worker.trainer import FsdpTrainer

    original = FsdpTrainer.training_step

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        micro_batches = self.args.gradient_accumulation_steps
        weight = (
            0 * num_items_in_batch + max(1, inputs.supervised_tokens) * dist.get_world_size() * micro_batches
        )
        return original(self, model, inputs, weight)

    with patch.object(FsdpTrainer, "training_step", training_step):
        yield


@contextmanager
def recompute_without_rng_state() -> Iterator[None]:
    """Recompute as Accelerate's FSDP2 path does."""
    from torch.utils.checkpoint import checkpoint

    def forgetful(*arguments: Any, preserve_rng_state: bool, **options: Any) -> Any:
        return checkpoint(*arguments, preserve_rng_state=False, **options)

    with patch("fsdp_tune.model.shard.recompute.checkpoint", forgetful):
        yield


@contextmanager
def drop_position_ids() -> Iterator[None]:
    from fsdp_tune.data.collate import collate

    def without_positions(*arguments: Any, **options: Any) -> Any:
        return {
            name: array for name, array in collate(*arguments, **options).items() if name != "position_ids"
        }

    with patch("fsdp_tune.worker.rows.batches.collate", without_positions):
        yield


@contextmanager
def reduce_gradients_in_bf16() -> Iterator[None]:
    import torch

    from fsdp_tune.model.shard import wrap

    original = wrap.mixed_precision_policy

    def policy(recipe: Any) -> Any:
        import dataclasses

        return dataclasses.replace(original(recipe), reduce_dtype=torch.bfloat16)

    with patch.object(wrap, "mixed_precision_policy", policy):
        yield


@contextmanager
def compute_loss_in_bf16() -> Iterator[None]:
    """Round logits to bf16, as Accelerate's `output_dtype` does."""
    from fsdp_tune.model import step

    original = step.summed_token_loss

    def rounded(logits: Any, *arguments: Any) -> Any:
        return original(logits.bfloat16(), *arguments)

    with patch.object(step, "summed_token_loss", rounded):
        yield


@contextmanager
def never_last_micro_batch() -> Iterator[None]:
    """Treat the last micro-batch of a step as one between: replicas are not summed, or units stay gathered
    while shards are updated."""
    from fsdp_tune.model.shard.wrap import begin_micro_batch
    from fsdp_tune.worker import trainer

    def as_between(recipe: Any, wrapped: Any, *, is_last: bool) -> None:
        begin_micro_batch(recipe, wrapped, is_last=False)

    with patch.object(trainer, "begin_micro_batch", as_between):
        yield


@contextmanager
def leave_adapters_out_of_units() -> Iterator[None]:
    """As if adapters were injected after wrapping: in full on every rank, and their gradients are not
    reduced."""
    from fsdp_tune.model.adapters.lora import is_of_adapter
    from fsdp_tune.model.shard import wrap

    def ignored(recipe: Any, model: Any) -> Any:
        return {parameter for name, parameter in model.named_parameters() if is_of_adapter(name)}

    with patch.object(wrap, "ignored_parameters", ignored):
        yield


@contextmanager
def save_one_slice() -> Iterator[None]:
    """Write the part of a parameter that rank 0 holds (accelerate#4206)."""
    from fsdp_tune.model.shard.local import local_part
    from fsdp_tune.worker.checkpoint import state

    original = state.get_model_state_dict

    def slices(*arguments: Any, **options: Any) -> Any:
        return {name: local_part(value) for name, value in original(*arguments, **options).items()}

    with patch.object(state, "get_model_state_dict", slices):
        yield


@contextmanager
def scale_twice() -> Iterator[None]:
    from fsdp_tune.model.loading import construct

    original = construct.inject_lora

    def inject(recipe: Any, model: Any, dtype: Any) -> None:
        original(recipe, model, dtype)
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.scaling["default"] **= 2

    with patch.object(construct, "inject_lora", inject):
        yield


@contextmanager
def scale_twice_in_forward() -> Iterator[None]:
    """As a fused kernel would that multiplies by a scale that is in its input already."""
    from peft.tuners.lora import Linear

    original = Linear.forward

    def forward(self: Any, x: Any, *arguments: Any, **options: Any) -> Any:
        plain = self.base_layer(x)
        return plain + self.scaling["default"] * (original(self, x, *arguments, **options) - plain)

    with patch.object(Linear, "forward", forward):
        yield


def _factors_b(model: Any) -> list[Any]:
    """The B matrices of the second layer."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if ".layers.1." in name and ".lora_B." in name
    ]


@contextmanager
def keep_b_of_one_layer() -> Iterator[None]:
    """The optimizer's update of B does not reach the parameters of one layer."""
    import torch

    from fsdp_tune.worker.trainer import FsdpTrainer

    original = FsdpTrainer.create_optimizer

    def create_optimizer(self: Any, *arguments: Any) -> Any:
        optimizer = original(self, *arguments)
        kept = [(factor, factor.detach().clone()) for factor in _factors_b(self.wrapped)]

        def put_back(*_: Any) -> None:
            with torch.no_grad():
                for factor, before in kept:
                    factor.copy_(before)

        optimizer.register_step_post_hook(put_back)
        return optimizer

    with patch.object(FsdpTrainer, "create_optimizer", create_optimizer):
        yield


@contextmanager
def lose_gradients_of_b_in_one_layer() -> Iterator[None]:
    from fsdp_tune.worker.trainer import FsdpTrainer

    original = FsdpTrainer._clip_grad_norm

    def clip(self: Any, model: Any) -> Any:
        for factor in _factors_b(self.wrapped):
            factor.grad = None
        return original(self, model)

    with patch.object(FsdpTrainer, "_clip_grad_norm", clip):
        yield


@contextmanager
def cast_bytes_of_4_bits() -> Iterator[None]:
    """Cast the bytes as bf16 numbers, which turns some pairs into another NaN (bitsandbytes#1945)."""
    import torch

    from fsdp_tune.model.adapters import nf4

    original = nf4.dequantise

    def cast(packed: Any, scales: Any, dtype: Any) -> Any:
        return original(packed.view(torch.bfloat16).float().bfloat16().view(torch.uint8), scales, dtype)

    with patch.object(nf4, "dequantise", cast):
        yield


@contextmanager
def number_positions_of_each_rank_from_zero() -> Iterator[None]:
    import torch

    from fsdp_tune.model import step

    original = step.model_inputs

    def local(batch: Any) -> Any:
        inputs = original(batch)
        ids = inputs["input_ids"]
        return inputs | {"position_ids": torch.arange(ids.shape[1]).expand_as(ids)}

    with patch.object(step, "model_inputs", local):
        yield


@contextmanager
def shift_labels_of_each_rank() -> Iterator[None]:
    """Shift labels after rows are divided: the last token of a rank has no target."""
    import torch

    from fsdp_tune.model import step

    original = step.shift_labels

    def shift(labels: Any) -> Any:
        return torch.cat([original(part) for part in labels.chunk(2, 1)], 1)

    with patch.object(step, "shift_labels", shift):
        yield


@contextmanager
def exchange_into_other_strides() -> Iterator[None]:
    """Receive into a tensor with the strides of the one that is sent, as `empty_like` makes it."""
    import torch
    import torch.distributed as dist

    def exchanged(parts: Any, group: Any, *_equal: None) -> Any:
        received = torch.empty_like(parts)
        flat = received.as_strided((received.numel(),), (1,))
        dist.all_to_all_single(flat, parts.contiguous().view(-1), group=group)
        return received

    with patch("fsdp_tune.model.shard.exchange.exchanged", exchanged):
        yield


@contextmanager
def average_over_data_ranks_alone() -> Iterator[None]:
    from fsdp_tune.core.topology import Topology

    with patch.object(Topology, "gradient_size", property(lambda self: self.data_size)):
        yield


@contextmanager
def count_shared_rows_on_each_rank() -> Iterator[None]:
    from fsdp_tune.core.topology import Topology

    with patch.object(Topology, "counts_rows", lambda self, rank: True):
        yield


def _replaced(target: str, value: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    return functools.partial(patch, target, value)


def _no_clipping(norm: Any, max_norm: float) -> Any:
    return norm * 0 + 1


def _repeated_rows(rows: int, *, data_rank: int, data_size: int, micro_batch: int) -> list[list[int]]:
    """A sampler that fills the last batch with rows from the front, as torch's DistributedSampler does."""
    count = -(-rows // (data_size * micro_batch))
    mine = [(data_rank + data_size * index) % rows for index in range(count * micro_batch)]
    return [mine[start : start + micro_batch] for start in range(0, len(mine), micro_batch)]


BREAKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "loss averaged per rank": average_loss_per_rank,
    "loss averaged per micro-batch": average_loss_per_micro_batch,
    "loss averaged per micro-batch of a token budget": average_loss_per_micro_batch,
    "recomputation without preserved RNG state": recompute_without_rng_state,
    "packed examples not isolated": drop_position_ids,
    "gradients summed in bf16": reduce_gradients_in_bf16,
    "loss computed in bf16": compute_loss_in_bf16,
    "replicas not synchronised": never_last_micro_batch,
    "units gathered after the last micro-batch": never_last_micro_batch,
    "weight decay on norms": _replaced("fsdp_tune.model.shard.local.decays", lambda name, parameter: True),
    "no weight decay": _replaced("fsdp_tune.model.shard.local.decays", lambda name, parameter: False),
    "no clipping": _replaced("fsdp_tune.worker.step_checks.clip_factor", _no_clipping),
    "optimizer state not restored on resume": _replaced(
        "fsdp_tune.worker.prepared_trainer.restore_optimizer", lambda live, path: None
    ),
    "schedule not restored on resume": _replaced(
        "fsdp_tune.worker.prepared_trainer.restore_schedule", lambda scheduler, step: None
    ),
    "evaluation repeats rows": _replaced("fsdp_tune.worker.eval_sets.eval_batches", _repeated_rows),
    "adapters outside of the units": leave_adapters_out_of_units,
    "adapter saved as one rank's slice": save_one_slice,
    "adapter scaled twice": scale_twice,
    "adapter scaled twice in the forward": scale_twice_in_forward,
    "B of one layer not updated": keep_b_of_one_layer,
    "gradients of B lost in one layer": lose_gradients_of_b_in_one_layer,
    "bytes of 4 bits cast": cast_bytes_of_4_bits,
    "matrices orthogonalised on the shard": _replaced(
        "fsdp_tune.model.optim.adafactor.sharding_of", lambda parameter: None
    ),
    "means over the shard": _replaced("fsdp_tune.model.optim.adafactor.sharding_of", lambda parameter: None),
    "positions of each rank from zero": number_positions_of_each_rank_from_zero,
    "labels shifted after rows are divided": shift_labels_of_each_rank,
    "tokens exchanged into other strides": exchange_into_other_strides,
    "loss averaged over data ranks alone": average_over_data_ranks_alone,
    "shared rows counted on each rank": count_shared_rows_on_each_rank,
    "dropout of adapters equal on all ranks": _replaced(
        "fsdp_tune.worker.prepared_trainer.seed_for_rank", lambda seed, step: seed
    ),
}
