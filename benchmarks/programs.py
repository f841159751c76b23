"""What the measured programs do otherwise than ours in the step, from their code; the rest of the traced step
stays ours.

Each is a function that changes the process that traces, as a test changes it. Kernels that only a GPU has
stand for what they allocate: what they save for the backward, and what the backward gives back.
"""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema.recipe import Recipe

Change = Callable[[Recipe], None]


def keys_expanded(_recipe: Recipe) -> None:
    """torchtitan, litgpt and torchtune repeat keys and values to the number of query heads before attention,
    which keeps the copies."""
    from transformers.integrations import sdpa_attention

    sdpa_attention.use_gqa_in_sdpa = lambda *_: False


def norm_weight_in_fp32(recipe: Recipe) -> None:
    """litgpt's RMSNorm: also the multiplication by the weight is in fp32, which saves one more tensor in
    it."""

    def forward(norm: Any, x: Any) -> Any:
        import torch

        wide = x.float()
        normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
        return (normed * norm.weight.float()).to(x.dtype)

    for kind in _classes(recipe, "RMSNorm"):
        kind.forward = forward


def fused_layers(recipe: Recipe) -> None:
    """Norm, rotary embedding and the gated activation in one kernel each: FOAK's, and what Inductor makes of
    a compiled layer."""
    from fused import gated, normed, rotated

    for kind in _classes(recipe, "RMSNorm"):
        kind.forward = lambda norm, x: normed(x, norm.weight)
    for kind in _classes(recipe, "MLP"):
        if "gate_proj" in kind.__init__.__code__.co_names:
            kind.forward = lambda mlp, x: mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x)))
    modeling = _modeling(recipe)
    if hasattr(modeling, "apply_rotary_pos_emb"):
        modeling.apply_rotary_pos_emb = lambda q, k, *_args, **_options: rotated(q, k)


def _modeling(recipe: Recipe) -> Any:
    config: Any = recipe.model.from_config
    return importlib.import_module(
        f"transformers.models.{config['model_type']}.modeling_{config['model_type']}"
    )


def _classes(recipe: Recipe, word: str) -> list[Any]:
    found = [
        value for name, value in vars(_modeling(recipe)).items() if word in name and isinstance(value, type)
    ]
    assert found or word == "RMSNorm", f"no class of the model has {word} in its name"
    return found


def no_wrapper(_recipe: Recipe) -> None:
    """One GPU without DDP, which would keep buckets beside the gradients while it accumulates."""
    import contextlib

    from fsdp_tune.model.loading.assemble import wrap_whole
    from fsdp_tune.model.shard import wrap
    from fsdp_tune.planner.trace import traced_step as step

    wrap._wrap_ddp = lambda model, _device: model
    step.wrap_traceable = lambda recipe, model, where, _recorder, _bare: wrap_whole(
        recipe, model, None, where
    )
    step._no_sync = lambda _wrapped: contextlib.nullcontext()


def fp32_kept(_recipe: Recipe) -> None:
    """torchtitan until June 2024: `pred = model(...).float()` in the loop's frame, where it lives through the
    backward."""
    _replace(widen=True, keep=True)


def own_dtype_kept(_recipe: Recipe) -> None:
    """litgpt's pre-training: the cross-entropy in the logits' own dtype, and `logits` lives through the
    backward."""
    _replace(keep=True)


def fp32_shifted(_recipe: Recipe) -> None:
    """transformers before 4.45: fp32 logits, and a contiguous copy of all but the last token."""
    _replace(widen=True, shift=True)


def in_place(_recipe: Recipe) -> None:
    """FOAK's cross-entropy: on the shifted fp32 logits, which its gradient overwrites; no
    log-probabilities."""
    from fused import loss_over_logits

    _replace(widen=True, shift=True, loss=loss_over_logits)


def compiled(_recipe: Recipe) -> None:
    """A cross-entropy that Inductor compiled (torchtitan since August 2025): the logits in their own dtype,
    two fp32 numbers a token."""
    from fused import compiled_loss

    _replace(loss=compiled_loss)


def _replace(
    *,
    widen: bool = False,
    shift: bool = False,
    keep: bool = False,
    loss: Callable[[Any, Any], Any] | None = None,
) -> None:
    import torch.nn.functional as F

    from fsdp_tune.model import step
    from fsdp_tune.model import step as ours

    held: list[Any] = []

    def micro_batch_loss(
        model: Any, batch: dict[str, Any], label_smoothing: float = 0.0, *_: Any
    ) -> tuple[Any, Any]:
        held.clear()
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        if widen:
            logits = logits.float()
        if keep:
            held.append(logits)
        used = logits[..., :-1, :].contiguous() if shift else logits
        labels = batch["labels"][..., 1:] if shift else ours.shift_labels(batch["labels"])
        rows, targets = used.reshape(-1, used.shape[-1]), labels.reshape(-1)
        total = (
            F.cross_entropy(rows, targets, label_smoothing=label_smoothing)
            if loss is None
            else loss(rows, targets)
        )
        return total, total.detach() * 0

    step.micro_batch_loss = micro_batch_loss


def trace_in_child(recipe: Recipe, changes: Sequence[Change], file: Path, *, exact: bool) -> Trace | str:
    """The trace, or the traceback; kept in `file`."""
    if not file.exists():
        import fsdp_tune.planner.trace.trace_recipe  # noqa: F401  before the fork: the import is the long part

        context = multiprocessing.get_context("fork")
        reader, writer = context.Pipe(duplex=False)
        child = context.Process(target=_trace, args=(recipe, changes, file, exact, writer))
        child.start()
        writer.close()
        try:
            problem: str | None = reader.recv()
        except EOFError:
            problem = "the process that traced has died"
        child.join()
        if problem is not None:
            return problem
    return Trace.load(file)


def _trace(recipe: Recipe, changes: Sequence[Change], file: Path, exact: bool, writer: Any) -> None:  # noqa: FBT001
    from fsdp_tune.planner.trace.trace_recipe import trace_recipe

    warnings.simplefilter("ignore")
    try:
        for change in changes:
            change(recipe)
        trace_recipe(recipe, exact=exact).save(file)
        writer.send(None)
    except Exception:  # noqa: BLE001  the row is listed with it
        writer.send(traceback.format_exc())
