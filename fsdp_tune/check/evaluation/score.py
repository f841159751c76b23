"""Load a model that is evaluated, as any user of transformers does; an adapter on the base that it was trained on.

A run of this package may hold its base in 4 bits and change its configuration, which PEFT's files do not record: base.json does.

Run models over prepared rows, in a process of its own: `python -m fsdp_tune.check.evaluation.score < request.json`.

Prints JSON lines: `{"model": 0, "set": "test", "rows": [{"index", "total", "count"} | {"index", "ids", "is_cut"}, …]}` after each batch,
and at the end of a failure `{"problems": […], "exit_code": 2}`.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fsdp_tune.check.evaluation.examples import EvaluatedExample, ModelToEvaluate, Request, RowScore, read_examples
from fsdp_tune.core.errors import ExitCode, FailedError, FsdpTuneError, Problem, failed_error, usage_error
from fsdp_tune.core.hub import HubResource, hub_is_reachable
from fsdp_tune.core.tensors.file_formats import CONFIG_FILE, PREFIX, WEIGHTS_FILE, is_trained_in_full, without_copies
from fsdp_tune.data.batches import collate
from fsdp_tune.data.store import IGNORE_INDEX
from fsdp_tune.model.adapters.nf4 import SCALE_DTYPE, dequantise, quantise
from fsdp_tune.model.generate import end_ids_of, generate, room
from fsdp_tune.model.loading.adapter_files import published_prefixes
from fsdp_tune.model.loading.construct import embedding_rows, is_tied, start_untied_head
from fsdp_tune.model.loading.stored_tensors import tensors_of
from fsdp_tune.model.shard.local import TORCH_DTYPE
from fsdp_tune.model.step import shift_labels
from fsdp_tune.recipe.references import Extension
from fsdp_tune.run.base_model import BaseModel

if TYPE_CHECKING:
    from peft import PeftModel


def load_model(model: ModelToEvaluate, request: Request) -> PreTrainedModel:
    """Load a model with its adapter. Raises: FsdpTuneError if it cannot be loaded, or has weights missing."""
    return load_with_adapter(model, request)[0]


def load_with_adapter(model: ModelToEvaluate, request: Request) -> tuple[PreTrainedModel, PeftModel | None]:
    """Return a model with its adapter in its layers, and the PEFT model that switches it off. Raises: see `load_model`."""
    trained_base = model.trained_base
    loaded, missing = _load(model, request, trained_base)
    if trained_base is not None and trained_base.config_changes.get("tie_word_embeddings") is False:
        start_untied_head(loaded, missing)
        missing -= {name for name in missing if loaded.get_parameter(name) is getattr(loaded.get_output_embeddings(), "weight", None)}
    if missing:
        message = f"`{model.weights}` lacks {len(missing)} weights of its model, the first is {min(missing)}"
        raise failed_error("model-incomplete", message, hint="transformers would fill them with random values; write the model again")
    if model.adapter is not None:
        _resize(loaded, Path(model.adapter))
    rows = embedding_rows(loaded)
    if request.vocabulary_size > rows:
        message = f"the tokenizer has {request.vocabulary_size:,} tokens, and the embedding of `{model.weights}` has {rows:,} rows"
        hint = "evaluate models with the tokenizer of the training"
        raise usage_error("vocabulary-larger-than-embedding", message, hint=hint)
    adapted: PeftModel | None = None
    if model.adapter is not None:
        from peft import PeftModel

        # PEFT's wrapper hides the arguments of the model's forward; the adapter is in the layers of the model itself.
        adapted = PeftModel.from_pretrained(loaded, model.adapter, key_mapping=_published_names(loaded, Path(model.adapter)))
        loaded = cast(Any, adapted.get_base_model())
    placed: Any = loaded
    evaluated: PreTrainedModel = placed.to(request.device).eval()
    return evaluated, adapted


def _published_names(model: PreTrainedModel, adapter: Path) -> dict[str, str] | None:
    """Return {pattern: replacement} for the names of an adapter of a base of several modalities, of which `model` is the text's alone."""
    if not (adapter / WEIGHTS_FILE).is_file():
        return None
    prefixes = published_prefixes(model, dict(tensors_of(adapter / WEIGHTS_FILE)))
    return {f"^{re.escape(prefixes[0])}": prefixes[1]} if prefixes is not None else None


def _load(model: ModelToEvaluate, request: Request, trained_base: BaseModel | None) -> tuple[PreTrainedModel, set[str]]:
    """Return the model without its adapter, in the precision and with the configuration of the training, and its missing weights."""
    options: dict[str, Any] = {"trust_remote_code": request.trust_remote_code, "local_files_only": not hub_is_reachable()}
    options["revision"] = model.revision
    in_4_bits = trained_base is not None and trained_base.nf4_scales is not None
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model.weights, **options)
        _change(config, trained_base.config_changes if trained_base is not None else {})
        as_stored = getattr(config, "dtype", None) or torch.float32
        dtype = as_stored if request.dtype == "auto" else TORCH_DTYPE[request.dtype]
        # Rounded first, some weights would get other codes than in training.
        options["dtype"] = torch.float32 if in_4_bits else "auto" if request.dtype == "auto" else dtype
        found: Any = AutoModelForCausalLM.from_pretrained(model.weights, config=config, output_loading_info=True, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        resource = HubResource("model", model.weights, "MODEL", "model-not-found")
        message = f"the model `{model.weights}` cannot be loaded: {str(error).splitlines()[0]}"
        raise resource.problem(error) or usage_error("model-not-found", message) from error
    loaded, report = found
    if in_4_bits and trained_base is not None:
        _round_to_4_bits(loaded, trained_base, dtype)
    return loaded, set(report["missing_keys"])


def _change(config: PreTrainedConfig, changes: Mapping[str, Any]) -> None:
    """Set the fields of the base's configuration that the training changed."""
    for name, value in changes.items():
        nested = getattr(config, name, None)
        if isinstance(nested, PreTrainedConfig):
            _change(nested, value)
        else:
            setattr(config, name, value)


@torch.no_grad()
def _round_to_4_bits(model: PreTrainedModel, trained_base: BaseModel, dtype: torch.dtype) -> None:
    """Give the weights that the training held in 4 bits the values that they had there, and all parameters their dtype.

    Raises: usage error if the model has other names than the training's.
    """
    assert trained_base.nf4_scales is not None
    parameters = dict(model.named_parameters())
    if lost := [name for name in trained_base.nf4_weights if name not in parameters]:
        message = f"the base of the adapter has no `{lost[0]}`, which was trained in 4 bits"
        raise usage_error("base-changed", message, hint="evaluate the adapter with the transformers of the training, or its merged model")
    for name, parameter in parameters.items():
        if name in trained_base.nf4_weights:
            parameter.data = dequantise(*quantise(parameter.data, SCALE_DTYPE[trained_base.nf4_scales]), dtype)
        else:
            parameter.data = parameter.data.to(dtype)


def _resize(model: PreTrainedModel, adapter: Path) -> None:
    """Give embedding and head the rows that the adapter was trained with, before PEFT replaces or adapts them.

    Raises: usage error if neither the adapter nor the base has the new rows of one of them.
    """
    if not (adapter / WEIGHTS_FILE).is_file():
        return
    tensors = dict(tensors_of(adapter / WEIGHTS_FILE))
    stored = {name: tensors[key].shape for name, key in without_copies(tensors).items()}
    both = [model.get_input_embeddings(), *([head] if (head := model.get_output_embeddings()) is not None else [])]
    names = [next(name for name, module in model.named_modules() if module is each) for each in both]
    full = {name: shape for name in names for end in _WEIGHTS if (shape := stored.get(f"{PREFIX}{name}{end}")) is not None}
    adapted = [shape[axis] for name in names for end, axis in _FACTORS if (shape := stored.get(f"{PREFIX}{name}{end}")) is not None]
    rows = {shape[0] for shape in full.values()} | set(adapted)
    if rows <= {embedding_rows(model)}:
        return
    config = json.loads((adapter / CONFIG_FILE).read_bytes())
    shared = [name for name in full if is_tied(model) and not is_trained_in_full(config, f"{name}.weight")]
    if len(rows) > 1 or (len(full) < len(names) and not shared):
        message = f"`{adapter}` was trained with a vocabulary of {max(rows)}, and neither its files nor the base have all of the new rows"
        hint = "save the resized model that it was trained on (`save_pretrained`), and name it as `base_model_name_or_path` in its config"
        raise usage_error("adapter-does-not-fit", message, hint=hint)
    model.resize_token_embeddings(rows.pop(), mean_resizing=False)


_WEIGHTS = (".weight", ".base_layer.weight")
_FACTORS = ((".lora_embedding_A", 1), (".lora_B.weight", 0))
"""Tensors of an adapted embedding or head, with the axis of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Scorer:
    request: Request
    model: PreTrainedModel

    def batches(self, examples: Sequence[EvaluatedExample]) -> Iterator[list[RowScore]]:
        """Yield the scores of a batch of rows of similar length at a time; the batches are the same for any number of processes."""
        score = {"generate": self._generate, "loss": self._loss, "extension": self._extension}[self.request.measure]
        if self.request.measure == "generate":
            self._refuse_beyond_positions(examples)
        order = sorted(range(len(examples)), key=lambda index: -len(examples[index].row.input_ids))
        size = self.request.batch_size
        for start in range(self.request.part * size, len(order), self.request.parts * size):
            chosen = order[start : start + size]
            yield score(chosen, [examples[index] for index in chosen])

    def _generate(self, chosen: Sequence[int], examples: Sequence[EvaluatedExample]) -> list[RowScore]:
        request = self.request
        prompts = [example.row.input_ids[: example.answer[0]].tolist() for example in examples]
        ends = {*(request.end_ids or ()), *end_ids_of(self.model)}
        device = torch.device(request.device)
        new = generate(self.model, prompts, max_new_tokens=request.max_new_tokens, end_ids=ends, pad_id=request.pad_id, device=device)
        return [
            RowScore(index, ids=[token for token in tokens if token not in ends], is_cut=not ends.intersection(tokens))
            for index, tokens in zip(chosen, new, strict=True)
        ]

    def _loss(self, chosen: Sequence[int], examples: Sequence[EvaluatedExample]) -> list[RowScore]:
        logits, targets = self._forward(examples)
        totals: list[float] = []
        for row, wanted in zip(logits, targets, strict=True):  # fp32 copies of the logits of all rows would not fit with long rows
            trained = wanted != IGNORE_INDEX
            losses = F.cross_entropy(row[trained].float(), wanted[trained], reduction="none")
            totals.append(float(losses.double().sum()))
        return self._rows(chosen, examples, totals, (targets != IGNORE_INDEX).sum(1).tolist())

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
        return self._rows(chosen, examples, totals, counts)

    def _forward(self, examples: Sequence[EvaluatedExample]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [rows, tokens, vocabulary] and the target of each position [rows, tokens]."""
        arrays = collate([example.row for example in examples], self.request.pad_id, 1)
        tensors = {name: torch.from_numpy(array).to(self.request.device) for name, array in arrays.items()}
        logits: torch.Tensor = self.model(input_ids=tensors["input_ids"], use_cache=False).logits
        return logits, shift_labels(tensors["labels"])

    def _rows(
        self, chosen: Sequence[int], examples: Sequence[EvaluatedExample], totals: list[float], counts: list[float]
    ) -> list[RowScore]:
        for example, total in zip(examples, totals, strict=True):
            if total != total or abs(total) == float("inf"):
                message = f"the score of a row is {total}, so the metric has no value"
                problem = Problem("score-not-finite", message, example.where, "try `--dtype fp32`; else the model itself is damaged")
                raise FailedError(problem, exit_code=ExitCode.NON_FINITE)
        return [RowScore(*each) for each in zip(chosen, totals, counts, strict=True)]

    def _refuse_beyond_positions(self, examples: Sequence[EvaluatedExample]) -> None:
        longest = max(examples, key=lambda example: example.answer[0])
        if room(self.model, longest.answer[0], self.request.max_new_tokens) < 1:
            message = f"a prompt of {longest.answer[0]:,} tokens fills all positions of the model"
            raise usage_error("beyond-positions", message, where=longest.where, hint="lower `data.max_length`")


def run(request: Request, emit: Callable[[dict[str, Any]], None]) -> None:
    for number, each in enumerate(request.models):
        model = load_model(each, request)
        scorer = Scorer(request, model)
        with torch.inference_mode():
            for label, path in request.sets.items():
                for rows in scorer.batches(read_examples(path, most=request.max_rows)):
                    emit({"model": number, "set": label, "rows": [asdict(row) for row in rows]})
        del model, scorer
        if request.device.startswith("cuda"):
            torch.cuda.empty_cache()


def main() -> None:
    request = Request.from_json(sys.stdin.read())
    output = sys.stdout

    def emit(line: dict[str, Any]) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()

    with contextlib.redirect_stdout(sys.stderr):  # libraries print; stdout must hold JSON alone
        try:
            run(request, emit)
        except FsdpTuneError as error:
            emit({"problems": [problem.as_dict() for problem in error.problems], "exit_code": int(error.exit_code)})
        except torch.OutOfMemoryError as error:
            hint = f"`--batch-size {max(1, request.batch_size // 2)}`" if request.batch_size > 1 else "`--dtype bf16`, or another device"
            problem = Problem("device-out-of-memory", f"the device is out of memory: {str(error).splitlines()[0]}", hint=hint)
            emit({"problems": [problem.as_dict()], "exit_code": int(ExitCode.OUT_OF_MEMORY)})


if __name__ == "__main__":
    main()
