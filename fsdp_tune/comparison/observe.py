"""Compute the stages of a comparison for recipes, in a process of its own, in this environment or in another
one.

    python -m fsdp_tune.comparison.observe [LENT-3.11]

LENT-3.11 is a folder of packages for an interpreter of that version which lacks them
(`comparison/side_processes.py`). A request is a line on stdin: {"recipe": a resolved recipe, "rows": 32,
"until": "update", "model": "small", "folder": DIRECTORY, "defaults": false, "beside_tool": false}. Its answer
is a line on stdout: an `Observation`. Requests are accepted until stdin ends. `beside_tool`: the other side
is computed by another tool (`comparison/tool_side.py`), so the model gets the rows in their order, without
dropout, and the file "inputs", if it is named, gets what the tool needs.

One process on the CPU, without FSDP: NO_SHARD in place of the recipe's strategy, so that mixed precision is
autocast.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.extend(
    folder
    for folder in sys.argv[1:]
    if folder.endswith(f"-{sys.version_info.major}.{sys.version_info.minor}")
)

import torch
import transformers

if not hasattr(transformers, "PreTrainedConfig"):  # transformers 4 has the older spelling alone
    transformers.__dict__["PreTrainedConfig"] = transformers.PretrainedConfig

from fsdp_tune.comparison.data_stages import MODEL_ROWS, NOMINAL_STEPS_OF_EPOCH, ORDERED_STEPS, shown_origin
from fsdp_tune.comparison.interpreter import lent_packages, versions
from fsdp_tune.comparison.model_stages import (
    AFTER_FIRST_TARGET,
    LOGIT_COLUMNS,
    MODEL_TOKENS,
    STEPS,
    ModelSide,
)
from fsdp_tune.comparison.stages import DATA_STAGES, STAGES, Observation, StageFacts, stages_until
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.library_errors import typed_line
from fsdp_tune.data.inputs import open_inputs
from fsdp_tune.data.read.row_files import BadRow
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.recipe.schedule import schedule_of
from fsdp_tune.recipe.schema.training_fields import training_value

EXACT_STEPS = 10_000


class Side(ModelSide):
    """The stages of one recipe."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        self.inputs_file: str | None = request.get("inputs")
        self.wanted = list(stages_until(request["until"]))

    def observe(self) -> Observation:
        self._attempt(self.observe_data, [name for name in self.wanted if name in DATA_STAGES])
        if self.wanted[-1] not in DATA_STAGES:
            self._attempt(self._rate, ["rate"])
            self._attempt(
                self.observe_model,
                [name for name in self.wanted if name not in (*DATA_STAGES, "rate", "defaults")],
            )
        if self.inputs_file is not None:
            self._attempt(self._write_inputs, [])
        if lent := lent_packages():
            self.left_out.append(
                f"own versions of {', '.join(lent)}, which this interpreter lacks: those of A were used"
            )
        stages = {name: self.stages[name] for name in STAGES if name in self.stages and name in self.wanted}
        complete = tuple(self.complete)
        return Observation(
            stages,
            self.names,
            self.texts,
            versions(),
            tuple(self.left_out),
            complete=complete,
            chosen=self.chosen,
        )

    def _attempt(self, compute: Callable[[], None], stages: Sequence[str]) -> None:
        """Run a part; the stages that it could not compute get the reason."""
        try:
            compute()
        except FsdpTuneError as error:
            reason = error.problems[0].message
        except Exception as error:  # noqa: BLE001  a failure of a library on one side is a result: it is what cannot be compared
            reason = typed_line(error)
        else:
            return
        for name in stages:
            self.stages.setdefault(name, StageFacts(reason=reason))

    def _write_inputs(self) -> None:
        """Write what another tool needs to compute the same side: the rows as they are read, the model, and
        how much of both is used."""
        lines: list[str] = []
        recipe = self.sampled()
        for source, opened in enumerate(open_inputs(recipe, load_encoder(recipe), train_only=True)):
            read = ((file, row) for file, row in opened.source.read() if not isinstance(row, BadRow))
            for file, (number, values) in itertools.islice(read, opened.entry.max_rows):
                name = f"example {len(lines)} ({shown_origin((opened.source.names[file], number))})"
                key = f"{opened.first_file + file}:{number}:1"
                lines.append(
                    json.dumps({"key": key, "name": name, "source": source, "values": values}, default=str)
                )
        rows = f"{self.inputs_file}.rows"
        Path(rows).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        inputs = {
            "rows": rows,
            "model": self.start,
            "epoch_steps": None if self.row_count is not None else NOMINAL_STEPS_OF_EPOCH,
        }
        sizes = {
            "ordered_steps": ORDERED_STEPS,
            "trained_steps": STEPS,
            "model_rows": MODEL_ROWS,
            "model_tokens": MODEL_TOKENS,
        }
        sizes |= {
            "after_first_target": AFTER_FIRST_TARGET,
            "logit_columns": LOGIT_COLUMNS,
            "exact_steps": EXACT_STEPS,
        }
        Path(str(self.inputs_file)).write_text(json.dumps(inputs | sizes), encoding="utf-8")

    def _rate(self) -> None:
        recipe, assumed = self.recipe, None
        steps, is_assumed = self.total_steps()
        if is_assumed:
            assumed = f"the learning rate is that of epochs of {NOMINAL_STEPS_OF_EPOCH:,} steps"
            self.left_out.append(f"the number of steps of an epoch: {assumed}")
        schedule = schedule_of(recipe, steps)
        if schedule is None:
            self.stages["rate"] = StageFacts(
                reason=f"`{training_value(recipe.training, 'lr_scheduler_type')}` depends on losses"
            )
            return
        shown = (
            range(steps)
            if steps <= EXACT_STEPS
            else sorted({*range(1000), *(step * steps // EXACT_STEPS for step in range(EXACT_STEPS))})
        )
        values = {f"step {step + 1}": recipe.training.learning_rate * schedule(step) for step in shown}
        # Where all steps are listed, their number is not one more value that may differ.
        length = {"steps of the run": steps} if steps > EXACT_STEPS else {}
        self.stages["rate"] = StageFacts(length | values, assumed=assumed)
        if not is_assumed and not length:
            self.complete.append("rate")


def main() -> None:
    torch.set_num_threads(1)  # another number adds in another order
    answers = sys.stdout
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):  # libraries print; stdout must hold answers only
            observation = Side(json.loads(line)).observe()
        answers.write(json.dumps(asdict(observation)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
