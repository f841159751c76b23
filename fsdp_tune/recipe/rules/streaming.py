"""What works with `data.streaming`, which reads rows while the run trains."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_tune.recipe.schema.keys import Finding, Rule
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value

_STREAMING = "data.streaming"
_WHY = "`data.streaming: true` reads rows while the run trains"


def stream_has_an_end(recipe: Recipe) -> Iterator[Finding]:
    if recipe.data.streaming and training_value(recipe.training, "max_steps") <= 0:
        message = f"{_WHY}, so their number is unknown, and `training.max_steps` is missing"
        yield Finding("missing-key", (_STREAMING, "training"), message, "write `training.max_steps`")


def stream_needs_no_prepared_rows(recipe: Recipe) -> Iterator[Finding]:
    """Refuse what needs all rows before the first step."""
    data = recipe.data
    if not data.streaming:
        return
    if data.eval is not None and not isinstance(data.eval, list):
        message = f"{_WHY}, and `data.eval` would hold out a part of all rows"
        yield Finding(
            "contradiction",
            ("data.eval", _STREAMING),
            message,
            "give the rows to evaluate on as sources: `eval: [{path: …}]`",
        )
    if recipe.training.per_device_train_batch_tokens is not None:
        message = f"{_WHY}, and `training.per_device_train_batch_tokens` forms batches of all rows by length"
        keys = ("training.per_device_train_batch_tokens", _STREAMING)
        yield Finding("contradiction", keys, message, "use `data.packing: true`, which fills rows")
    if data.drop_duplicates:
        message = f"{_WHY}, and `data.drop_duplicates: true` compares all rows with each other"
        yield Finding("contradiction", ("data.drop_duplicates", _STREAMING), message, "leave one of them out")
    if data.mixture.temperature != 1.0:
        message = (
            f"{_WHY}, so the sizes of the sources, which `data.mixture.temperature` flattens, are unknown"
        )
        yield Finding(
            "contradiction", ("data.mixture.temperature", _STREAMING), message, "give each source a `weight`"
        )
    for index in [index for index, source in enumerate(data.train) if source.max_rows is not None]:
        key = f"data.train[{index}].max_rows"
        message = (
            f"{_WHY}, in lanes that do not read it from its beginning to its end, so `max_rows` has "
            "no meaning"
        )
        yield Finding("contradiction", (key, _STREAMING), message, "select files by `data_files`")


def stream_has_no_epochs(recipe: Recipe) -> Iterator[Finding]:
    """Refuse to act once an epoch: the only one ends with the run, so that a run that is stopped would have
    no checkpoint."""
    for name in ("save_strategy", "eval_strategy", "logging_strategy"):
        if recipe.data.streaming and training_value(recipe.training, name) == "epoch":
            key = f"training.{name}"
            message = (
                f"`{key}: epoch` waits for the end of an epoch, and `data.streaming: true` has none "
                "before the last step"
            )
            yield Finding("contradiction", (key, _STREAMING), message, f"write `{name}: steps`")


def mixture_of_a_stream_has_weights(recipe: Recipe) -> Iterator[Finding]:
    data = recipe.data
    if not data.streaming or len(data.train) < 2:
        return
    if missing := [index for index, source in enumerate(data.train) if source.weight is None]:
        message = (
            f"{_WHY}, so the sizes of the sources are unknown, and `data.train[{missing[0]}]` has no `weight`"
        )
        yield Finding(
            "missing-key",
            (f"data.train[{missing[0]}]", _STREAMING),
            message,
            "give each source a `weight`, its share",
        )


def curriculum_is_in_order(recipe: Recipe) -> Iterator[Finding]:
    data, before = recipe.data, 0
    for index, stage in enumerate(data.curriculum):
        key = f"data.curriculum[{index}]"
        if stage.until_step <= before:
            message = f"`{key}` ends at step {stage.until_step}, and the stage before it at step {before}"
            yield Finding(
                "wrong-value", (f"{key}.until_step",), message, "write the stages in the order of their steps"
            )
        if len(stage.weights) != len(data.train) or not any(stage.weights):
            message = (
                f"`{key}.weights` has {len(stage.weights)} values, and `data.train` {len(data.train)} entries"
            )
            if len(stage.weights) == len(data.train):
                message = f"`{key}.weights` are all 0"
            yield Finding(
                "wrong-value", (f"{key}.weights",), message, "write one number for each entry, in their order"
            )
        before = stage.until_step


def passes_are_of_a_stream(recipe: Recipe) -> Iterator[Finding]:
    for index, source in enumerate(recipe.data.train):
        if source.repeats is not None and not recipe.data.streaming:
            key = f"data.train[{index}].repeats"
            message = f"`{key}` limits the passes over a stream, and `data.streaming` is false"
            yield Finding(
                "contradiction",
                (key, _STREAMING),
                message,
                "use `training.num_train_epochs`, or `weight`s of the sources",
            )


STREAMING_RULES: tuple[Rule, ...] = (
    *(
        stream_has_an_end,
        stream_needs_no_prepared_rows,
        stream_has_no_epochs,
        mixture_of_a_stream_has_weights,
    ),
    *(curriculum_is_in_order, passes_are_of_a_stream),
)
