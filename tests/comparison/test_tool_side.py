"""TRL computes its own side: a planted difference is found at the first stage that shows it. Fast tests have
a stand-in in its place."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import yaml

import fsdp_tune
from fsdp_tune.cli.compare import comparison_page, verdict_of
from fsdp_tune.comparison import tool_rows, tool_side
from fsdp_tune.comparison.causes import option_paths
from fsdp_tune.comparison.environments import needed_requirements
from fsdp_tune.comparison.observe import Side
from fsdp_tune.comparison.side_processes import ObservingChild, ToolChild
from fsdp_tune.comparison.stages import RANDOM, Observation, StageFacts, open_words, stages_until
from fsdp_tune.jobs.options import CompareOptions
from tests.comparison.tool_files import (
    TEMPLATE,
    compared,
    files,
    first,
    here,
    keys,
    one_thread,
    recipe_of,
    unshuffled,
    written,
)

__all__ = ["files", "one_thread"]


OLD_OPTIONS = ("chat_template", "warmup_ratio", "max_seq_length", "dataset_mixture")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    """In place of TRL: the recipe that `import` makes, with a loss that noise doubles where
    `neftune_noise_alpha` is set, or a mean of another kind. As the newest TRL does, it ignores options of
    older ones."""
    monkeypatch.setattr(ObservingChild, "computed", here)

    def computed(child: Any, values: Mapping[str, Any], until: str) -> Observation:
        ignored = tuple(name for name in values if name in OLD_OPTIONS)
        (files / "stand-in.yaml").write_text(
            yaml.safe_dump(
                {name: value for name, value in values.items() if name not in ignored or "dataset" in name}
            )
        )
        fsdp_tune.import_recipe("stand-in.yaml", output="stand-in-recipe.yaml", num_gpus=1, force=True)
        from fsdp_tune.jobs.observer import Observer
        from fsdp_tune.jobs.recipes import resolve_recipe
        from fsdp_tune.recipe.read.loader import load_recipe

        recipe = resolve_recipe(
            load_recipe("stand-in-recipe.yaml"), CompareOptions().allowed, Observer()
        ).recipe
        settings = {
            "rows": 32,
            "model": "small",
            "folder": str(files),
            "defaults": False,
            "beside_tool": True,
        }
        found = Side(
            {"recipe": recipe.model_dump(mode="json", by_alias=True), "until": until, **settings}
        ).observe()
        stages = dict(found.stages)
        if (order := stages.get("order")) is not None:
            drawn_by = "torch's generator" if recipe.data.shuffle else None
            stages["order"] = StageFacts(order.values, order.reason, drawn_by=drawn_by)
        if (
            "neftune_noise_alpha" in values or "average_tokens_across_devices" in values
        ) and "loss" in stages:
            stages["loss"] = StageFacts({"step 1": 2.0 * stages["loss"].values["step 1"]})
        return Observation(
            stages, found.names, found.texts, {**found.versions, "trl": "1.0"}, found.left_out, None, ignored
        )

    monkeypatch.setattr(ToolChild, "_computed", computed)


@pytest.mark.usefixtures("stand_in")
def test_configuration_and_its_recipe_are_equal_but_for_the_order(files: Path) -> None:
    found = compared(written(files, "trl"), recipe_of(files))
    assert found.equal
    assert (found.a.tool_version, found.b.tool_version) == ("1.0", None)
    status = {stage.name: stage.status for stage in found.stages}
    assert {name for name, each in status.items() if each != "equal"} == {"order"}
    assert any(RANDOM in line for line in found.not_compared)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("turned", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_key_is_the_cause_whichever_side_the_tool_computes(files: Path, *, turned: bool) -> None:
    sides = (written(files, "trl", weight_decay=0.1), recipe_of(files))
    found = compared(*(reversed(sides) if turned else sides))
    assert (first(found), keys(found)) == ("update", ["training.weight_decay"])
    assert found.cause is not None
    assert found.cause.text.endswith(
        "with B's value in A the difference vanishes"
        if turned
        else "with A's value in B the difference vanishes"
    )
    assert found.cause.hint is not None
    assert "`--set training.weight_decay=0.1` gives" in found.cause.hint


@pytest.mark.usefixtures("stand_in")
def test_option_that_a_recipe_lacks_is_found_by_leaving_it_out_of_the_tool(files: Path) -> None:
    found = compared(written(files, "trl", neftune_noise_alpha=5, weight_decay=0.1), recipe_of(files))
    assert (first(found), keys(found)) == ("loss", [])
    assert found.cause is not None
    assert found.cause.is_shown
    assert "`neftune_noise_alpha: 5` of trl.yaml" in found.cause.text
    assert [
        (each.difference.stage, [key.key for key in each.cause.keys] if each.cause else None)
        for each in found.later
    ] == [("update", ["training.weight_decay"])]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("second", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_option_that_no_recipe_has_is_found_in_either_of_two_configurations(
    files: Path, *, second: bool
) -> None:
    sides = (
        written(files, "one", average_tokens_across_devices=False),
        written(files, "other", weight_decay=0.1),
    )
    found = compared(*(reversed(sides) if second else sides))
    assert found.cause is not None
    assert (
        found.cause.text
        == "`average_tokens_across_devices: false` of one.yaml: without it TRL gives what the other side has"
    )
    assert [
        (each.difference.stage, [key.key for key in each.cause.keys] if each.cause else None)
        for each in found.later
    ] == [("update", ["training.weight_decay"])]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("turned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_option_that_the_tool_ignores_is_the_cause_of_what_the_recipe_has_from_it(
    files: Path, *, turned: bool
) -> None:
    template = TEMPLATE.replace("<|im_end|>", "<|stop|>")
    options = {"chat_template": template, "warmup_ratio": 0.5}
    sides = (written(files, "trl", weight_decay=0.1, **options), recipe_of(files, **options))
    found = compared(*(reversed(sides) if turned else sides))
    causes = [found.cause, *(each.cause for each in found.later)]
    assert [first(found), *(each.difference.stage for each in found.later)] == ["tokens", "rate", "update"]
    assert [[key.key for key in cause.keys] for cause in causes if cause] == [
        ["data.chat_template"],
        ["training.warmup_steps"],
        ["training.weight_decay"],
    ]
    recipe_side, tool_side = ("A", "B") if turned else ("B", "A")
    assert [cause.text for cause in causes[:2] if cause] == [
        f"`{key}`: {recipe_side} has it from `{option}` of trl.yaml, which TRL ignores; with "
        f"{tool_side}'s value the difference vanishes"
        for key, option in (
            ("data.chat_template", "chat_template"),
            ("training.warmup_steps", "warmup_ratio"),
        )
    ]
    assert [cause.hint for cause in causes[:2] if cause] == [
        f"a recipe without `data.chat_template` gives {recipe_side} the numbers of {tool_side} at this stage",
        f"`--set training.warmup_steps=0.0` gives {recipe_side} the numbers of {tool_side} at this stage",
    ]


@pytest.mark.usefixtures("stand_in")
def test_default_of_the_tool_is_back_where_it_ignores_an_option(files: Path) -> None:
    """TRL cuts rows at 1,024 tokens, and a recipe at as many as the small model has positions."""
    rows = [
        {"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so " * 400}]}
        for _ in range(12)
    ]
    (files / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "max_length": None,
        "max_seq_length": 64,
        "datasets": [{"path": "json", "data_files": "long.jsonl"}],
    }
    found = compared(written(files, "trl", **options), recipe_of(files, **options))
    assert (first(found), keys(found)) == ("rows", ["data.max_length"])
    assert found.cause is not None
    assert "B has it from `max_seq_length` of trl.yaml, which TRL ignores" in found.cause.text
    assert found.cause.hint == "`--set data.max_length=1024` gives B the numbers of A at this stage"


@pytest.mark.usefixtures("stand_in")
def test_ignored_sources_do_not_hide_another_ignored_option(files: Path) -> None:
    options = {
        "datasets": None,
        "dataset_mixture": {"datasets": [{"path": "json", "data_files": "chat.jsonl"}]},
    }
    options |= {"chat_template": TEMPLATE.replace("<|im_end|>", "<|stop|>"), "attn_implementation": "eager"}
    found = compared(written(files, "trl", **options), recipe_of(files, **options))
    assert (first(found), keys(found)) == ("tokens", ["data.chat_template"])


@pytest.mark.usefixtures("stand_in")
def test_value_of_the_other_side_is_not_said_to_come_from_an_ignored_option(files: Path) -> None:
    found = compared(written(files, "trl", warmup_ratio=0.5), recipe_of(files, warmup_steps=3))
    assert keys(found) == ["training.warmup_steps"]
    assert found.cause is not None
    assert found.cause.text == (
        "`training.warmup_steps`: with A's value in B the difference vanishes; A is given "
        "`warmup_ratio` of trl.yaml, which TRL ignores"
    )


def test_rows_of_the_same_pieces_and_open_decisions_are_named_where_they_count() -> None:
    rows = [
        {"row 0": [["a", 0, 3], ["b", 0, 2]], "row 1": [["c", 0, 4]]},
        {"row 0": [["c", 0, 4], ["b", 0, 2]], "row 1": [["a", 0, 3]]},
    ]
    a, b = (Observation({"rows": StageFacts(each)}, {}, {}, {}, ()) for each in rows)
    decisions = [
        ("data.loss_on", "which tokens"),
        ("data.overlong", "cut or drop"),
        ("training.seed", "which"),
    ]
    assert open_words("rows", decisions, a, b) == [
        "the same pieces of examples stand in other rows, since each packs by its own rule",
        "`data.overlong`: cut or drop",
    ]
    other = Observation({"rows": StageFacts({"row 0": [["c", 0, 3]]})}, {}, {}, {}, ())
    assert open_words("rows", decisions, a, other) == ["`data.overlong`: cut or drop"]
    assert open_words("labels", decisions, a, b) == [
        "`data.loss_on`: which tokens",
        "`data.overlong`: cut or drop",
    ]
    assert open_words("update", decisions, a, b) == ["`training.seed`: which"]


@pytest.mark.usefixtures("stand_in")
def test_order_counts_where_the_other_side_does_not_shuffle(files: Path) -> None:
    found = compared(written(files, "trl"), unshuffled(files))
    assert (first(found), keys(found)) == ("order", ["data.shuffle"])


@pytest.mark.usefixtures("stand_in")
def test_imported_recipe_alone_is_compared_if_that_is_wanted(files: Path) -> None:
    found = compared(written(files, "trl", neftune_noise_alpha=5), recipe_of(files), tools="import")
    assert (found.a.tool_version, first(found)) == (None, None)


@pytest.mark.usefixtures("stand_in")
def test_key_that_two_configurations_give_is_the_cause(files: Path) -> None:
    """Their options are flat: `training.weight_decay` is `weight_decay`, and the batch size of a step comes
    from two of them."""
    a = written(files, "one", weight_decay=0.1)
    found = compared(a, written(files, "other", weight_decay=0.2))
    assert (first(found), keys(found)) == ("update", ["training.weight_decay"])
    assert not any("no stage shows an effect" in line for line in found.not_compared)
    found = compared(a, written(files, "other", weight_decay=0.1, gradient_accumulation_steps=4))
    assert (first(found), keys(found)) == ("batch", ["training.global_batch_size"])


@pytest.mark.usefixtures("stand_in")
def test_key_whose_effect_was_not_found_is_not_said_to_have_none(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_tune.jobs.compare.option_paths", lambda *_: [])
    found = compared(written(files, "one", weight_decay=0.1), written(files, "other", weight_decay=0.2))
    assert first(found) == "update"
    assert not any("no stage shows an effect" in line for line in found.not_compared)


def test_options_of_keys_are_those_of_either_side_that_both_can_hold() -> None:
    rows = [
        (("weight_decay",), [("training", "weight_decay")]),
        (("model_init_kwargs", "dtype"), [("model", "dtype")]),
    ]
    rows += [(("lora_r",), [("lora", "r")])]
    flat, nested = {"dtype": "float32"}, {"model_init_kwargs": {"dtype": "bfloat16"}}
    assert option_paths([("training", "weight_decay"), ("lora",)], rows, (flat, flat)) == [
        ("weight_decay",),
        ("lora_r",),
    ]
    assert option_paths([("model", "dtype")], rows, (nested, nested)) == [("model_init_kwargs", "dtype")]
    assert option_paths([("model", "dtype")], rows, (flat, nested)) == [("model_init_kwargs",)]


@pytest.mark.usefixtures("stand_in")
def test_sides_that_a_tool_did_not_compute_are_never_equal(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ToolChild._computed

    def refusing(child: Any, values: Mapping[str, Any], until: str) -> Observation:
        found = whole(child, values, until)
        stages = {
            name: facts if name in ("tokens", "labels") else StageFacts(reason="TRL: it refuses")
            for name, facts in found.stages.items()
        }
        return replace(found, stages=stages, failed="TRL: it refuses")

    monkeypatch.setattr(ToolChild, "_computed", refusing)
    found = compared(written(files, "trl"), recipe_of(files))
    assert {stage.status for stage in found.stages} == {"equal", "not_compared"}
    assert not found.equal
    assert found.failed == ["TRL did not compute all of trl.yaml: TRL: it refuses"]
    assert verdict_of(found).startswith(
        "not comparable: 2 of 16 stages compared; a tool failed; not compared: what is listed above ("
    )
    assert "it refuses" in comparison_page(found)


@dataclass
class SFTConfig:
    model_init_kwargs: Any = None
    trust_remote_code: Any = False
    bf16: bool = False
    fp16: bool = False
    packing: bool = False
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    output_dir: str = ""


@dataclass
class ModelConfig:
    dtype: Any = None
    trust_remote_code: Any = False


class StandInParser:
    """Reads as TRL does: a number may be text, `model_init_kwargs` may be JSON, and `env` sets variables of
    the process."""

    def __init__(self, classes: Sequence[type[Any]]) -> None:
        self._classes = classes

    def parse_args_and_config(self, words: Sequence[str], **_: Any) -> tuple[Any, ...]:
        values = json.loads(Path(words[1]).read_text())
        os.environ.update(values.pop("env", {}))
        found = []
        for each in self._classes:
            given = {name: values[name] for name in each.__dataclass_fields__ if name in values}
            given |= {name: int(value) for name, value in given.items() if name.endswith(("_size", "_steps"))}
            if isinstance(kwargs := given.get("model_init_kwargs"), str):
                given["model_init_kwargs"] = json.loads(kwargs)
            found.append(each(**given))
        return (*found, [])


class StandInTrainer:
    """Of rows with `text`, whose letters are the tokens."""

    made: ClassVar[list[Any]] = []

    def __init__(self, **given: Any) -> None:
        self.given, self.args, self.model = given, given["args"], torch.nn.Linear(1, 1)
        self.processing_class = SimpleNamespace(decode=str)
        self.train_dataset = [{"input_ids": [*row["text"].encode()]} for row in given["train_dataset"]]
        StandInTrainer.made.append(self)

    def data_collator(self, rows: Sequence[Any]) -> Any:
        ids = [row["input_ids"] for row in rows]
        return {"labels": torch.tensor([each + [-100] * (max(map(len, ids)) - len(each)) for each in ids])}

    def get_batch_samples(self, batches: Any, _count: int) -> Any:
        return None, sum(int((batch["labels"] != -100).sum()) for batch in batches)

    def get_train_dataloader(self) -> Any:
        return [self.data_collator([row]) for row in self.train_dataset]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Return a function from options to TRL's answer about the data, with a stand-in of TRL."""
    import transformers

    names = {
        "TrlParser": StandInParser,
        "SFTConfig": SFTConfig,
        "ModelConfig": ModelConfig,
        "SFTTrainer": StandInTrainer,
    }
    modules = {"trl": SimpleNamespace(get_peft_config=lambda _: None, **names)}
    of_first_row = {"from_list": lambda rows: [{name: row.get(name) for name in rows[0]} for row in rows]}
    modules["datasets"] = SimpleNamespace(Dataset=SimpleNamespace(**of_first_row))
    real = tool_side.importlib.import_module
    monkeypatch.setattr(tool_side.importlib, "import_module", lambda name: modules.get(name) or real(name))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: None)
    monkeypatch.setattr(StandInTrainer, "made", [])
    monkeypatch.setattr(ToolChild, "_computed", _answer_of)

    def answer(
        rows: Sequence[Any], values: Mapping[str, Any], *, until: str = "items", **request: Any
    ) -> Any:
        lines = [
            {"key": f"0:{number}:1", "name": f"row {number}", "values": row}
            for number, row in enumerate(rows)
        ]
        (tmp_path / "rows").write_text("".join(json.dumps(line) + "\n" for line in lines))
        inputs = {
            "rows": str(tmp_path / "rows"),
            "model": "small",
            "tokenizer": "small",
            "revision": None,
            "ranks": 1,
            "model_rows": 8,
        }
        inputs |= {"ordered_steps": 2, "trust_remote_code": False, **request}
        return ToolChild("python", "TRL", inputs).observe(values, until)

    return answer


def _answer_of(child: Any, values: Mapping[str, Any], until: str) -> Observation:
    request = {"tool": "TRL", "values": values, "until": list(stages_until(until)), **child._inputs}
    return Observation.from_json(json.loads(json.dumps(tool_side._answer(SimpleNamespace(**request)))))


TEXTS = [{"text": letter * 3} for letter in "abcdefgh"]


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"trust_remote_code": "yes"},
        {
            "model_init_kwargs": {
                "trust_remote_code": 1,
                "code_revision": "evil",
                "use_kernels": True,
                "weights_only": False,
            }
        },
        {"model_init_kwargs": '{"trust_remote_code": true}'},
        {},
    ],
)
def test_code_of_a_repository_runs_only_if_the_request_trusts_it(
    asked: Callable[..., Any], options: Any, *, trusted: bool
) -> None:
    asked(TEXTS, options, trust_remote_code=trusted)
    assert StandInTrainer.made
    for each in StandInTrainer.made:
        assert each.args.trust_remote_code is trusted
        assert each.args.model_init_kwargs == {"trust_remote_code": trusted}


def test_variables_that_a_configuration_sets_do_not_reach_the_tool(
    asked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_TRUST_OF_A_TEST", "no")
    asked(TEXTS, {"env": {"HF_HUB_TRUST_OF_A_TEST": "yes"}})
    assert os.environ["HF_HUB_TRUST_OF_A_TEST"] == "no"


def test_batch_is_that_of_the_options_as_trl_reads_them(asked: Callable[..., Any]) -> None:
    """`import` asks about text in the place of a number, so the recipe has another batch."""
    found = asked(TEXTS, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": "2"}, ranks=2)
    assert found.stages["batch"].values == {"sequences": 4}
    assert found.stages["items"].values == {"step 1": 12, "step 2": 12}


def test_column_that_the_first_row_lacks_is_kept(asked: Callable[..., Any]) -> None:
    asked([{"text": "a"}, {"text": "b", "tools": "c"}], {})
    assert StandInTrainer.made[0].given["train_dataset"] == [
        {"text": "a", "tools": None},
        {"text": "b", "tools": "c"},
    ]


def test_first_reason_is_that_of_every_stage_that_depends_on_it(
    asked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = asked(TEXTS, {"per_device_train_batch_size": 0}, until="update")
    assert {name for name, facts in found.stages.items() if facts.reason is None} == {"tokens", "labels"}
    assert {facts.reason for facts in found.stages.values()} == {None, found.failed}
    assert "ZeroDivisionError" in str(found.failed)

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no such option")

    monkeypatch.setattr(StandInTrainer, "__init__", refuse)
    found = asked(TEXTS, {}, until="update")
    assert {facts.reason for facts in found.stages.values()} == {"TRL: ValueError: no such option"}
    assert found.failed == "TRL: ValueError: no such option"


def test_code_that_a_model_names_is_not_in_the_small_one_unless_it_is_trusted(
    files: Path, tmp_path: Path
) -> None:
    config = json.loads((files / "base" / "config.json").read_text()) | {
        "auto_map": {"AutoConfig": "other.Config"}
    }
    shutil.copytree(files / "base", tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    found: dict[bool, Any] = {}
    for trusted in (True, False):
        raw = {
            "model": {"name_or_path": str(tmp_path / "base"), "trust_remote_code": trusted},
            "data": {"train": [{"path": "chat.jsonl"}]},
        }
        settings = {
            "rows": 1,
            "model": "small",
            "folder": str(tmp_path),
            "defaults": False,
            "beside_tool": True,
            "until": "model",
        }
        side = Side({"recipe": raw, **settings})
        small = side._one_process()
        assert small.model.name_or_path is not None
        found[trusted] = json.loads(Path(small.model.name_or_path, "config.json").read_text()).get("auto_map")
    assert found == {True: config["auto_map"], False: None}


def test_newest_version_is_installed_unless_one_is_named() -> None:
    assert needed_requirements(["TRL"], ["accelerate==1.15.0"]) == ["accelerate==1.15.0", "trl"]
    assert needed_requirements(["TRL"], ["TRL == 1.0"]) == ["TRL == 1.0"]
    assert needed_requirements([], ["transformers==4.57.6"]) == ["transformers==4.57.6"]


def test_piece_is_found_in_the_first_example_that_has_it(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.write_text("".join(json.dumps({"key": key, "name": key, "values": {}}) + "\n" for key in "abc"))
    side = tool_rows.ToolRows(SimpleNamespace(rows=str(rows)))
    side.set_examples([[1, 2, 3, 4], [1, 2], [5]], [[1, 2, 3, 4], [1, -100], [5]], str)
    assert side.stages["labels"]["values"] == {"a": [0, 1, 1, 1], "b": [0, 0], "c": [0]}
    side.set_rows([([1, 2, 5], [2, 1]), ([1, 2, 3], None), ([4], None), ([9], None)], is_wrapped=False)
    assert side.stages["rows"]["values"] == {
        "row 0": [["b", 0, 2], ["c", 0, 1]],
        "row 1": [["a", 0, 3]],
        "row 2": [["a", 3, 1]],
        "row 3": [["tokens of no example", 0, 1]],
    }
    side.set_rows([([1, 2, 3], None), ([4, 1, 2], None), ([5], None)], is_wrapped=True)
    assert side.stages["rows"]["values"]["row 1"] == [["a", 3, 1], ["b", 0, 2]]


def test_rows_of_a_step_follow_their_order_and_begin_again() -> None:
    assert [tool_rows.step_rows(step, 5, 2) for step in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]
    assert tool_rows.step_rows(1, 3, 8) == [0, 1, 2]


needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl is not installed here (scripts/install)"
)
PAIRS: dict[str, Any] = {
    "assistant_only_loss": None,
    "datasets": [{"path": "json", "data_files": "pairs.jsonl"}],
}
PLANTED: list[tuple[dict[str, Any], str, list[str] | None]] = [
    ({"assistant_only_loss": None, "packing": False}, "labels", []),
    ({"max_length": 64}, "rows", ["data.max_length"]),
    ({"packing": True, "max_length": 512}, "rows", None),
    (PAIRS | {"eos_token": "<|stop|>"}, "tokens", ["model.tokens.eos"]),
    (PAIRS | {"completion_only_loss": False}, "labels", ["data.loss_on"]),
    ({"bf16": True}, "dtypes", ["precision.mixed_precision"]),
    ({"dtype": "bfloat16"}, "dtypes", ["model.dtype"]),
    ({"label_smoothing_factor": 0.1}, "row_losses", ["training.label_smoothing_factor"]),
    ({"neftune_noise_alpha": 5}, "loss", []),
    ({"max_grad_norm": 0.25}, "clipping", ["training.max_grad_norm"]),
    ({"lr_scheduler_type": "cosine"}, "rate", ["training.lr_scheduler_type"]),
    ({"warmup_steps": 5}, "rate", ["training.warmup_steps"]),
    ({"weight_decay": 0.1}, "update", ["training.weight_decay"]),
    ({"gradient_accumulation_steps": 1}, "batch", ["training.global_batch_size"]),
    ({"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]}, "model", ["lora"]),
]


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL in this process, whose imports take seconds."""
    monkeypatch.setattr(ObservingChild, "computed", here)

    def computed(child: Any, values: Mapping[str, Any], until: str) -> Observation:
        request = {"tool": "TRL", "values": values, "until": list(stages_until(until)), **child._inputs}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of TRL and transformers about their own options
            return Observation.from_json(
                json.loads(json.dumps(tool_side._answer(SimpleNamespace(**request))))
            )

    monkeypatch.setattr(ToolChild, "_computed", computed)


@needs_trl
@pytest.mark.slow
@pytest.mark.usefixtures("trl")
@pytest.mark.parametrize(
    ("changes", "stage", "named"), PLANTED, ids=[" ".join(changes) for changes, _, _ in PLANTED]
)
def test_planted_option_of_trl_is_found_at_the_first_stage_that_shows_it(
    files: Path, changes: dict[str, Any], stage: str, named: list[str] | None
) -> None:
    found = compared(
        written(files, "trl", **changes), recipe_of(files, **(PAIRS if "datasets" in changes else {}))
    )
    assert first(found) == stage
    assert named is None or keys(found) == named


@needs_trl
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, PAIRS, {"bf16": True}, {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]}]
)
def test_trl_computes_what_the_imported_recipe_computes(files: Path, changes: dict[str, Any]) -> None:
    found = compared(written(files, "trl", **changes), recipe_of(files, **changes))
    assert [stage.name for stage in found.stages if stage.status == "different"] == []
    assert [stage.name for stage in found.stages if stage.status == "not_compared"] == ["order"]
    assert found.a.tool_version is not None


@needs_trl
@pytest.mark.slow
@pytest.mark.usefixtures("trl")
def test_option_of_another_trl_is_named_where_the_recipe_has_it(files: Path) -> None:
    options = {"chat_template": TEMPLATE.replace("<|im_end|>", "<|stop|>"), "torch_dtype": "bfloat16"}
    found = compared(written(files, "trl", **options), recipe_of(files, **options))
    causes = [found.cause, *(each.cause for each in found.later)]
    assert [cause.text for cause in causes if cause] == [
        f"`{key}`: B has it from `{option}` of trl.yaml, which TRL ignores; with A's value the "
        "difference vanishes"
        for key, option in (("data.chat_template", "chat_template"), ("model.dtype", "torch_dtype"))
    ]


@needs_trl
@pytest.mark.slow
def test_check_of_an_import_compares_with_what_trl_computes(files: Path) -> None:
    options: dict[str, Any] = {"output": "checked.yaml", "num_gpus": 1, "force": True, "check": True}
    plain = fsdp_tune.import_recipe(written(files, "trl"), **options).check
    assert plain is not None
    assert (plain.equal, plain.a.tool_version is not None) == (True, True)
    changed = fsdp_tune.import_recipe(written(files, "trl"), overrides=["data.loss_on=all"], **options).check
    assert changed is not None
    assert (changed.equal, first(changed), keys(changed)) == (False, "labels", ["data.loss_on"])


@needs_trl
@pytest.mark.slow
@pytest.mark.usefixtures("trl")
def test_random_order_of_trl_differs_from_the_order_of_the_file(files: Path) -> None:
    found = compared(written(files, "trl"), unshuffled(files))
    assert (first(found), keys(found)) == ("order", ["data.shuffle"])


@needs_trl
@pytest.mark.slow
@pytest.mark.usefixtures("trl")
def test_reason_of_trl_is_that_of_every_stage(files: Path) -> None:
    """TRL makes a pattern of a single target, which matches nothing."""
    found = compared(written(files, "trl", use_peft=True, lora_target_modules=["q_proj"]), recipe_of(files))
    assert {stage.detail for stage in found.stages} == {found.stages[0].detail}
    assert "Target modules q_proj not found" in str(found.stages[0].detail)
    assert not found.equal


@needs_trl
@pytest.mark.slow
def test_options_that_trl_refuses_are_not_compared_and_never_equal(files: Path) -> None:
    found = compared(written(files, "trl", learning_rate="fast"), recipe_of(files))
    assert not found.equal
    assert all(stage.status == "not_compared" for stage in found.stages)
