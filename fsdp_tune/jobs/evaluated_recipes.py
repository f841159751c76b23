"""The recipe by which a finished model and the rows of its evaluation are read: of a run, of a model alone,
and with other rows."""

from __future__ import annotations

from pydantic import ValidationError

from fsdp_tune.answer.find_model import ModelToEvaluate
from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.user_cache import default_cache_directory
from fsdp_tune.jobs.options import Allowed, DeviceKind, EvaluateOptions
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.recipe.schema.data_section import DataSource
from fsdp_tune.recipe.schema.evaluation import EvaluationSet
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir


def recipe_of_run(run: RunDir) -> Recipe:
    """Return the recipe of a run with the tokenizer that it saved, which has the recipe's template and
    special tokens."""
    raw = read_resolved(run).model_dump(by_alias=True)
    raw["model"] |= {"tokenizer": str(run.path), "tokenizer_revision": "main"}
    raw["data"]["chat_template"] = None
    return Recipe.model_validate(raw)


def recipe_of_model(model: ModelToEvaluate, allowed: Allowed) -> Recipe:
    """Return the defaults with a model and its tokenizer."""
    trust = allowed.remote_code
    raw = {
        "name_or_path": model.weights,
        "revision": model.revision,
        "tokenizer": model.tokenizer,
        "trust_remote_code": trust,
    }
    return Recipe.model_validate({"model": raw})


def options_of_set(entry: EvaluationSet, recipe: Recipe, device: DeviceKind = "auto") -> EvaluateOptions:
    """Return a set as options of `evaluate`. Every key of the set is given, so that it has nothing of the
    training sources."""
    own = {"path", "max_rows", "metric", "answer", "max_new_tokens"}
    return EvaluateOptions(
        metric=entry.metric,
        data=entry.path,
        source=entry.model_dump(exclude=own),
        max_rows=entry.max_rows,
        answer=entry.answer,
        max_new_tokens=entry.max_new_tokens,
        batch_size=recipe.evaluation.batch_size,
        device=device,
        allowed=Allowed(remote_code=recipe.model.trust_remote_code),
    )


def recipe_of_set(recipe: Recipe, options: EvaluateOptions) -> Recipe:
    """Return the recipe with `options.data` as its only source, read like the first training source unless
    `options.source` differs."""
    raw = recipe.model_dump(by_alias=True)
    data = raw["data"]
    # Callbacks, metrics and the kernels of attention and experts in training are not used here.
    raw |= {"extensions": {}}
    raw["model"]["attn_implementation"] = "auto"
    raw["kernels"]["experts"] = "auto"
    data["ignore_columns"] = [*data["ignore_columns"], *options.ignore_columns]
    data["cache_dir"] = data["cache_dir"] or str(default_cache_directory())
    if options.data is not None:
        like = {"columns", "rename_columns", "format", "loss_on", "chat_template"}
        first = recipe.data.train[0].model_dump(include=like) if recipe.data.train else {}
        try:
            entry = DataSource.model_validate(
                {**first, "path": options.data, "max_rows": options.max_rows, **options.source}
            )
        except ValidationError as error:
            wrong = error.errors()[0]
            name = ".".join(map(str, wrong["loc"]))
            raise usage_error(
                "wrong-value", f"`{name}` of `--data`: {wrong['msg']}", hint="see the keys of `data.train`"
            ) from error
        data |= {
            "train": [entry.model_dump()],
            "eval": None,
            "packing": False,
            "mixture": {},
            "drop_duplicates": False,
        }
        data |= {"streaming": False, "curriculum": []}  # of a stream, only the beginning is prepared
    elif options.source:
        raise usage_error(
            "no-evaluation-data", "options of `--data` are given without it", hint="add `--data FILE`"
        )
    elif data["eval"] is None:
        message = "there is nothing to evaluate on: no `--data`, and no `data.eval` in a recipe"
        raise usage_error(
            "no-evaluation-data", message, hint="add `--data FILE`, or `--config RECIPE` with `data.eval`"
        )
    return Recipe.model_validate(raw)
