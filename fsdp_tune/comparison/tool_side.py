"""Run the trainer of another tool on a small model and a few rows, and observe the stages of a comparison.

    python -m fsdp_tune.comparison.tool_side

Started with the interpreter of the tool's environment, which has no package that fsdp_tune needs: of
fsdp_tune it imports only modules of `comparison/` that import nothing else: `both_sides.py`, `tool_rows.py`,
`tool_trainers.py`, and a module for each tool. A request is a line on stdin, the fields of a
`ToolRequest`. The answer is a line on stdout, the fields of an `Observation`.

The trainer is built without truncation and packing for the tokens, and again as the file has it for
everything else.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsdp_tune.comparison.axolotl_trainers import AxolotlTrainers
from fsdp_tune.comparison.both_sides import (
    AUTOCAST,
    DRAWN,
    ROUNDING,
    SMALL_MODEL,
    cut_length,
    dropouts,
    dtype_text,
    is_drawn,
    plain_name,
    settle_draws,
    summary,
)
from fsdp_tune.comparison.tool_rows import ToolRows, step_rows
from fsdp_tune.comparison.tool_trainers import (
    IGNORE_INDEX,
    PACKAGES,
    Facts,
    NotShownError,
    ToolRequest,
    ToolTrainers,
)
from fsdp_tune.comparison.trl_trainers import TrlTrainers

TRAINERS: dict[str, Callable[..., ToolTrainers]] = {"TRL": TrlTrainers, "axolotl": AxolotlTrainers}
"""By the name of the tool. Called with the request, the rows and the source of each, a folder, and what lists
what is left out."""


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


NEEDED = ("tokens", "rows", "model")
"""Stages without which no later one can be computed."""


class _ToolSide(ToolRows):
    def __init__(self, request: ToolRequest) -> None:
        super().__init__(request)
        self.torch: Any = importlib.import_module("torch")
        self.data: list[Facts] = []
        folder = tempfile.mkdtemp(dir=Path(request.rows).parent)
        self.tool: ToolTrainers = TRAINERS[request.tool](
            request, self.raw, self.sources, folder, self.leave_out
        )
        self.trainer: Any = None
        self.losses: list[float] = []
        self.sequences = 0  # of a step, on all ranks

    def parts(self) -> list[tuple[Callable[[], None], Sequence[str]]]:
        return [
            (self._examples, ("tokens", "labels")),
            (self._rows, ("rows", "batch", "items", "order")),
            (self._model, ("model", "dtypes", "weights")),
            (self._rate, ("rate",)),
            (self._forward, ("logits", "row_losses")),
            (self._train, ("loss", "gradients", "clipping", "update")),
        ]

    def _examples(self) -> None:
        trainer = self.tool.complete()
        rows = self.tool.rows(trainer)
        if len(rows) != len(self.keys):
            raise ValueError(f"{len(self.keys)} rows became {len(rows)} examples")
        batches = [self.tool.collated(trainer, [row]) for row in rows]
        labels = [
            batch["labels"][0, : len(row["input_ids"])].tolist()
            for batch, row in zip(batches, rows, strict=True)
        ]
        tokenizer = trainer.processing_class
        self.set_examples([list(row["input_ids"]) for row in rows], labels, tokenizer.decode)

    def _rows(self) -> None:
        request = self.request
        batch = self.tool.batch()
        micro_batch, self.autocast = batch.micro_batch, batch.autocast
        self.sequences = micro_batch * batch.accumulation * request.ranks
        self.count = min(self.sequences, request.model_rows)
        self.size = min(micro_batch, self.count)
        self.trainer = trainer = self.tool.small(self.size, math.ceil(self.count / self.size))
        self.data[:] = self.tool.rows(trainer)
        is_wrapped = bool(getattr(trainer.args, "packing", False)) and "seq_lengths" not in self.data[0]
        self.set_rows(
            [(list(row["input_ids"]), row.get("seq_lengths")) for row in self.data], is_wrapped=is_wrapped
        )
        self.stages["batch"] = {"values": {"sequences": self.sequences}}
        items: Facts = {}
        for step in range(request.ordered_steps):
            chosen = step_rows(step, len(self.data), self.sequences)
            batches = [
                self._collated(chosen[at : at + micro_batch]) for at in range(0, len(chosen), micro_batch)
            ]
            items[f"step {step + 1}"] = self._items(batches)
        self.stages["items"] = {"values": items}
        self.stages["order"] = self._order()

    def _collated(self, indices: Sequence[int], rows: Sequence[Facts] | None = None) -> Facts:
        return self.tool.collated(self.trainer, [(rows or self.data)[index] for index in indices])

    def _items(self, batches: Sequence[Facts]) -> Any:
        """Return the number by which the Trainer divides the loss of a step; its own words if it does not."""
        given = [iter(batches), len(batches)]
        if "device" in inspect.signature(self.trainer.get_batch_samples).parameters:
            given.append(self.torch.device("cpu"))
        found = self.trainer.get_batch_samples(*given)[1]
        if found is None and len(batches) == self.request.ranks == 1:
            found = _trained(batches[0]["labels"])
        return "a mean of each micro-batch" if found is None else int(found)

    def _order(self) -> Facts:
        """Return the first rows of the Trainer's own sampler."""
        trainer, kept = self.trainer, self.trainer.data_collator
        if hidden := self.tool.own_order(trainer):
            return {"reason": hidden}
        rows = [tuple(row["input_ids"]) for row in self.data]
        index_of = {ids: number for number, ids in reversed(list(enumerate(rows)))}
        read: list[int] = []
        try:
            trainer.data_collator = lambda examples: {
                "rows": [index_of[tuple(_ids(example))] for example in examples]
            }
            for batch in trainer.get_train_dataloader():
                read += batch["rows"]
        finally:
            trainer.data_collator = kept
        pieces, size = self.stages["rows"]["values"], self.sequences
        first = [pieces[f"row {number}"][0][0] for number in read]
        steps = {
            f"step {step + 1}": [first[at] for at in step_rows(step, len(read), size)]
            for step in range(self.request.ordered_steps)
        }
        return {
            "values": steps,
            "drawn_by": None if read == [index_of[ids] for ids in rows] else "torch's generator",
        }

    def _model(self) -> None:
        model: Any = self.trainer.model
        parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        self.stages["model"] = {
            "values": dropouts(model) | {name: list(p.shape) for name, p in parameters.items()}
        }
        self.stages["dtypes"] = {
            "values": {name: dtype_text(p) for name, p in parameters.items()} | {AUTOCAST: self.autocast}
        }
        self.stages["weights"] = {
            "values": {name: summary(p.detach()) for name, p in parameters.items() if not is_drawn(name)}
        }
        if dropouts(model) or any(is_drawn(name) for name in parameters):
            self.leave_out(DRAWN)
        settle_draws(model)
        self.left_out += [SMALL_MODEL, ROUNDING]

    def _cut(self) -> list[Facts]:
        """Return the beginning of each row, with a trained token if it has one."""
        cut: list[Facts] = []
        for number, row in enumerate(self.data):
            labels = self._collated([number])["labels"][0].tolist()
            trained = [index for index, label in enumerate(labels) if label != IGNORE_INDEX]
            length = cut_length(
                len(row["input_ids"]), trained, self.request.model_tokens, self.request.after_first_target
            )
            shorter = {name: value[:length] for name, value in row.items() if name != "seq_lengths"}
            if "seq_lengths" in row:
                ends = [
                    min(sum(row["seq_lengths"][: at + 1]), length) for at in range(len(row["seq_lengths"]))
                ]
                shorter["seq_lengths"] = [
                    end - start for start, end in zip([0, *ends], ends, strict=False) if end > start
                ]
            cut.append(shorter)
        return cut

    def _forward(self) -> None:
        """Run each row alone, without dropout."""
        torch, model = self.torch, self.trainer.model
        model.eval()
        rows = self._cut()
        logits_of: Facts = {}
        losses: Facts = {}
        for number in step_rows(0, len(rows), self.sequences)[: self.request.model_rows]:
            inputs = self._collated([number], rows)
            labels = inputs.pop("labels")
            with torch.no_grad():
                logits = model(**inputs, use_cache=False).logits.float()
            used = logits[0, : len(rows[number]["input_ids"])]
            columns = torch.linspace(
                0, used.shape[-1] - 1, min(self.request.logit_columns, used.shape[-1])
            ).long()
            logits_of[f"row-id {number}"] = torch.cat(
                [used.logsumexp(-1, keepdim=True), used[:, columns]], dim=1
            ).tolist()
            with torch.no_grad():
                loss = self.trainer.compute_loss(
                    model, {**inputs, "labels": labels}, num_items_in_batch=torch.tensor(1)
                )
            is_mean = not getattr(self.trainer, "model_accepts_loss_kwargs", True)
            losses[f"row-id {number}"] = float(loss) * (_trained(labels) if is_mean else 1)
        self.stages["logits"], self.stages["row_losses"] = {"values": logits_of}, {"values": losses}

    def _train(self) -> None:
        """Let the Trainer run its first steps at the peak learning rate, and observe it."""
        transformers: Any = importlib.import_module("transformers")
        trainer, request = self.trainer, self.request
        rows, args = self._cut(), trainer.args
        self.losses.clear()
        count, size = self.count, self.size
        batches: list[Facts] = []
        for step in range(request.trained_steps):
            chosen = step_rows(step, len(rows), self.sequences)[: request.model_rows]
            batches += [self._collated(chosen[at : at + size], rows) for at in range(0, len(chosen), size)]
        args.max_steps, args.lr_scheduler_type, args.warmup_steps = (
            request.trained_steps,
            transformers.SchedulerType.CONSTANT,
            0,
        )
        args.warmup_ratio, args.lr_scheduler_kwargs = None, {}
        # of a DataLoader, axolotl changes how it reads its rows
        trainer.get_train_dataloader = lambda: batches
        self._watch_losses(trainer)
        watch = _GradientWatch(trainer, transformers.TrainerCallback)
        trained = {plain_name(name): p for name, p in trainer.model.named_parameters() if p.requires_grad}
        before = {name: p.detach().double().clone() for name, p in trained.items()}
        trainer.lr_scheduler = trainer.optimizer = None
        trainer.train()
        micro_batches = math.ceil(min(count, len(rows)) / size)
        self.stages["loss"] = {"values": {"step 1": sum(self.losses[:micro_batches])}}
        self.stages["gradients"], self.stages["clipping"] = watch.stages(float(args.max_grad_norm or 0.0))
        self.stages["update"] = {
            "values": {name: summary(p.detach().double() - before[name]) for name, p in trained.items()}
        }

    def _watch_losses(self, trainer: Any) -> None:
        step = trainer.training_step

        def observed(*positional: Any, **named: Any) -> Any:
            loss = step(*positional, **named)
            self.losses.append(float(loss))
            return loss

        trainer.training_step = observed

    def _rate(self) -> None:
        """Return the learning rate of each step, by the Trainer's own scheduler."""
        args, torch, request = self.trainer.args, self.torch, self.request
        steps, assumed = int(args.max_steps), None
        if steps <= 0:
            of_epoch = request.epoch_steps or math.ceil(len(self.data) / self.sequences)
            if request.epoch_steps is not None:
                assumed = f"the learning rate is that of epochs of {of_epoch:,} steps"
            steps = math.ceil(float(args.num_train_epochs) * of_epoch)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
        self.trainer.lr_scheduler = None
        scheduler = self.trainer.create_scheduler(num_training_steps=steps, optimizer=optimizer)
        if hasattr(scheduler, "best"):
            raise NotShownError(f"`{args.lr_scheduler_type}` depends on losses")
        shown, values = set(range(steps)), dict[str, Any]()
        if steps > request.exact_steps:
            shown = {
                *range(1000),
                *(step * steps // request.exact_steps for step in range(request.exact_steps)),
            }
            values["steps of the run"] = steps
        for step in range(max(shown) + 1):
            if step in shown:
                values[f"step {step + 1}"] = float(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        self.trainer.lr_scheduler = None
        self.stages["rate"] = {"values": values, "assumed": assumed}


def _trained(labels: Any) -> int:
    """Return the number of targets, of which the first token of a row is none."""
    return int((labels[:, 1:] != IGNORE_INDEX).sum())


def _ids(example: Any) -> list[int]:
    """Return the tokens of a row, which axolotl packs from a list of examples."""
    return (
        [token for part in example for token in part["input_ids"]]
        if isinstance(example, list)
        else list(example["input_ids"])
    )


class _GradientWatch:
    """The gradients of the first step, before and after clipping."""

    def __init__(self, trainer: Any, callback: type[Any]) -> None:
        self._model = trainer.model
        self._before: dict[str, list[float]] = {}
        self._norms: list[float] = []
        clip, watch = trainer.accelerator.clip_grad_norm_, self

        def observed(*positional: Any, **named: Any) -> Any:
            watch.observe()
            return clip(*positional, **named)

        class Observer(callback):
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                watch.observe()
                watch.observe()  # the second one where nothing was clipped

        trainer.accelerator.clip_grad_norm_ = observed
        trainer.add_callback(Observer())

    def observe(self) -> None:
        if len(self._norms) < 2:
            found = {
                plain_name(name): p.grad for name, p in self._model.named_parameters() if p.grad is not None
            }
            self._norms.append(math.sqrt(sum(float(each.double().norm()) ** 2 for each in found.values())))
            self._before = self._before or {name: summary(each) for name, each in found.items()}

    def stages(self, max_norm: float) -> tuple[Facts, Facts]:
        before, after = self._norms
        factor = after / before if before else 1.0
        return {"values": {"all parameters": before, **self._before}}, {
            "values": {"max_grad_norm": max_norm, "factor of step 1": factor}
        }


def _answer(request: ToolRequest) -> Facts:
    """Return the observation of one request. What fails gets its reason: it is what cannot be compared, nor
    what depends on it."""
    side, failed, blocked = _ToolSide(request), list[str](), ""
    for compute, names in side.parts():
        wanted = [name for name in names if name in request.until and name not in side.stages]
        if not wanted:
            continue
        reason = blocked
        try:
            if not blocked:
                compute()
                reason = "the tool does not show it"
        except (Exception, SystemExit) as error:  # noqa: BLE001  a failure of the tool is a result
            text = (str(error).strip().splitlines() or [""])[0]
            reason = f"{request.tool}: {type(error).__name__}: {text}"
            failed += [] if isinstance(error, NotShownError) else [reason]
            blocked = reason if names[0] in NEEDED else ""
        for name in wanted:
            side.stages.setdefault(name, {"reason": reason})
    stages = {
        name: {"values": {}, "reason": None, "assumed": None, **facts} for name, facts in side.stages.items()
    }
    found = {
        "stages": stages,
        "names": side.names,
        "texts": side.texts,
        "versions": versions(),
        "left_out": side.left_out,
    }
    return found | {"failed": next(iter(failed), None), "ignored": side.tool.ignored}


def main() -> None:
    os.environ.update(
        {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_DISABLED": "true"}
    )
    importlib.import_module("torch").set_num_threads(1)  # another number adds in another order
    answers = sys.stdout
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):  # libraries print; stdout must hold answers only
            answer = _answer(ToolRequest(**json.loads(line)))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
