"""Values of another kind than a tool has at a place: each is a question or refused, and none ends the
import."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.migrate.importing import import_file
from fsdp_tune.migrate.ledger import Ledger
from fsdp_tune.migrate.rules import FileKey, Outcome
from fsdp_tune.migrate.settle_keys import settle_key
from fsdp_tune.recipe.outcome import Fate
from tests.migrate.foreign_files import FILES
from tests.migrate.imports import AUTOMODEL_STEP, TORCHTUNE_STEP, from_text, row

KINDS: tuple[Any, ...] = (1, "x", None, [], {}, [1], {"a": 1}, [{"a": 1}], ["x", ["y"]], 1.5, True)


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    for name, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield (*path, name)
        yield from places(inner, (*path, name))


@pytest.mark.parametrize(
    "name", [name for name, (_, file, _) in FILES.items() if file.endswith((".yaml", ".json"))]
)
def test_value_of_another_kind_is_a_question_or_refused(tmp_path: Path, name: str) -> None:
    """A few random places and kinds for each tool; 3,879 were tried once."""
    tool, file, text = FILES[name]
    values = yaml.safe_load(text)
    chosen = random.Random(name).sample([(place, kind) for place in places(values) for kind in KINDS], 10)
    for place, kind in [*chosen, *OTHER_KINDS.get(name, ())]:
        changed = copy.deepcopy(values)
        holder: Any = changed
        for part in place[:-1]:
            holder = holder[part]
        holder[place[-1]] = kind
        (tmp_path / file).write_text(
            json.dumps(changed) if file.endswith(".json") else yaml.safe_dump(changed)
        )
        with contextlib.suppress(FsdpTuneError):
            import_file(tmp_path / file, tool=tool)


OTHER_KINDS: dict[str, list[tuple[tuple[str | int, ...], Any]]] = {
    "axolotl": [
        *(
            (("base_model",), ["x", ["y"]]),
            (("datasets", 0), {}),
            (("datasets", 1, "type"), 1),
            (("gradient_checkpointing",), {}),
        ),
        *((("evals_per_epoch",), True), (("val_set_size",), [])),
    ],
    "trl": [(("lora_target_modules", 0), [{"a": 1}]), (("model_init_kwargs",), True)],
    "accelerate": [(("mixed_precision",), [])],
    "torchtune": [
        *((("dataset",), 1), (("dataset",), [1]), (("epochs",), [{"a": 1}]), (("max_steps_per_epoch",), {})),
        (("checkpointer", "output_dir"), True),
    ],
    "llama-factory": [(("lora_rank",), "x")],
    "automodel": [
        *(
            (("distributed", "strategy"), {}),
            (("lr_scheduler", "lr_decay_style"), []),
            (("validation_dataset",), "x"),
        ),
        (("optimizer", "betas"), [1]),
    ],
    "soup": [
        *(
            (("training",), "x"),
            (("training", "batch_size"), True),
            (("training", "lora", "target_modules"), {}),
        ),
        *((("data", "format"), {}), (("data", "format"), None)),
    ],
    "ms-swift-yaml": [(("loss_scale",), []), (("interleave_prob",), "x")],
    "deepspeed": [
        *((("zero_optimization",), [1]), (("zero_optimization", "offload_optimizer", "device"), {})),
        *((("scheduler",), 1), (("scheduler", "params"), "x")),
    ],
    "fms": [(("use_flash_attn",), True)],
}
"""Those that ended with a traceback, and one for each question about a kind."""


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        (TORCHTUNE_STEP.format("torch.optim.AdamW", ", betas: []"), "optimizer.betas", "question"),
        (
            AUTOMODEL_STEP.format("torch.optim.AdamW", "") + "distributed: {tp_size: '2'}\n",
            "distributed.tp_size",
            "question",
        ),
        (
            AUTOMODEL_STEP.format("torch.optim.AdamW", "") + "distributed: {dp_size: '8'}\n",
            "distributed.dp_size",
            "question",
        ),
        (
            AUTOMODEL_STEP.format("torch.optim.AdamW", "") + "distributed: {cp_size: '1'}\n",
            "distributed.cp_size",
            "dropped",
        ),
        (
            AUTOMODEL_STEP.format("torch.optim.AdamW", "") + "distributed: {ep_size: '2'}\n",
            "distributed.ep_size",
            "question",
        ),
        (
            AUTOMODEL_STEP.format("torch.optim.AdamW", "") + "distributed: {ep_size: none}\n",
            "distributed.ep_size",
            "dropped",
        ),
        ("model: m\ndataset: [a.jsonl]\ntuner_type: lora\nadapters: []\n", "adapters", "dropped"),
        ("model: m\ndataset: [a.jsonl]\ntuner_type: lora\nadapters: true\n", "adapters", "question"),
    ],
)
def test_value_that_a_rule_cannot_take_is_a_question_and_an_empty_list_of_adapters_names_none(
    text: str, key: str, expected: str, tmp_path: Path
) -> None:
    result = from_text(tmp_path, text, tool="ms-swift" if key == "adapters" else None)
    assert row(result, key)[0] == expected
    assert "lora.adapter" not in result.text


@pytest.mark.parametrize(
    "error", [IndexError, KeyError, OverflowError, ZeroDivisionError, TypeError, ValueError, AttributeError]
)
def test_error_of_a_rule_is_a_question(error: type[Exception]) -> None:
    def rule(key: FileKey) -> Outcome:
        raise error

    ledger = Ledger({"x": 1}, {}, "TRL")
    settle_key(ledger, ("x",), rule)
    assert ledger.rows[0].fate is Fate.QUESTION
