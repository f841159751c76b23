"""Run models over prepared rows, in a process of its own: `python -m fsdp_tune.answer.score < request.json`.

Prints JSON lines: `{"model": 0, "set": "test", "rows": [{"index", "total", "count"} | {"index", "ids",
"is_cut"}, …]}` after each batch, and at the end of a failure `{"problems": […], "exit_code": 2}`.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from fsdp_tune.answer.examples import EvaluatedExample, read_examples
from fsdp_tune.answer.loaded_model import load_model
from fsdp_tune.answer.model_requests import Request, RowScore, SetRequest
from fsdp_tune.answer.reported_errors import Emit, reporting_errors
from fsdp_tune.core.errors import ExitCode, FailedError, Problem, usage_error
from fsdp_tune.data.collate import collate
from fsdp_tune.data.store import IGNORE_INDEX, RowStore
from fsdp_tune.model.generate import end_ids_of, generate, room
from fsdp_tune.model.step import shift_labels
from fsdp_tune.recipe.extensions import Extension


@dataclass(frozen=True, slots=True)
class Scorer:
    request: Request
    wanted: SetRequest
    model: PreTrainedModel

    def batches(self, examples: Sequence[EvaluatedExample]) -> Iterator[list[RowScore]]:
        """Yield the scores of a batch of rows of similar length at a time; the batches are the same for any
        number of processes."""
        score = {"generate": self._generate, "loss": self._loss, "extension": self._extension}[
            self.wanted.measure
        ]
        if self.wanted.measure == "generate":
            self._refuse_beyond_positions(examples)
        order = sorted(range(len(examples)), key=lambda index: -len(examples[index].row.input_ids))
        size = self.request.batch_size
        for start in range(self.request.part * size, len(order), self.request.parts * size):
            chosen = order[start : start + size]
            yield score(chosen, [examples[index] for index in chosen])

    def _generate(self, chosen: Sequence[int], examples: Sequence[EvaluatedExample]) -> list[RowScore]:
        request = self.request
        prompts = [example.row.input_ids[: example.answer[0]].tolist() for example in examples]
        ends, most = {*self.wanted.end_ids, *end_ids_of(self.model)}, self.wanted.max_new_tokens
        device = torch.device(request.device)
        new = generate(
            self.model, prompts, max_new_tokens=most, end_ids=ends, pad_id=request.pad_id, device=device
        )
        return [
            RowScore(
                index,
                ids=[token for token in tokens if token not in ends],
                is_cut=not ends.intersection(tokens),
            )
            for index, tokens in zip(chosen, new, strict=True)
        ]

    def _loss(self, chosen: Sequence[int], examples: Sequence[EvaluatedExample]) -> list[RowScore]:
        logits, targets = self._forward(examples)
        totals: list[float] = []
        # fp32 copies of the logits of all rows would not fit with long rows
        for row, wanted in zip(logits, targets, strict=True):
            trained = wanted != IGNORE_INDEX
            losses = F.cross_entropy(row[trained].float(), wanted[trained], reduction="none")
            totals.append(float(losses.double().sum()))
        counts = (targets != IGNORE_INDEX).sum(1).tolist()
        return _finite_scores(
            chosen, examples, totals, counts, "try `--dtype fp32`; else the model itself is damaged"
        )

    def _extension(self, chosen: Sequence[int], examples: Sequence[EvaluatedExample]) -> list[RowScore]:
        assert self.request.metric is not None
        metric: Callable[..., Any] = Extension.from_dict(self.request.metric).load()
        logits, targets = self._forward(examples)
        totals: list[float] = []
        counts: list[float] = []
        for row, example in enumerate(examples):
            length = len(example.row.input_ids)
            one = targets[row : row + 1, :length]
            total, count = metric(logits[row : row + 1, :length], one, one != IGNORE_INDEX)
            totals.append(float(total))
            counts.append(float(count))
        return _finite_scores(
            chosen,
            examples,
            totals,
            counts,
            "the metric returned it: see what it does with such a row, and with logits that are not finite",
        )

    def _forward(self, examples: Sequence[EvaluatedExample]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [rows, tokens, vocabulary] and the target of each position [rows, tokens]."""
        arrays = collate([example.row for example in examples], self.request.pad_id, 1)
        tensors = {name: torch.from_numpy(array).to(self.request.device) for name, array in arrays.items()}
        logits: torch.Tensor = self.model(input_ids=tensors["input_ids"], use_cache=False).logits
        return logits, shift_labels(tensors["labels"])

    def _refuse_beyond_positions(self, examples: Sequence[EvaluatedExample]) -> None:
        longest = max(examples, key=lambda example: example.answer[0])
        if room(self.model, longest.answer[0], self.wanted.max_new_tokens) < 1:
            message = f"a prompt of {longest.answer[0]:,} tokens fills all positions of the model"
            raise usage_error(
                "beyond-positions", message, where=longest.where, hint="lower `data.max_length`"
            )


def _finite_scores(
    chosen: Sequence[int],
    examples: Sequence[EvaluatedExample],
    totals: Sequence[float],
    counts: Sequence[float],
    hint: str,
) -> list[RowScore]:
    """Return the scores of rows. Raises: FailedError with `hint` for one that is not a number or infinite."""
    for example, total, count in zip(examples, totals, counts, strict=True):
        if not (math.isfinite(total) and math.isfinite(count)):
            message = (
                f"the score of a row is {total:g}, of {count:g} tokens or cases: the metric has no value"
            )
            problem = Problem("score-not-finite", message, example.where, hint)
            raise FailedError(problem, exit_code=ExitCode.NON_FINITE)
    return [RowScore(*each) for each in zip(chosen, totals, counts, strict=True)]


def run(request: Request, emit: Emit) -> None:
    for number, each in enumerate(request.models):
        model = load_model(each, request)
        with torch.inference_mode():
            for label, wanted in request.sets.items():
                for rows in Scorer(request, wanted, model).batches(
                    read_examples(RowStore(wanted.path, files=wanted.files), most=wanted.max_rows)
                ):
                    emit({"model": number, "set": label, "rows": [asdict(row) for row in rows]})
        del model
        if request.device.startswith("cuda"):
            torch.cuda.empty_cache()


def main() -> None:
    request = Request.from_json(sys.stdin.read())
    output = sys.stdout

    def emit(line: dict[str, object]) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()

    hint = _less_memory(request)
    # libraries print; stdout must hold JSON alone
    with (
        contextlib.redirect_stdout(sys.stderr),
        reporting_errors(emit, device_hint=hint, host_hint=hint),
    ):
        run(request, emit)


def _less_memory(request: Request) -> str:
    """Return the hint for a device or host without memory: the option of `evaluate`, or the key of a run."""
    smaller = request.batch_size // 2
    if request.is_of_run:
        size = f"`evaluation.batch_size: {smaller}`, or " if smaller else ""
        return f"{size}`evaluation.when: at_end`, when no rank holds memory"
    return f"`--batch-size {smaller}`" if smaller else "`--dtype bf16`, or another `--device`"


if __name__ == "__main__":
    main()
