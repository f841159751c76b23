"""Every sharding, recomputation, split and resume point gives the trajectory of one device."""

from __future__ import annotations

import functools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdp_tune.model.kernels.compiled import expected_graphs
from fsdp_tune.model.loading.construct import build_empty
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.run.directory import RunDir
from fsdp_tune.worker.main import read_recipe
from tests.parity import runs
from tests.parity.architectures import resized
from tests.parity.bench import Bench, assert_as_near_as_bf16, assert_follows, assert_follows_one_device, bits
from tests.parity.cases import FAST, ON_ONE_RANK, SHORT, STEPS, SWITCHES, Case, pairwise, singles
from tests.parity.compare import deviation, relative
from tests.parity.store import VOCABULARY
from tests.session import made_once

STEPS_OF_AN_EPOCH = 6
SINGLES = singles()
PAIRWISE = pairwise(SINGLES)


def fast(case: Case) -> object:
    return pytest.param(case, id=str(case))


def slow(case: Case) -> object:
    return pytest.param(case, id=str(case), marks=[pytest.mark.slow])


@pytest.mark.ranks
@pytest.mark.parametrize("case", [*map(fast, FAST), *map(slow, SINGLES + PAIRWISE + ON_ONE_RANK)])
def test_run_follows_the_reference(case: Case, bench: Bench, record_property) -> None:
    run = assert_follows_one_device(case, bench, record_property, "fp32 against the reference")
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


BALANCED_FAST = Case(
    "mixtral-balanced", strategy="SHARD_GRAD_OP", recomputation="selective", accumulation=2, steps=SHORT
)
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
@pytest.mark.parametrize("case", [fast(BALANCED_FAST), *map(slow, BALANCED)])
def test_balance_loss_is_computed_per_example(case: Case, bench: Bench, record_property) -> None:
    """Whatever is padded, packed or batched together, on any number of ranks."""
    assert_follows_one_device(case, bench, record_property, "load-balancing loss")


_KEPT = (("reshard_after_backward", False),)
STAY_GATHERED = [
    Case(accumulation=4, resumed="other"),
    Case("mixtral", strategy="SHARD_GRAD_OP", accumulation=4, recomputation="selective"),
    Case(accumulation=4, lora=(("r", 4), ("lora_alpha", 8))),
    Case("llama-blocks", accumulation=4, lora=(("r", 4), ("lora_alpha", 8)), nf4="fp32"),
    Case("llama-16", accumulation=4, precision="fp8 tensorwise"),
    Case("llama-16", ranks=4, accumulation=2, sequence=2, strategy="HYBRID_SHARD"),
    Case("qwen3", accumulation=4, fsdp=(("sync_each_batch", False),), kernels=(("loss", "chunked"),)),
]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("case", STAY_GATHERED, ids=str)
def test_parameters_that_stay_gathered_change_no_bit_of_a_run(case: Case, bench: Bench) -> None:
    """Losses, norms and weights, with evaluations and saves between steps, and after a resume."""
    kept = replace(case, fsdp=(*case.fsdp, *_KEPT))
    assert bits(kept, bench) == bits(case, bench)
    own, other = (runs.saved_parameters(bench.run(each), case.steps) for each in (kept, case))
    assert own.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in own.items())


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
    assert_follows(run, bench.reference_of(case), case, record_property, "compiled by inductor")
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
HALF_PRECISION_FAST = [Case("gpt2", kernels=(("loss", "chunked"),), precision="bf16", steps=SHORT)]
HALF_PRECISION_SHORT = [Case(precision="fp16", steps=SHORT)]
"""Scaling of the loss is held by worker/test_trainer_overflow."""


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        *map(fast, HALF_PRECISION_FAST),
        *map(slow, HALF_PRECISION_SHORT),
        *(
            slow(replace(case, precision=precision))
            for case in HALF_PRECISION
            for precision in ("bf16", "fp16")
        ),
    ],
)
def test_half_precision_run_is_as_close_to_fp32_as_one_device(
    case: Case, bench: Bench, record_property
) -> None:
    """Loss and gradient norm of the steps and the parameters, root mean square, against fp32. fp16 rounds
    eight times finer than bf16, but Adam turns the sign of a gradient near zero into a whole step, so it gets
    the same limit."""
    backed_off = [
        line["step"] for line in runs.lines(bench.run(case)) if line.get("event") == "loss_scale_backed_off"
    ]
    assert_as_near_as_bf16(case, bench, record_property, case.precision, skipped=frozenset(backed_off))


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
    true = runs.trajectory(bench.run(DROPOUT))
    assert_follows(bench.run(case), true, case, record_property, "dropout, against 2 ranks FULL_SHARD")


@pytest.mark.ranks
@pytest.mark.slow
def test_same_recipe_twice_is_bitwise_equal(bench: Bench) -> None:
    case = replace(DROPOUT, accumulation=2, steps=SHORT)
    first, again = bench.run(case), bench.fresh_run(case)
    for line, other in zip(runs.loss_lines(first), runs.loss_lines(again), strict=True):
        assert (line["loss"], line["grad_norm"]) == (other["loss"], other["grad_norm"])


in_few_steps = pytest.mark.parametrize("steps", [SHORT, pytest.param(STEPS, marks=pytest.mark.slow)])
"""The slow tests have the row of the page."""


@pytest.mark.ranks
@in_few_steps
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("llama", marks=pytest.mark.slow, id="two matrices"),
        pytest.param("gpt2", id="one that is tied"),
    ],
)
def test_resized_embedding_trains_like_a_native_one(
    architecture: str, steps: int, bench: Bench, record_property
) -> None:
    small = bench.model(architecture, vocabulary=VOCABULARY - 6)
    grown = made_once(
        f"{bench.files.name}/models/{architecture}-grown",
        lambda path: resized(small, path, VOCABULARY, seed=42),
    )
    case = Case(architecture, steps=steps)
    changes = runs.merged(case.recipe(str(small)), {"model": {"resize_embeddings": True}})
    run = bench.written_run(changes, vocabulary=VOCABULARY)
    runs.train(bench.on_ranks, run, case.ranks)
    assert_follows(run, bench.reference_of(case, model=grown), case, record_property, "resized embedding")


@pytest.mark.ranks
def test_seeded_weights_equal_those_of_one_process(bench: Bench) -> None:
    from tests.parity.architectures import ARCHITECTURES, make_model

    case = Case(steps=SHORT)
    changes = runs.merged(
        case.recipe("unused"), {"model": {"name_or_path": None, "from_config": ARCHITECTURES["llama"]}}
    )
    run = bench.written_run(changes)
    runs.train(bench.on_ranks, run, case.ranks)
    model = make_model("llama", bench.folder / "models" / "llama-42", seed=42)
    assert deviation(run, bench.reference_of(case, model=model)).is_within_fp32


@pytest.mark.ranks
@pytest.mark.slow
@in_few_steps
def test_scaled_positions_follow_one_device(steps: int, bench: Bench, record_property) -> None:
    """The reference reads the scaling from its config.json, in which transformers' fields were written by
    this test."""
    case, plain = Case(steps=steps), bench.model("llama")
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128, "beta_fast": 16.0}

    def scale(folder: Path) -> None:
        shutil.copytree(plain, folder)
        config = json.loads((plain / "config.json").read_text())
        config |= {"rope_parameters": config["rope_parameters"] | yarn, "max_position_embeddings": 2048}
        (folder / "config.json").write_text(json.dumps(config))

    scaled = made_once(f"{bench.files.name}/models/llama-yarn", scale)
    run = bench.written_run(runs.merged(case.recipe(str(plain)), {"model": {"rope_scaling": yarn}}))
    runs.train(bench.on_ranks, run, case.ranks)
    assert_follows(
        run, bench.reference_of(case, model=scaled), case, record_property, "model.rope_scaling: yarn"
    )
    assert not deviation(run, bench.reference_of(case)).is_within_fp32


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("case", [Case("llama-16", ranks=1, packed=True)], ids=str)
def test_flex_attention_follows_the_reference(case: Case, bench: Bench, record_property) -> None:
    if bench.device == "cpu":
        pytest.skip("torch has no backward pass of it on the CPU")
    changes = runs.merged(
        case.recipe(str(bench.model(case.architecture))), {"model": {"attn_implementation": "flex_attention"}}
    )
    run = bench.written_run(changes, packed=True)
    runs.train(bench.on_ranks, run, case.ranks)
    assert_follows(run, bench.reference_of(case), case, record_property, "flex_attention")


def test_deviation_of_nonfinite_value_is_infinite() -> None:
    assert relative(math.nan, 1.0) == math.inf


NOT_FAST = {
    "architecture": {"qwen3", "gemma", "mixtral"},
    "strategy": {"HYBRID_SHARD_ZERO2"},
    "wrap": {"size", "names", "none"},
}
"""Values that the fast rows leave to the full matrix. Mixtral has `BALANCED_FAST`; `resumed: same` has
test_resume and test_breaks."""


def test_matrix_covers_every_value_of_every_switch() -> None:
    for name, values in SWITCHES.items():
        assert {getattr(case, name) for case in SINGLES + PAIRWISE} == set(values)
        left_out = NOT_FAST.get(name, set()) | ({"same"} if name == "resumed" else set())
        assert {getattr(case, name) for case in FAST} >= set(values) - left_out, name
