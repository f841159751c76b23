"""Make a recipe for a model, data and GPUs (`recipes new`)."""

from __future__ import annotations

import glob
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fsdp_tune.core.atomic import DISK, check_output_file, write_file
from fsdp_tune.core.command import Bar
from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.core.files import expanded
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.plan import plan
from fsdp_tune.jobs.recipe_options import Method, NewRecipeOptions
from fsdp_tune.planner.predict.predict import Plan
from fsdp_tune.recipe.read.loader import LoadedRecipe, parse_recipe
from fsdp_tune.recipe.references import can_only_be_a_path
from fsdp_tune.recipe.rules.contradictions import INPUTS

_FULL_RATE, _ADAPTER_RATE = 1.0e-5, 2.0e-4


_METHODS: dict[Method, dict[str, object]] = {
    "full": {},
    "lora": {"lora": {"r": 16, "lora_alpha": 32}},
    "qlora": {"lora": {"r": 16, "lora_alpha": 32}, "quantization": {"load": "nf4"}},
}


_COMMENTS = {
    "  max_length:": "tokens of a row; longer examples are cut, and `prepare` counts them",
    "  packing:": "examples share rows, and no token sees another example",
    "  fraction:": "held out from `train`",
    "  global_batch_size:": "rows of a step over all GPUs",
    "  learning_rate:": "where to begin: try half and double of it",
    "  warmup_steps:": "a share of all steps",
    "  lora_alpha:": "updates are scaled by lora_alpha / r",
    "  load:": "frozen weights in 4 bits (QLoRA)",
    "  num_processes:": "one for each GPU",
    "output_dir:": "checkpoints, metrics and the merged model",
}


@dataclass(frozen=True, slots=True)
class NewRecipe:
    """`plan` is that of the recipe on the GPUs; `refused` has, for each method that did not fit, the
    reason."""

    path: Path
    method: Method
    plan: Plan
    refused: dict[str, str]


class _ProgressOnly(Observer):
    def __init__(self, inner: Observer, method: Method) -> None:
        self.inner, self.method = inner, method

    def progress(self, label: str, total: int | None, unit: str) -> AbstractContextManager[Bar]:
        return self.inner.progress(f"{self.method}: {label}", total, unit)


def new_recipe(
    model: str, data: str, options: NewRecipeOptions, observer: Observer = Observer()
) -> NewRecipe:
    """Write the best recipe for a model, a source of rows and GPUs to `options.output`.

    With the method `auto`, all parameters are trained if that fits, else adapters, else adapters on weights
    in 4 bits. A layout with parameters in host memory is not taken by `auto`.
    Raises: FsdpTuneError for inputs that are not found, a file that exists, or if nothing fits.
    """
    target = options.output
    check_output_file(target)
    if (
        can_only_be_a_path(data)
        and "://" not in data
        and not glob.has_magic(data)
        and not expanded(data).exists()
    ):
        raise usage_error(
            "data-not-found", f"`{data}` does not exist", hint="a file, a directory, a hub id or builtin:NAME"
        )
    refused: dict[str, str] = {}
    offloaded: NewRecipe | None = None
    for method in _methods(options.method):
        text = _text(model, data, method, options)
        try:
            made = _written(
                parse_recipe(text, target, unneeded=INPUTS), target, options, _ProgressOnly(observer, method)
            )
        except FsdpTuneError as error:
            if error.problems[0].code != "nothing-fits":
                raise
            refused[method] = error.problems[0].message
            observer.message(f"{method}: {refused[method]}")
            continue
        found = NewRecipe(target, method, made, refused)
        if options.method != "auto" or not made.alternatives[0].recipe_changes.get("fsdp.offload_params"):
            write_file(target, _commented(target.read_text(encoding="utf-8")))
            return found
        refused[method] = "it fits only with parameters in host memory, which costs most of the time"
        observer.message(f"{method}: {refused[method]}")
        offloaded = offloaded or found
        DISK.unlink(target)
    tried = ", ".join(refused)
    if offloaded is not None:
        hint = f"`--method {offloaded.method}` writes the one with parameters in host memory"
        raise usage_error(
            "nothing-fits", f"no recipe for {model} fits the GPUs alone ({tried} tried)", hint=hint
        )
    hint = "more or larger GPUs, or a shorter `--max-length`"
    raise usage_error(
        "nothing-fits",
        f"no recipe for {model} fits ({tried} tried): {next(iter(refused.values()))}",
        hint=hint,
    )


def _written(loaded: LoadedRecipe, target: Path, options: NewRecipeOptions, observer: Observer) -> Plan:
    return plan(
        loaded, gpu=options.gpu, num_gpus=options.num_gpus, target="fastest", write=target, observer=observer
    )


def _methods(wanted: str) -> list[Method]:
    return list(_METHODS) if wanted == "auto" else [method for method in _METHODS if method == wanted]


def _text(model: str, data: str, method: Method, options: NewRecipeOptions) -> str:
    source: dict[str, Any] = {"path": data} | ({"split": options.split} if options.split else {})
    document: dict[str, object] = {
        "model": {"name_or_path": model},
        "data": {
            "train": [source],
            "eval": {"fraction": 0.01},
            "max_length": options.max_length,
            "packing": True,
        },
        **_METHODS[method],
        "precision": {"mixed_precision": "bf16"},
        "training": {
            "global_batch_size": options.global_batch_size,
            "learning_rate": _FULL_RATE if method == "full" else _ADAPTER_RATE,
            "num_train_epochs": 3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0.03,
            "save_steps": 200,
        },
        "launch": {"num_processes": options.num_gpus},
        "output_dir": "runs/{name}",
    }
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _commented(text: str) -> str:
    """Add to the lines of a recipe what their keys mean, unless they have a comment."""

    def with_words(line: str) -> str:
        words = next((words for key, words in _COMMENTS.items() if line.startswith(key)), None)
        return line if words is None or "#" in line else f"{line}  # {words}"

    return "".join(f"{with_words(line)}\n" for line in text.splitlines())
