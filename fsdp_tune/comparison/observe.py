"""Compute the stages of a comparison for recipes, in a process of its own, in this environment or in another
one.

    python -m fsdp_tune.comparison.observe [LENT-3.11]

LENT-3.11 is a folder of packages for an interpreter of that version which lacks them (`jobs/compare.py`). A
request is a line on stdin: {"recipe": a resolved recipe, "rows": 32, "until": "update", "model": "small",
"folder": DIRECTORY, "defaults": false, "beside_tool": false}. Its answer is a line on stdout: an
`Observation`. Requests are accepted until stdin ends. `beside_tool`: the other side is computed by another
tool (`comparison/tool_side.py`), so the model gets the rows in their order, without dropout, and the file
"inputs", if it is named, gets what the tool needs.

One process on the CPU, without FSDP: NO_SHARD in place of the recipe's strategy, so that mixed precision is
autocast. The model has the recipe's architecture, scaled down as in a rehearsal; the step is that of the
worker (`model/step.py`, `model/optim/`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

sys.path.extend(
    folder
    for folder in sys.argv[1:]
    if folder.endswith(f"-{sys.version_info.major}.{sys.version_info.minor}")
)

import numpy as np
import torch
import transformers

if not hasattr(transformers, "PreTrainedConfig"):  # transformers 4 has the older spelling alone
    transformers.__dict__["PreTrainedConfig"] = transformers.PretrainedConfig

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fsdp_tune.comparison.chosen import chosen_parameters
from fsdp_tune.comparison.interpreter import lent_packages, versions
from fsdp_tune.comparison.small_model import map_patterns, raw_config, with_default_sizes
from fsdp_tune.comparison.stages import DATA_STAGES, STAGES, Observation, StageFacts, stages_until
from fsdp_tune.comparison.tool_side import (
    AUTOCAST,
    SMALL_MODEL,
    cut_length,
    dropouts,
    dtype_text,
    is_drawn,
    settle_draws,
    summary,
)
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.small_config import scale_down_config
from fsdp_tune.data.collate import collate, example_ids
from fsdp_tune.data.inputs import open_inputs
from fsdp_tune.data.preparation import prepare
from fsdp_tune.data.read.row_files import BadRow
from fsdp_tune.data.report import InputAccount
from fsdp_tune.data.row_order import RowOrder, row_order
from fsdp_tune.data.store import IGNORE_INDEX, Row, RowStore
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.model.kernels.fake_quantised import prepare_quantised
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.loading.model_config import model_config
from fsdp_tune.model.mixers import separate_packed
from fsdp_tune.model.optim.optimizer import build_optimizer
from fsdp_tune.model.sequence_parallel import rows_known
from fsdp_tune.model.shard.local import decayed_names
from fsdp_tune.model.step import (
    auxiliary_loss_weight,
    clip_factor,
    compute_context,
    forward_backward,
    loss_options,
    model_inputs,
    scale_gradients,
    shift_labels,
    supervised_tokens,
    token_losses,
    total_norm,
)
from fsdp_tune.recipe.schedule import schedule_of
from fsdp_tune.recipe.schema.attention_kernels import needs_cuda
from fsdp_tune.recipe.schema.recipe import EvalRows, Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.directory import run_of
from fsdp_tune.run.manifest import digest

STEPS = 2
"""Adam's first step hides its betas, which the second one shows."""
ORDERED_STEPS, ORDERED_SEQUENCES = 3, 20_000
"""Steps whose order is compared, and the sequences up to which it is that of all steps."""
MODEL_ROWS = 8
"""Rows of a step that run through the model."""
MODEL_TOKENS = 256
"""Tokens of a row that run through the model, unless its first trained token comes later."""
AFTER_FIRST_TARGET = 32
LOGIT_COLUMNS = 16
EXACT_STEPS = 10_000
NOMINAL_STEPS_OF_EPOCH = 1000
_SEED = 0

Stages = dict[str, StageFacts]


class Side:
    """The stages of one recipe."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.recipe = Recipe.model_validate(request["recipe"])
        self.rows: int = request["rows"]
        self.is_full: bool = request["model"] == "full"
        self.folder = Path(request["folder"])
        self.shows_defaults: bool = request["defaults"]
        self.is_beside_tool: bool = request["beside_tool"]
        self.inputs_file: str | None = request.get("inputs")
        self.wanted = list(stages_until(request["until"]))
        self.stages: Stages = {}
        self.names: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.left_out: list[str] = []
        self.vocabulary: int | None = None
        self.pad_id = 0
        self.row_count: int | None = None
        """Rows of an epoch; None if not all of them were read."""
        self.raw_config: dict[str, Any] = {}
        self.steps_of_rows: list[list[Row]] = []
        self.start = ""  # model of the stages, once it is written
        self.complete: list[str] = []
        self.chosen: dict[str, object] = {}

    def observe(self) -> Observation:
        self._attempt(self._data, [name for name in self.wanted if name in DATA_STAGES])
        if self.wanted[-1] not in DATA_STAGES:
            self._attempt(self._rate, ["rate"])
            self._attempt(
                self._model, [name for name in self.wanted if name not in (*DATA_STAGES, "rate", "defaults")]
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
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        else:
            return
        for name in stages:
            self.stages.setdefault(name, StageFacts(reason=reason))

    # ---- Data

    def _data(self) -> None:
        recipe = self._sampled()
        encoder = load_encoder(recipe)
        self.vocabulary, self.pad_id = encoder.vocabulary_size, encoder.pad_id
        prepared = prepare(recipe, encoder, check_rows=False)
        self._examples(store := prepared.store())
        ids = {token for values in self.stages["tokens"].values.values() for token in values}
        self.texts = {str(token): encoder.decode([token]) for token in sorted(ids)}
        keys = self._keys(store)
        rows = {
            f"row {index}": [[keys[example], *piece] for example, *piece in store.pieces(index)]
            for index in range(len(store))
        }
        self.stages["rows"] = StageFacts(rows)
        self.stages["batch"] = StageFacts({"sequences": self.recipe.global_batch_size})
        of_rows = row_order(recipe, store.lengths)
        in_order = recipe.model_copy(update={"data": recipe.data.model_copy(update={"shuffle": False})})
        walked = row_order(in_order, store.lengths) if self.is_beside_tool else of_rows
        order: dict[str, list[str]] = {}
        items: dict[str, int] = {}
        for step in range(1, ORDERED_STEPS + 1):
            order[f"step {step}"] = [
                keys[store.pieces(index)[0].example] for index in of_rows.batch_after(step - 1).tolist()
            ]
            found = [store[index] for index in walked.batch_after(step - 1).tolist()]
            items[f"step {step}"] = sum(int(supervised_tokens(torch.from_numpy(row.labels))) for row in found)
            self.steps_of_rows.append(found[:MODEL_ROWS])
            self.names |= {
                f"row-id {row.row_id}": f"row {row.row_id} ({_where(store.origins(row.row_id)[0])})"
                for row in found
            }
        self.stages["order"] = StageFacts(order, drawn_by="a hash" if self.recipe.data.shuffle else None)
        self.stages["items"], self.row_count = StageFacts(items), len(store)
        if self.recipe.evaluates and not self.is_beside_tool:
            self.stages["eval_rows"] = StageFacts(_rows_by_digest(prepared.evals))
        if self.recipe.data.streaming:
            reason = "a stream is shuffled and packed as it is read, which is not done here"
            names = ("rows", "order", "items") if self.recipe.data.packing else ("order", "items")
            self.stages |= dict.fromkeys(names, StageFacts(reason=reason))
        if any(account.rows >= self.rows for account in prepared.report.inputs if account.set == "train"):
            self.row_count = None
            self.left_out.append(
                f"rows after the first {self.rows} of each source, and the order of all rows, if "
                "there are more (`--rows N` reads more)"
            )
        else:
            self._complete_data(prepared.report.inputs, keys, store, of_rows)
        if (size := self.recipe.global_batch_size) > len(store):
            self.left_out.append(
                f"steps as large as the recipe's {size:,} sequences: {len(store)} rows were read"
            )

    def _complete_data(
        self, accounts: Sequence[InputAccount], keys: Sequence[str], store: RowStore, rows: RowOrder
    ) -> None:
        """Name the stages that cover the full run, whose training rows were all read, and add the order of
        its later steps."""
        if self.recipe.data.streaming:
            return
        self.complete.append("rows")
        if all(account.rows < self.rows for account in accounts):
            self.complete.append("eval_rows")
        steps = self._total_steps()[0]
        if self.is_beside_tool or steps * self.recipe.global_batch_size > ORDERED_SEQUENCES:
            return
        self.complete.append("order")
        for step in range(ORDERED_STEPS + 1, steps + 1):
            found = [keys[store.pieces(index)[0].example] for index in rows.batch_after(step - 1).tolist()]
            self.stages["order"].values[f"step {step}"] = found

    def _total_steps(self) -> tuple[int, bool]:
        """Return the steps of the run, and whether the number of those of an epoch is assumed."""
        steps = int(training_value(self.recipe.training, "max_steps"))
        if steps > 0:
            return steps, False
        of_epoch = (
            NOMINAL_STEPS_OF_EPOCH
            if self.row_count is None
            else math.ceil(self.row_count / self.recipe.global_batch_size)
        )
        return math.ceil(
            float(training_value(self.recipe.training, "num_train_epochs")) * of_epoch
        ), self.row_count is None

    def _sampled(self) -> Recipe:
        """Return the recipe with the first rows of each source, read in this process."""
        raw = self.recipe.model_dump(mode="json", by_alias=True)
        data = raw["data"]
        evals: list[Any] = cast("list[Any]", data["eval"]) if isinstance(data["eval"], list) else []
        for source in [*data["train"], *evals]:
            source["max_rows"] = min(source["max_rows"] or self.rows, self.rows)
        if isinstance(self.recipe.data.eval, EvalRows):
            data["eval"]["rows"] = max(1, min(self.recipe.data.eval.rows, self.rows // 8))
        data |= {"cache_dir": str(self.folder / "cache"), "num_proc": 1}
        if self.recipe.data.streaming:
            data |= {"streaming": False, "stream_lanes": "auto", "curriculum": []}
            for source in data["train"]:
                source["repeats"] = None
        return Recipe.model_validate(raw)

    def _write_inputs(self) -> None:
        """Write what another tool needs to compute the same side: the rows as they are read, the model, and
        how much of both is used."""
        lines: list[str] = []
        recipe = self._sampled()
        for source, opened in enumerate(open_inputs(recipe, load_encoder(recipe), train_only=True)):
            read = ((file, row) for file, row in opened.source.read() if not isinstance(row, BadRow))
            for file, (number, values) in itertools.islice(read, opened.entry.max_rows):
                name = f"example {len(lines)} ({_where((opened.source.names[file], number))})"
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

    def _examples(self, store: RowStore) -> None:
        tokens: dict[str, list[int]] = {}
        labels: dict[str, list[int]] = {}
        for index, key in enumerate(self._keys(store)):
            ids, trained, origin = store.example(index)
            tokens[key], labels[key] = (
                ids.tolist(),
                [0, *trained[1:].tolist()],
            )  # the first token of an example is never a target
            self.names[key] = f"example {index} ({_where(origin)})"
        self.stages["tokens"], self.stages["labels"] = StageFacts(tokens), StageFacts(labels)

    def _keys(self, store: RowStore) -> list[str]:
        """Return a key of each example that both sides share: the number of its file, its row, and its number
        among the row's examples."""
        counts: dict[tuple[str, int], int] = {}
        keys: list[str] = []
        for index in range(store.example_count):
            origin = store.example(index).origin
            counts[origin] = counts.get(origin, 0) + 1
            keys.append(f"{store.files.index(origin[0])}:{origin[1]}:{counts[origin]}")
        return keys

    def _rate(self) -> None:
        recipe, assumed = self.recipe, None
        steps, is_assumed = self._total_steps()
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

    # ---- Model

    def _model(self) -> None:
        if not self.is_beside_tool:
            self.chosen = chosen_parameters(self.recipe)
        recipe = self._one_process()
        config = model_config(recipe)
        model = build_full(recipe, config, vocabulary=self.vocabulary)
        separate_packed(recipe, model)
        self._quantise(recipe, model)
        if self.shows_defaults and not self.is_full and recipe.model.name_or_path is not None:
            loaded = AutoModelForCausalLM.from_pretrained(recipe.model.name_or_path, config=config)
            self.stages["defaults"] = StageFacts({"parameters": str(loaded.dtype).removeprefix("torch.")})
        parameters = dict(model.named_parameters())
        shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
        fields = (
            dropouts(model)
            if self.is_beside_tool
            else {f"config.json: {name}": value for name, value in self.raw_config.items()}
        )
        self.stages["model"] = StageFacts({**fields, **shapes})
        self.stages["dtypes"] = StageFacts(
            {name: dtype_text(p) for name, p in parameters.items()}
            | ({AUTOCAST: recipe.precision.mixed_precision} if self.is_beside_tool else {})
        )
        self.stages["weights"] = StageFacts(
            {
                name: summary(p.detach())
                for name, p in parameters.items()
                if not (self.is_beside_tool and is_drawn(name))
            }
        )
        if not self.is_full:
            self.left_out.append(SMALL_MODEL)
        if self.is_beside_tool:
            settle_draws(model)
            fp32 = {"model": recipe.model.model_copy(update={"dtype": "fp32"})}
            recipe = recipe.model_copy(
                update=fp32 | {"precision": recipe.precision.model_copy(update={"mixed_precision": "no"})}
            )
        steps = [self._cut(rows) for rows in self.steps_of_rows] or [self._invented(model)] * STEPS
        self._forward(recipe, model, steps[0])
        self._train(recipe, model, steps[:STEPS])

    def _quantise(self, recipe: Recipe, model: PreTrainedModel) -> None:
        """Prepare quantisation-aware training; where the small model cannot be, it is reported as left
        out."""
        section = self.recipe.quantised_training
        if section is None:
            return
        try:
            prepare_quantised(recipe, model)
        except FsdpTuneError as error:
            self._leave_out(f"`quantization.train: {section.train}`: {error.problems[0].message}")
        else:
            if recipe.quantised_training is None:
                self._leave_out(f"`quantization.train: {section.train}`")

    def _one_process(self) -> Recipe:
        """Return the recipe for one process on the CPU, and write its small model unless the recipe's own
        weights are wanted."""
        recipe = self.recipe
        raw = recipe.model_dump(mode="json", by_alias=True)
        raw["launch"] |= {"device": "cpu", "num_processes": 1, "num_machines": 1}
        raw["parallelism"] = dict.fromkeys(raw["parallelism"], 1)
        raw["fsdp"] = {"sharding_strategy": "NO_SHARD"}
        raw["kernels"] |= {
            "liger": "auto",
            "loss": "full",
            "compile": False,
            "experts": "auto",
            "mlp_slice_tokens": None,
        }
        if recipe.precision.mixed_precision == "fp8":
            raw["precision"]["mixed_precision"] = "bf16"
            self.left_out.append("fp8, which is computed in bf16 here")
        if self.is_beside_tool:
            raw["quantization"] = None  # which tools need a GPU for
        if needs_cuda(recipe.model.attn_implementation):
            raw["model"]["attn_implementation"] = "auto"
        start = recipe.model.name_or_path
        run = run_of(Path(start)) if start is not None else None
        if self.is_full:
            if run is not None:
                raise ValueError(f"the weights of {start} are in a sharded checkpoint: name its merged model")
            self.start = str(start)
            return Recipe.model_validate(raw)
        self.raw_config = raw_config(recipe) | recipe.model.config_overrides
        small = scale_down_config(with_default_sizes(self.raw_config))
        small = {
            name: value
            for name, value in small.items()
            if name != "auto_map" or recipe.model.trust_remote_code
        }
        map_patterns(raw, self.raw_config, small)
        raw["model"]["config_overrides"] = {}
        if recipe.model.from_config is not None:
            raw["model"]["from_config"] = small
        else:
            self.start = str(self._written(small))
            raw["model"] |= {"name_or_path": self.start, "revision": "main"}
        return Recipe.model_validate(raw)

    def _written(self, small: dict[str, Any]) -> Path:
        """Return the directory of the small model, written once for all sides whose small configuration is
        the same."""
        folder = self.folder / f"model-{digest(json.dumps([self.raw_config, small], sort_keys=True))}"
        if not folder.is_dir():
            torch.manual_seed(_SEED)
            fields = dict(small)
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.float32
            )
            stage = folder.with_suffix(".part")
            model.save_pretrained(stage)
            kept = {
                name: self.raw_config[name] for name in ("dtype", "torch_dtype") if name in self.raw_config
            }
            # As a published file has it: what a version of the library writes, another one may not read.
            text = json.dumps({**small, **kept, "architectures": [type(model).__name__]})
            (stage / "config.json").write_text(text, encoding="utf-8")
            stage.rename(folder)
        return folder

    def _cut(self, rows: list[Row]) -> list[Row]:
        """Return the beginning of each row, with a trained token if it has one."""
        cut: list[Row] = []
        for row in rows:
            trained: list[int] = np.flatnonzero(row.labels != IGNORE_INDEX).tolist()
            length = cut_length(len(row.input_ids), trained, MODEL_TOKENS, AFTER_FIRST_TARGET)
            if length < len(row.input_ids):
                ends = np.minimum(np.cumsum(row.lengths), length)
                lengths = tuple(int(each) for each in np.diff(ends, prepend=0) if each > 0)
                row = replace(
                    row, input_ids=row.input_ids[:length], labels=row.labels[:length], lengths=lengths
                )
                self._leave_out(f"tokens of a row after the first {MODEL_TOKENS}, in the stages of the model")
            cut.append(row)
        if self.recipe.global_batch_size > MODEL_ROWS:
            self._leave_out(f"rows of a step after the first {MODEL_ROWS}, in the stages of the model")
        return cut

    def _leave_out(self, what: str) -> None:
        if what not in self.left_out:
            self.left_out.append(what)

    def _invented(self, model: PreTrainedModel) -> list[Row]:
        """Return rows of drawn ids, for data that cannot be read here."""
        self._leave_out(
            "the recipe's rows in the stages of the model: drawn ids were used, since the data "
            "cannot be read here"
        )
        drawn = (
            np.random.default_rng(_SEED)
            .integers(0, int(model.config.get_text_config().vocab_size), (4, 32))
            .astype(np.int32)
        )
        labels = np.concatenate([np.full((4, 1), IGNORE_INDEX, np.int32), drawn[:, 1:]], axis=1)
        return [Row(ids, labels[at], (32,), at) for at, ids in enumerate(drawn)]

    def _batch(self, model: PreTrainedModel, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        arrays = collate(
            rows, self.pad_id, self.recipe.data.pad_to_multiple_of, max_length=self.recipe.data.max_length
        )
        if auxiliary_loss_weight(model) > 0:
            arrays["example_ids"], arrays["example_lengths"] = example_ids(rows, arrays["input_ids"].shape[1])
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    @torch.no_grad()
    def _forward(self, recipe: Recipe, model: PreTrainedModel, rows: Sequence[Row]) -> None:
        """Run each row alone, without dropout."""
        model.eval()
        logits_of: dict[str, object] = {}
        losses: dict[str, object] = {}
        for row in rows:
            batch = self._batch(model, [row])
            with rows_known(model, batch), compute_context(recipe, "cpu"):
                logits = cast(Any, model)(**model_inputs(batch), use_cache=False).logits
            used = logits[0, : len(row.input_ids)].float()
            columns = torch.linspace(0, used.shape[-1] - 1, min(LOGIT_COLUMNS, used.shape[-1])).long()
            logits_of[f"row-id {row.row_id}"] = torch.cat(
                [used.logsumexp(-1, keepdim=True), used[:, columns]], dim=1
            ).tolist()
            losses[f"row-id {row.row_id}"] = float(
                token_losses(logits, shift_labels(batch["labels"]), **loss_options(recipe)).sum()
            )
        self.stages["logits"], self.stages["row_losses"] = StageFacts(logits_of), StageFacts(losses)

    def _train(self, recipe: Recipe, model: PreTrainedModel, steps: Sequence[Sequence[Row]]) -> None:
        """Run the steps of the worker on one device; the update is at the peak learning rate, since a warm-up
        starts at 0."""
        model.train()
        torch.manual_seed(recipe.training.seed)
        optimizer = build_optimizer(recipe, model, decayed_names(model))
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        before = {name: parameter.detach().double().clone() for name, parameter in trained.items()}
        max_norm = float(training_value(recipe.training, "max_grad_norm") or 0.0)
        losses, gradients = dict[str, object](), dict[str, object]()
        clipping, updates = dict[str, object](max_grad_norm=max_norm), dict[str, object]()
        for number, rows in enumerate(steps, 1):
            loss = self._accumulate(recipe, model, rows)
            parameters = [parameter for parameter in trained.values() if parameter.grad is not None]
            norm = total_norm(parameters)
            if number == 1:  # that of step 2 depends on the first update
                losses = {"step 1": loss}
                summaries = {
                    name: summary(parameter.grad)
                    for name, parameter in trained.items()
                    if parameter.grad is not None
                }
                gradients = {"all parameters": float(norm), **summaries}
                clipping["factor of step 1"] = float(clip_factor(norm, max_norm)) if max_norm else 1.0
            if max_norm:
                scale_gradients(parameters, clip_factor(norm, max_norm))
            optimizer.step()
            optimizer.zero_grad()
            # Of each step, so that what a key changes in step 1 comes before what follows from it in step 2;
            # a tool has the last one.
            if not self.is_beside_tool or number == len(steps):
                ending = "" if self.is_beside_tool else f", step {number}"
                updates |= {
                    f"{name}{ending}": summary(parameter.detach().double() - before[name])
                    for name, parameter in trained.items()
                }
        self.stages |= {
            "loss": StageFacts(losses),
            "gradients": StageFacts(gradients),
            "clipping": StageFacts(clipping),
        }
        self.stages["update"] = StageFacts(updates)

    def _accumulate(self, recipe: Recipe, model: PreTrainedModel, rows: Sequence[Row]) -> float:
        """Run forward and backward of a step's micro-batches, and return its loss."""
        size = min(recipe.training.per_device_train_batch_size, len(rows))
        batches = [self._batch(model, rows[at : at + size]) for at in range(0, len(rows), size)]
        targets = sum(int(supervised_tokens(batch["labels"])) for batch in batches)
        if targets == 0:
            raise ValueError("no token of the step is trained")
        tokens = sum(len(row.input_ids) for row in rows)
        total = 0.0
        for batch in batches:
            auxiliary = auxiliary_loss_weight(model) / tokens
            _, loss_sum = forward_backward(
                recipe, model, batch, 1.0 / targets, auxiliary=auxiliary, **loss_options(recipe)
            )
            total += float(loss_sum)
        return total / targets


def _rows_by_digest(sets: Mapping[str, str]) -> dict[str, str]:
    """Return a digest of tokens and labels by set and row."""
    stores = [(label, RowStore(path)) for label, path in sets.items()]
    rows = [(f"{label}, row {index}", store[index]) for label, store in stores for index in range(len(store))]
    return {name: digest(row.input_ids.tobytes(), row.labels.tobytes()) for name, row in rows}


def _where(origin: tuple[str, int]) -> str:
    return f"{Path(origin[0]).name}:{origin[1]}"


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
