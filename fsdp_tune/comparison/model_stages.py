"""The stages of one side of a comparison that run its model: parameters, logits, losses, gradients and the
update, on the CPU.

The model has the recipe's architecture, scaled down as in a rehearsal; the step is that of the worker
(`model/step.py`, `model/optim/`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fsdp_tune.comparison.both_sides import (
    AUTOCAST,
    SMALL_MODEL,
    cut_length,
    dropouts,
    dtype_text,
    is_drawn,
    rounding_of_summary,
    settle_draws,
    summary,
)
from fsdp_tune.comparison.chosen import chosen_parameters
from fsdp_tune.comparison.data_stages import MODEL_ROWS, DataSide
from fsdp_tune.comparison.small_model import map_patterns, raw_config, with_default_sizes
from fsdp_tune.comparison.stages import StageFacts
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.small_config import scale_down_config
from fsdp_tune.data.collate import collate, example_ids
from fsdp_tune.data.store import IGNORE_INDEX, Row
from fsdp_tune.model.kernels.fake_quantised import prepare_quantised
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.loading.model_config import model_config
from fsdp_tune.model.optim.optimizer import build_optimizer
from fsdp_tune.model.packed_mixers import separate_packed
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
from fsdp_tune.recipe.schema.attention_kernels import needs_cuda
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.directory import run_of
from fsdp_tune.run.manifest import digest

STEPS = 2
"""Adam's first step hides its betas, which the second one shows."""
MODEL_TOKENS = 256
"""Tokens of a row that run through the model, unless its first trained token comes later."""
AFTER_FIRST_TARGET = 32
LOGIT_COLUMNS = 16
_SEED = 0


class ModelSide(DataSide):
    """The model of one recipe and the stages that compare it."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        self.is_full: bool = request["model"] == "full"
        self.shows_defaults: bool = request["defaults"]
        self.raw_config: dict[str, Any] = {}
        self.start = ""  # model of the stages, once it is written
        self.chosen: dict[str, object] = {}

    def observe_model(self) -> None:
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
        rounding = dict[str, list[float]]()
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
                rounding |= {
                    f"{name}{ending}": rounding_of_summary(before[name])
                    for name, parameter in trained.items()
                    if parameter.dtype == torch.float32
                }
        self.stages |= {
            "loss": StageFacts(losses),
            "gradients": StageFacts(gradients),
            "clipping": StageFacts(clipping),
        }
        self.stages["update"] = StageFacts(updates, rounding=rounding)

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
