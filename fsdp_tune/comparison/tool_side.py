"""Run the trainer of another tool on a small model and a few rows, and observe the stages of a comparison.

    python -m fsdp_tune.comparison.tool_side

Started with the interpreter of the tool's environment, which has no package that fsdp_tune needs: of
fsdp_tune it imports only `comparison/tool_trainers.py`. A request is a line on stdin, the fields of a
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
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from fsdp_tune.comparison.tool_trainers import (
    IGNORE_INDEX,
    PACKAGES,
    TRAINERS,
    Facts,
    NotShownError,
    ToolRequest,
    ToolTrainers,
)

SMALL_MODEL = (
    "the model's own size and weights: its stages ran on a small one with random weights (`--model full` "
    "loads it)"
)
AUTOCAST = "autocast of the forward"
"""A place in the stage `dtypes`."""
ROUNDING = (
    "how half precision rounds: beside a tool, both sides compute in fp32, and the dtypes are "
    "compared by name"
)
DRAWN = (
    "first values of adapters and the masks of dropout, which each tool draws itself: both sides ran "
    "with the same values, without dropout"
)


# ---- What both sides of a comparison compute in the same way


def summary(tensor: Any) -> list[float]:
    """Return the norm of a tensor and its product with a fixed vector, in fp64: other values change at least
    one of them."""
    torch = importlib.import_module("torch")
    flat = tensor.double().reshape(-1)
    return [
        float(flat.norm()),
        float(flat @ torch.cos(torch.arange(len(flat), dtype=torch.float64) * 0.7 + 1.0)),
    ]


def dtype_text(parameter: Any) -> str:
    return (
        f"{str(parameter.dtype).removeprefix('torch.')}, {'trained' if parameter.requires_grad else 'frozen'}"
    )


def dropouts(model: Any) -> dict[str, float]:
    """Return the shares that a model drops in training, by module."""
    nn = importlib.import_module("torch.nn")
    found = {
        name: float(module.p)
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and module.p
    }
    shares = {name: getattr(module, "attention_dropout", None) for name, module in model.named_modules()}
    found |= {name: share for name, share in shares.items() if share and isinstance(share, float)}
    return {f"dropout of {plain_name(name)}": share for name, share in found.items()}


def settle_draws(model: Any) -> None:
    """Switch dropout off, give adapters fixed first values, and upcast to fp32: nothing after other draws, or
    after other last bits of half precision in Adam's first steps, could be compared."""
    torch = importlib.import_module("torch")
    model.float()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif getattr(module, "attention_dropout", None):
            module.attention_dropout = 0.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_drawn(name):
                wave = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * 0.9 + 0.3) * 0.02
                parameter.copy_(wave.reshape(parameter.shape))


def is_drawn(name: str) -> bool:
    return ".lora_A." in name or ".lora_embedding_A." in name


def plain_name(name: str) -> str:
    """Return the name of a parameter without what PEFT's model puts before it."""
    return name.removeprefix("base_model.model.")


def step_rows(step: int, count: int, size: int) -> list[int]:
    """Return the rows of a step, counted from 0, of an epoch in the order of its rows; the last step of an
    epoch may have fewer."""
    at = step % max(1, math.ceil(count / size)) * size
    return list(range(at, min(at + size, count)))


def cut_length(length: int, trained: Sequence[int], most: int, after_first: int) -> int:
    """Return how many tokens of a row run through the model: at most so many, or some after the first trained
    one."""
    return min(length, max(most, trained[0] + after_first if trained else 0))


# ---- A tool


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class _ToolRows:
    """The stages that do not depend on the tool, and the rows that it is given."""

    def __init__(self, request: ToolRequest) -> None:
        self.request = request
        self.stages: dict[str, Facts] = {}
        self.texts: dict[str, str] = {}
        self.left_out: list[str] = []
        lines = [json.loads(line) for line in Path(request.rows).read_text(encoding="utf-8").splitlines()]
        self.keys: list[str] = [line["key"] for line in lines]
        self.raw: list[dict[str, Any]] = [line["values"] for line in lines]
        self.sources: list[int] = [line.get("source", 0) for line in lines]
        self.names: dict[str, str] = {line["key"]: line["name"] for line in lines}
        self.tokens: dict[str, list[int]] = {}

    def leave_out(self, what: str) -> None:
        if what not in self.left_out:
            self.left_out.append(what)

    def set_examples(
        self, tokens: Sequence[list[int]], labels: Sequence[list[int]], decode: Callable[[list[int]], str]
    ) -> None:
        self.tokens = dict(zip(self.keys, tokens, strict=True))
        flags = {
            key: [0, *(int(label != IGNORE_INDEX) for label in each[1:])]
            for key, each in zip(self.keys, labels, strict=True)
        }
        self.texts = {
            str(token): decode([token]) for token in sorted({token for each in tokens for token in each})
        }
        self.stages |= {"tokens": {"values": self.tokens}, "labels": {"values": flags}}

    def set_rows(self, rows: Sequence[tuple[list[int], Sequence[int] | None]], *, is_wrapped: bool) -> None:
        """`rows`: tokens, and the lengths of their examples if the tool lists them."""
        used: dict[str, int] = {}
        stream = iter([(key, index) for key, ids in self.tokens.items() for index in range(len(ids))])
        found: dict[str, list[list[Any]]] = {}
        for number, (ids, lengths) in enumerate(rows):
            if is_wrapped:
                parts = [
                    list(part) for _, part in groupby(islice(stream, len(ids)), key=lambda token: token[0])
                ]
                found[f"row {number}"] = [[*part[0], len(part)] for part in parts]
                continue
            pieces, at = [], 0
            for length in lengths or [len(ids)]:
                pieces.append(self._located(ids[at : at + length], used))
                at += length
            found[f"row {number}"] = pieces
            self.names[f"row-id {number}"] = f"row {number} ({self.names.get(pieces[0][0], 'unknown')})"
        self.stages["rows"] = {"values": found}

    def _located(self, piece: list[int], used: dict[str, int]) -> list[Any]:
        """Return [example, first token, tokens] of a piece: of the first example that has these tokens, and
        has not given them yet."""
        free = [(key, ids) for key, ids in self.tokens.items() if used.get(key, 0) < len(ids)]
        free.sort(key=lambda each: each[1] != piece)  # a complete example first
        for key, ids in free:
            start = used.get(key, 0)
            for at in dict.fromkeys((start, len(ids) - len(piece))):
                if at >= start and ids[at : at + len(piece)] == piece:
                    used[key] = at + len(piece)
                    return [key, at, len(piece)]
        return ["tokens of no example", 0, len(piece)]


NEEDED = ("tokens", "rows", "model")
"""Stages without which no later one can be computed."""


class _ToolSide(_ToolRows):
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

    # ---- Data

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

    # ---- Model

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
        trainer.get_train_dataloader = lambda: (
            batches
        )  # of a DataLoader, axolotl changes how it reads its rows
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
