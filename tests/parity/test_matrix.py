"""Every sharding, recomputation, split and resume point gives the trajectory of one device."""

from __future__ import annotations

import functools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_tune.model.kernels.install import expected_graphs
from fsdp_tune.model.loading.construct import build_empty
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.run.directory import RunDir
from fsdp_tune.worker.main import read_recipe
from tests.parity import runs
from tests.parity.architectures import resized
from tests.parity.bench import Bench
from tests.parity.cases import FAST, ON_ONE_RANK, Case, pairwise, singles
from tests.parity.compare import deviation, relative, spread
from tests.parity.store import VOCABULARY

STEPS_OF_AN_EPOCH = 6
SINGLES = singles()
PAIRWISE = pairwise(SINGLES)


def marked(case: Case) -> object:
    marks = [] if case in FAST else [pytest.mark.slow]
    return pytest.param(case, id=str(case), marks=marks)


@pytest.mark.ranks
@pytest.mark.parametrize("case", [marked(case) for case in SINGLES + PAIRWISE + ON_ONE_RANK])
def test_run_follows_the_reference(case: Case, bench: Bench, record_property) -> None:
    run = bench.run(case)
    found = deviation(run, bench.reference(case.architecture, packed=case.packed))
    record_property("parity", found.row("fp32 against the reference", case))
    assert found.is_within_fp32, f"{found}; worst is {found.worst_name}"
    if ("compile", True) in case.kernels:
        check_compiled(case, run)


def check_compiled(case: Case, run: RunDir) -> None:
    """The layers that trained were machine code, and after the first epoch nothing more was compiled."""
    graphs = [(line["step"], line["graphs"]) for line in runs.lines(run) if line.get("event") == "compiled"]
    recipe = read_recipe(run)
    layers = [layer for _, layer in decoder_layers(build_empty(recipe), recipe.layer_classes)]
    checked = 1  # before the first step: what tokens see
    assert checked < graphs[-1][1] <= expected_graphs(recipe, layers), graphs
    assert graphs[-1][0] <= STEPS_OF_AN_EPOCH + (runs.SAVED_STEP if case.resumed != "no" else 0), graphs


def slow(case: Case) -> object:
    return pytest.param(case, id=str(case), marks=[pytest.mark.slow])


BALANCED = [
    Case("mixtral-balanced", accumulation=4),
    Case("mixtral-balanced", ranks=4, accumulation=2),
    Case("mixtral-balanced", packed=True),
    Case("mixtral-balanced", ranks=4, strategy="NO_SHARD", kernels=(("loss", "chunked"),)),
    Case("mixtral-balanced", tokens=64, recomputation="full"),
    Case("mixtral-balanced", version=1, accumulation=2),
    Case("mixtral-balanced", kernels=(("compile", True),)),
]


@pytest.mark.ranks
@pytest.mark.parametrize("case", [*(pytest.param(case, id=str(case)) for case in BALANCED[:2]), *(slow(case) for case in BALANCED[2:])])
def test_balance_loss_is_computed_per_example(case: Case, bench: Bench, record_property) -> None:
    """Whatever is padded, packed or batched together, on any number of ranks."""
    found = deviation(bench.run(case), bench.reference(case.architecture, packed=case.packed))
    record_property("parity", found.row("load-balancing loss", case))
    assert found.is_within_fp32, f"{found}; worst is {found.worst_name}"


_COMPILED = (("compile", True),)
MACHINE_CODE = [
    Case(packed=True, kernels=_COMPILED),
    Case("gpt2", recomputation="full", kernels=_COMPILED),
    Case("gpt2", strategy="NO_SHARD", accumulation=4, kernels=_COMPILED),
    Case("qwen3", packed=True, recomputation="selective", kernels=_COMPILED),
    Case(recomputation="full", fsdp=(("activation_checkpointing_offload", True),), kernels=_COMPILED),
    Case(ranks=1, packed=True, kernels=_COMPILED),
]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("case", MACHINE_CODE, ids=str)
def test_compiled_run_follows_the_reference(case: Case, bench: Bench, record_property) -> None:
    run = bench.fresh_run(case, functools.partial(runs.run_with_kernels, backend="inductor"))
    found = deviation(run, bench.reference(case.architecture, packed=case.packed))
    record_property("parity", found.row("compiled by inductor", case))
    assert found.is_within_fp32, f"{found}; worst is {found.worst_name}"
    check_compiled(case, run)


HALF_PRECISION = [
    Case(),
    Case("gpt2", ranks=4, accumulation=4),
    Case("mixtral", ranks=4, strategy="HYBRID_SHARD", recomputation="full"),
    Case(strategy="NO_SHARD"),
    Case(version=1),
    Case("qwen3", packed=True, recomputation="selective"),
    Case("gemma", offload=True, resumed="other"),
    Case("gpt2", kernels=(("loss", "chunked"),)),
    Case("gpt2", strategy="NO_SHARD", kernels=(("loss", "chunked"),)),
    Case(ranks=1, packed=True),
]
HALF_PRECISION_FAST = (HALF_PRECISION[0], Case("gpt2", kernels=(("loss", "chunked"),)))


@pytest.mark.ranks
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[] if case in HALF_PRECISION_FAST else pytest.mark.slow) for case in HALF_PRECISION]
)
def test_half_precision_run_is_as_close_to_fp32_as_one_device(case: Case, precision: str, bench: Bench, record_property) -> None:
    """Loss and gradient norm of the steps and the parameters, root mean square, against fp32. fp16 rounds eight times finer
    than bf16, but Adam turns the sign of a gradient near zero into a whole step, so it gets the same limit."""
    case = replace(case, precision=precision)
    run = bench.run(case)
    skipped = frozenset(line["step"] for line in runs.lines(run) if line.get("event") == "loss_scale_backed_off")
    true = bench.reference(case.architecture, packed=case.packed, skipped=skipped)
    alone = bench.reference(case.architecture, packed=case.packed, precision="bf16", skipped=skipped)
    limit, found = spread(alone, true, skipped=skipped), spread(runs.trajectory(run), true, skipped=skipped)
    record_property("parity", found.row(precision, case, limit))
    assert found.loss <= 2 * limit.loss, (found, limit)
    assert found.grad_norm <= 2 * limit.grad_norm, (found, limit)
    assert found.parameters <= 2 * limit.parameters, (found, limit)


DROPOUT = Case("gpt2-dropout")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "change",
    [
        {"recomputation": "full"},
        {"recomputation": "selective"},
        {"recomputation": "full", "fsdp": (("activation_checkpointing_offload", True),)},
        {"recomputation": "full", "fsdp": (("activation_checkpointing_every", 2),)},
        {"recomputation": "full", "strategy": "NO_SHARD"},
        {"recomputation": "selective", "strategy": "SHARD_GRAD_OP", "accumulation": 1},
        {"strategy": "NO_SHARD"},
        {"resumed": "same"},
    ],
    ids=str,
)
def test_dropout_draws_the_same_masks(change: dict, bench: Bench, record_property) -> None:
    """Ranks draw masks of their own, so the measure is the run of as many ranks without the change."""
    case = replace(DROPOUT, **change)
    found = deviation(bench.run(case), runs.trajectory(bench.run(DROPOUT)))
    record_property("parity", found.row("dropout, against 2 ranks FULL_SHARD", case))
    assert found.is_within_fp32, f"{found}; worst is {found.worst_name}"


@pytest.mark.ranks
def test_same_recipe_twice_is_bitwise_equal(bench: Bench) -> None:
    first = bench.run(DROPOUT)
    again = bench.fresh_run(DROPOUT)
    for line, other in zip(runs.loss_lines(first), runs.loss_lines(again), strict=True):
        assert (line["loss"], line["grad_norm"]) == (other["loss"], other["grad_norm"])


@pytest.mark.ranks
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])  # two matrices, and one that is tied
def test_resized_embedding_trains_like_a_native_one(architecture: str, bench: Bench, record_property) -> None:
    small = bench.model(architecture, vocabulary=VOCABULARY - 6)
    grown = resized(small, bench.folder / "models" / f"{architecture}-grown", VOCABULARY, seed=42)
    case = Case(architecture)
    changes = runs.merged(case.recipe(str(small)), {"model": {"resize_embeddings": True}})
    run = bench.written_run(changes, vocabulary=VOCABULARY)
    runs.train(bench.on_ranks, run, case.ranks)
    found = deviation(run, bench.reference(architecture, model=grown))
    record_property("parity", found.row("resized embedding", case))
    assert found.is_within_fp32, f"{found}; worst is {found.worst_name}"


@pytest.mark.ranks
def test_seeded_weights_equal_those_of_one_process(bench: Bench) -> None:
    from tests.parity.architectures import ARCHITECTURES, make_model

    case = Case(ranks=4)
    changes = runs.merged(case.recipe("unused"), {"model": {"name_or_path": None, "from_config": ARCHITECTURES["llama"]}})
    run = bench.written_run(changes)
    runs.train(bench.on_ranks, run, case.ranks)
    model = make_model("llama", bench.folder / "models" / "llama-42", seed=42)
    assert deviation(run, bench.reference("llama", model=model)).is_within_fp32


@pytest.mark.ranks
def test_scaled_positions_follow_one_device(bench: Bench, record_property) -> None:
    """The reference reads the scaling from its config.json, in which transformers' fields were written by this test."""
    case, plain = Case(packed=True, recomputation="full"), bench.model("llama")
    scaled = Path(shutil.copytree(plain, bench.folder / "models" / "llama-yarn", dirs_exist_ok=True))
    config = json.loads((scaled / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128, "beta_fast": 16.0}
    config |= {"rope_parameters": config["rope_parameters"] | yarn, "max_position_embeddings": 2048}
    (scaled / "config.json").write_text(json.dumps(config))
    run = bench.written_run(runs.merged(case.recipe(str(plain)), {"model": {"rope_scaling": yarn}}), packed=True)
    runs.train(bench.on_ranks, run, case.ranks)
    found = deviation(run, bench.reference("llama", packed=True, model=scaled))
    record_property("parity", found.row("model.rope_scaling: yarn", case))
    assert found.is_within_fp32, f"{found}; worst is {found.worst_name}"
    assert not deviation(run, bench.reference("llama", packed=True)).is_within_fp32


@pytest.mark.ranks
@pytest.mark.parametrize("case", [Case("llama-16", ranks=1, packed=True)], ids=str)
def test_flex_attention_follows_the_reference(case: Case, bench: Bench, record_property) -> None:
    if bench.device == "cpu":
        pytest.skip("torch has no backward pass of it on the CPU")
    changes = runs.merged(case.recipe(str(bench.model(case.architecture))), {"model": {"attn_implementation": "flex_attention"}})
    run = bench.written_run(changes, packed=True)
    runs.train(bench.on_ranks, run, case.ranks)
    found = deviation(run, bench.reference(case.architecture, packed=True))
    record_property("parity", found.row("flex_attention", case))
    assert found.is_within_fp32, f"{found}; worst is {found.worst_name}"


def test_deviation_of_nonfinite_value_is_infinite() -> None:
    assert relative(math.nan, 1.0) == math.inf


def test_matrix_covers_every_value_of_every_switch() -> None:
    from tests.parity.cases import _SWITCHES

    for name, values in _SWITCHES.items():
        assert {getattr(case, name) for case in SINGLES + PAIRWISE} == set(values)
