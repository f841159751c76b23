"""What the measured programs do otherwise than ours in the step, from their code; the rest of the traced step stays ours.

Each is a function that changes `fsdp_tune.model.loss` of the process that traces, as a test changes it.
"""

from __future__ import annotations

import multiprocessing
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_tune.plan.trace_format import Trace
from fsdp_tune.recipe.schema import Recipe


def logits_kept_in_fp32() -> None:
    """torchtitan until June 2024: `pred = model(...).float()` in the loop's frame, where it lives through the backward."""
    _replace(lambda logits: logits.float(), keep=True)


def logits_kept() -> None:
    """litgpt's pre-training: the cross-entropy in the logits' own dtype, and `logits` lives through the backward."""
    _replace(lambda logits: logits, keep=True)


def logits_shifted_in_fp32() -> None:
    """transformers before 4.45: fp32 logits, and a contiguous copy of all but the last token."""
    _replace(lambda logits: logits.float()[..., :-1, :].contiguous(), keep=False)


def _replace(prepare: Callable[[Any], Any], *, keep: bool) -> None:
    import torch.nn.functional as F

    from fsdp_tune.model import loss, step

    held: list[Any] = []

    def micro_batch_loss(model: Any, batch: dict[str, Any], label_smoothing: float = 0.0, *_: Any) -> tuple[Any, Any]:
        held.clear()
        logits = prepare(model(input_ids=batch["input_ids"], use_cache=False).logits)
        if keep:
            held.append(logits)
        labels = batch["labels"][..., 1:] if logits.shape[1] < batch["labels"].shape[1] else loss.shift_labels(batch["labels"])
        total = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), label_smoothing=label_smoothing)
        return total, total.detach() * 0

    step.micro_batch_loss = micro_batch_loss


def trace_in_child(recipe: Recipe, change: Callable[[], None] | None, file: Path, *, exact: bool) -> Trace | str:
    """The trace, or the traceback; kept in `file`."""
    if not file.exists():
        import fsdp_tune.trace.run  # noqa: F401  before the fork: the import is the long part

        context = multiprocessing.get_context("fork")
        reader, writer = context.Pipe(duplex=False)
        child = context.Process(target=_trace, args=(recipe, change, file, exact, writer))
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


def _trace(recipe: Recipe, change: Callable[[], None] | None, file: Path, exact: bool, writer: Any) -> None:  # noqa: FBT001
    from fsdp_tune.trace.run import trace_recipe

    warnings.simplefilter("ignore")
    try:
        if change is not None:
            change()
        trace_recipe(recipe, exact=exact).save(file)
        writer.send(None)
    except Exception:  # noqa: BLE001  the row is listed with it
        writer.send(traceback.format_exc())
