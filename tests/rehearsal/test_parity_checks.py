"""`rehearse --parity`: each switch changes alone, and a wrong number fails its check."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.recipe.read.loader import load_recipe
from fsdp_tune.recipe.rules.experts import EXPERT_PARALLEL_RULES
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.world import WORLD_RULES, World
from fsdp_tune.rehearsal import parity_checks
from fsdp_tune.rehearsal.lifecycle_checks import ChildResult
from fsdp_tune.rehearsal.parity_checks import STEPS, _compared, make_comparable, switches
from fsdp_tune.rehearsal.scaled_recipe import ScaledRecipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.events import LossScaleBackedOff

WRITTEN: dict[str, Any] = {
    "model": {"from_config": {"model_type": "gpt2", "resid_pdrop": 0.1, "n_layer": 2}, "freeze": ["wte*"]},
    "data": {"train": [{"path": "builtin:arithmetic"}], "shuffle": False},
    "fsdp": {
        "sharding_strategy": "SHARD_GRAD_OP",
        "activation_checkpointing": "full",
        "offload_params": True,
    },
    "training": {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optim": "sgd",
        "max_steps": 24,
        "weight_decay": 0.1,
    },
    "launch": {"num_processes": 2, "device": "cpu"},
}
REFERENCE = {"loss": [5.0, 4.0], "grad_norm": [1.0, 2.0], "supervised_tokens": [10, 12], "eval_loss": 3.0}


def test_each_switch_changes_one_setting() -> None:
    names = [switch.name for switch in switches(make_comparable(ScaledRecipe(WRITTEN)).document)]
    assert names == [
        "as written, in fp32",
        "sharding_strategy FULL_SHARD",
        "sharding_strategy NO_SHARD",
        "activation_checkpointing none",
        "activation_checkpointing selective",
        "offload_params false",
        "auto_wrap_policy NO_WRAP",
        "1 × 2 ranks × 4 accumulation",
        "2 × 1 rank × 4 accumulation",
        "as written, in bf16",
    ]


def test_shared_rows_are_compared_with_one_rank_that_shares_none() -> None:
    shared = WRITTEN | {"parallelism": {"sp_size": 2}, "launch": {"num_processes": 4, "device": "cpu"}}
    found = {
        switch.name: switch.changes for switch in switches(make_comparable(ScaledRecipe(shared)).document)
    }
    assert found["1 × 2 groups of 2 ranks × 4 accumulation"]["training"]["gradient_accumulation_steps"] == 4
    alone = found["2 × 1 rank × 4 accumulation"]
    assert (alone["parallelism"], alone["launch"]) == ({"sp_size": 1}, {"num_processes": 1})


def test_switches_leave_out_recomputation_that_slices_of_the_mlp_exclude() -> None:
    names = [switch.name for switch in switches(WRITTEN | {"kernels": {"mlp_slice_tokens": 5}})]
    assert "activation_checkpointing selective" not in names
    assert "activation_checkpointing none" in names


@pytest.mark.parametrize(
    ("ranks", "ep_size", "undivided"),
    [
        (
            2,
            2,
            {"sharding_strategy NO_SHARD", "activation_checkpointing selective", "auto_wrap_policy NO_WRAP"},
        ),
        (
            4,
            4,
            {
                "sharding_strategy NO_SHARD",
                "sharding_strategy HYBRID_SHARD",
                "offload_params true",
                "2 × 1 rank × 8 accumulation",
            },
        ),
    ],
)
def test_experts_are_undivided_where_a_switch_excludes_it(
    ranks: int, ep_size: int, undivided: set[str]
) -> None:
    """Every switch is a recipe that is trained, and the division of experts is a switch of its own."""
    fsdp = {"sharding_strategy": "FULL_SHARD", "ep_size": ep_size}
    base = make_comparable(
        ScaledRecipe(WRITTEN | {"fsdp": fsdp, "launch": {"num_processes": ranks, "device": "cpu"}})
    ).document
    found = switches(base)
    names = {switch.name for switch in found}
    assert {f"{name}, ep_size 1" for name in undivided} | {
        "as written, in fp32",
        "ep_size 1",
        "as written, in bf16",
    } <= names
    for switch in found:
        document = base | {"fsdp": fsdp | switch.changes.get("fsdp", {})}
        launch = {"num_processes": ranks, "device": "cpu"} | switch.changes.get("launch", {})
        recipe = Recipe.model_validate(document | {"launch": launch})
        world = World(launch["num_processes"], 1)
        assert [each for rule in EXPERT_PARALLEL_RULES for each in rule(recipe)] == []
        assert [
            each for rule in WORLD_RULES for each in rule(recipe, world) if "fsdp.ep_size" in each.keys
        ] == []
    (alone,) = (switch for switch in found if switch.name == "ep_size 1")
    assert alone.changes == {"fsdp": {"ep_size": 1}}


def test_incomparable_settings_are_replaced_and_listed() -> None:
    small = make_comparable(ScaledRecipe(WRITTEN))
    assert small.document["model"] == {
        "from_config": {"model_type": "gpt2", "resid_pdrop": 0.0, "n_layer": 2}
    }
    assert small.document["training"]["max_steps"] == STEPS
    assert small.document["training"]["weight_decay"] == 0.1
    assert small.document["data"]["shuffle"] is True
    assert any("resid_pdrop" in line for line in small.changes)
    assert WRITTEN["model"]["freeze"], "the recipe itself stays"


def run_with(tmp_path: Path, **changes: Any) -> RunDir:
    columns = {
        "loss": REFERENCE["loss"],
        "grad_norm": REFERENCE["grad_norm"],
        "supervised_tokens": [10, 12],
    } | changes
    lines = [
        {"step": at + 1, **{key: columns[key][at] for key in ("loss", "grad_norm", "supervised_tokens")}}
        for at in range(2)
    ]
    lines.append({"step": 2, "eval_loss": columns.get("eval_loss", 3.0)})
    tmp_path.joinpath("metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunDir(tmp_path)


def test_equal_values_pass(tmp_path: Path) -> None:
    assert _compared(run_with(tmp_path, loss=[5.0, 4.0 * (1 + 1e-7)]), REFERENCE)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": [5.0, 4.001]},
        {"loss": [5.0, math.nan]},
        {"grad_norm": [1.0, None]},
        {"grad_norm": [1.0, 2.0 * 8]},
        {"supervised_tokens": [12, 10]},
        {"eval_loss": 3.01},
        {"eval_loss": "nan"},
    ],
    ids=str,
)
def test_one_wrong_value_fails(changes: dict[str, Any], tmp_path: Path) -> None:
    assert not _compared(run_with(tmp_path, **changes), REFERENCE)[0]


class Children:
    """The children of `parity_checks`: trainings that log given losses, and the plain loop's answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.losses: dict[str, list[float]] = {}
        """By the name of a run's directory."""
        self.failing: ChildResult | None = None
        self.loop = {"fp32": REFERENCE, "bf16": REFERENCE | {"loss": [5.05, 4.0]}}
        self.loop_code = 0
        self.trained: list[tuple[str, ...]] = []
        self.requests: list[dict[str, Any]] = []
        monkeypatch.setattr(parity_checks, "run_fsdp_tune", self._train)
        monkeypatch.setattr(parity_checks, "run_torch_script", self._reference)

    def _train(self, *words: str) -> ChildResult:
        self.trained.append(words)
        if self.failing is not None:
            return self.failing
        recipe = load_recipe(words[words.index("--config") + 1]).recipe
        folder = Path(recipe.output_dir)
        folder.mkdir()
        run_with(folder, loss=self.losses.get(folder.name, REFERENCE["loss"]))
        return ChildResult(0, {}, "")

    def _reference(self, module: str, request: dict[str, Any]) -> ChildResult:
        assert module == "run_trajectory"
        self.requests.append(request)
        return ChildResult(self.loop_code, self.loop[request["compute_dtype"]], "no memory")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Children:
    return Children(monkeypatch)


@pytest.fixture
def base() -> ScaledRecipe:
    """On one rank without shards, of which few settings can change."""
    alone = {
        "model": WRITTEN["model"] | {"tokenizer": "builtin:arithmetic"},
        "fsdp": {"sharding_strategy": "NO_SHARD"},
        "launch": {"num_processes": 1, "device": "cpu"},
    }
    return make_comparable(ScaledRecipe(WRITTEN | alone))


NAMES = [
    "as written, in fp32",
    "sharding_strategy FULL_SHARD",
    "sharding_strategy SHARD_GRAD_OP",
    "activation_checkpointing selective",
    "activation_checkpointing full",
    "1 × 1 rank × 4 accumulation",
    "as written, in bf16",
]


def test_each_switch_is_trained_and_compared_with_one_reference(
    base: ScaledRecipe, played: Children, tmp_path: Path
) -> None:
    """The run in bf16 is compared with a loop in fp32 and one in bf16 on its own rows."""
    checks = list(parity_checks.parity_checks(base, tmp_path, ("--trust-remote-code",)))
    assert [(each.name, each.passed) for each in checks] == [(name, True) for name in NAMES]
    assert [(Path(each["run"]).name, each["compute_dtype"], each["skipped"]) for each in played.requests] == [
        ("00", "fp32", []),
        ("06", "fp32", []),
        ("06", "bf16", []),
    ]
    assert all(words[0] == "train" and words[-1] == "--trust-remote-code" for words in played.trained)
    written = [load_recipe(tmp_path / f"{number:02d}.yaml").recipe for number in range(len(NAMES))]
    assert [each.fsdp.sharding_strategy for each in written[:3]] == [
        "NO_SHARD",
        "FULL_SHARD",
        "SHARD_GRAD_OP",
    ]
    assert [each.precision.mixed_precision for each in written] == ["no"] * 6 + ["bf16"]


def test_switch_that_deviates_fails_and_the_others_are_still_compared(
    base: ScaledRecipe, played: Children, tmp_path: Path
) -> None:
    played.losses["02"] = [5.0, 4.1]
    checks = list(parity_checks.parity_checks(base, tmp_path))
    assert [each.name for each in checks if not each.passed] == ["sharding_strategy SHARD_GRAD_OP"]
    assert len(checks) == len(NAMES)


def test_run_or_reference_that_fails_ends_the_checks(
    base: ScaledRecipe, played: Children, tmp_path: Path
) -> None:
    played.loop_code = 1
    (check,) = parity_checks.parity_checks(base, tmp_path)
    assert (check.passed, check.detail) == (False, "the reference: exit code 1: no memory")
    played.failing = ChildResult(3, {"errors": [{"message": "out of memory"}]}, "")
    (check,) = parity_checks.parity_checks(base, tmp_path)
    assert (check.passed, check.detail) == (False, "exit code 3: out of memory")
    assert len(played.requests) == 1


@pytest.mark.parametrize(
    ("losses", "factor", "passes"),
    [
        ([5.1, 4.0], 2.0, True),
        ([5.11, 4.0], 2.0, False),
        ([5.11, 4.0], 3.0, True),
        ([5.0, math.nan], 50.0, False),
    ],
)
def test_low_precision_may_deviate_as_far_as_one_device_in_bf16_times_a_factor(
    played: Children, tmp_path: Path, losses: list[float], factor: float, passes: bool
) -> None:
    found = parity_checks._scattered(run_with(tmp_path, loss=losses), factor)
    assert found[0] is passes
    assert found[1].endswith(" around fp32 (root mean square); one device in bf16: 7.1e-03")


def test_reference_skips_the_steps_whose_loss_scale_was_too_large(played: Children, tmp_path: Path) -> None:
    run = run_with(tmp_path)
    with run.metrics_jsonl.open("a") as file:
        file.writelines(
            json.dumps(LossScaleBackedOff(step, loss_scale=2.0).line(0.0)) + "\n" for step in (2, 1)
        )
    assert parity_checks._scattered(run, 2.0)[0]
    assert [each["skipped"] for each in played.requests] == [[1, 2], [1, 2]]
    played.loop_code = 1
    assert parity_checks._scattered(run, 2.0) == (False, "the reference: exit code 1: no memory")


def test_fp8_may_deviate_further_than_bf16(
    base: ScaledRecipe, played: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors: list[float] = []
    scattered = parity_checks._scattered
    monkeypatch.setattr(
        parity_checks, "_scattered", lambda run, factor: factors.append(factor) or scattered(run, factor)
    )
    base.document["precision"] = {"mixed_precision": "fp8"}
    *_, last = parity_checks.parity_checks(base, tmp_path)
    assert (last.name, factors) == ("as written, in fp8", [parity_checks.FP8_FACTOR])


def test_reference_that_is_no_number_is_no_agreement(tmp_path: Path) -> None:
    found = REFERENCE | {"loss": [REFERENCE["loss"][0], math.nan]}
    assert not _compared(run_with(tmp_path), found)[0]
