"""The checks can fail: each planted bug moves the numbers beyond the tolerance, and a run with a bug in its
adapters notices it."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.run.directory import RunDir
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.breaks import BREAKS, run_broken, run_broken_with_checks
from tests.parity.cases import SHORT, Case
from tests.parity.compare import deviation
from tests.parity.report import PLANTED
from tests.parity.test_matrix import DROPOUT
from tests.parity.test_optimizers import ADAFACTOR, MUON, is_as_one_device
from tests.ranks import RanksFailed

ADAPTED = Case(lora=(("r", 4), ("lora_alpha", 8)), training=(("witness", "off"),))
SHARED = Case("llama-16", sequence=2, training=(("witness", "off"),))
SEEN_BY: dict[str, Case] = {
    "loss averaged per rank": Case(),
    "loss averaged per micro-batch": Case(accumulation=4),
    "loss averaged per micro-batch of a token budget": Case(tokens=64),
    "recomputation without preserved RNG state": replace(DROPOUT, recomputation="full"),
    "packed examples not isolated": Case(packed=True),
    "gradients summed in bf16": Case(),
    "loss computed in bf16": Case(),
    "replicas not synchronised": Case(ranks=4, strategy="HYBRID_SHARD"),
    "units gathered after the last micro-batch": Case(
        accumulation=4, fsdp=(("reshard_after_backward", False),), training=(("witness", "off"),)
    ),
    "weight decay on norms": Case(),
    "no weight decay": Case(),
    "no clipping": Case(),
    "optimizer state not restored on resume": Case(resumed="same"),
    "schedule not restored on resume": Case(resumed="same"),
    "evaluation repeats rows": Case(),
    "adapters outside of the units": ADAPTED,
    "adapter saved as one rank's slice": ADAPTED,
    "adapter scaled twice": ADAPTED,
    "adapter scaled twice in the forward": ADAPTED,
    "B of one layer not updated": ADAPTED,
    "gradients of B lost in one layer": ADAPTED,
    "bytes of 4 bits cast": replace(ADAPTED, architecture="llama-blocks", nf4="fp32"),
    "matrices orthogonalised on the shard": MUON,
    "means over the shard": ADAFACTOR,
    "positions of each rank from zero": SHARED,
    "labels shifted after rows are divided": SHARED,
    "tokens exchanged into other strides": SHARED,
    "loss averaged over data ranks alone": SHARED,
    "shared rows counted on each rank": SHARED,
    "dropout of adapters equal on all ranks": replace(ADAPTED, lora=(*ADAPTED.lora, ("lora_dropout", 0.1))),
}
FAST = {"packed examples not isolated", "optimizer state not restored on resume"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in BREAKS]
)
def test_planted_bug_is_detected(name: str, bench: Bench, record_property) -> None:
    case = replace(SEEN_BY[name], steps=SHORT) if name in FAST else SEEN_BY[name]
    has_dropout = case.architecture == DROPOUT.architecture
    true = runs.trajectory(bench.run(DROPOUT)) if has_dropout else bench.reference_of(case)
    try:
        found = deviation(bench.fresh_run(case, functools.partial(run_broken, name=name)), true)
    except RanksFailed:
        raise  # the plant itself does not apply any more
    except (
        AssertionError
    ) as error:  # the trajectory is not complete, or the worker's own checks have stopped the run
        text = str(error).strip()
        assert "Traceback" not in text or "fsdp_tune.core.errors." in text, text
        record_property("parity", {"section": PLANTED, "case": name, "seen as": text.splitlines()[-1]})
        return
    record_property("parity", found.row(PLANTED, name))
    assert not is_as_one_device(case, found), found


STOPPED_BY: dict[str, tuple[str, str]] = {
    # planted → code and words of the error of a run
    "adapters outside of the units": (
        "readback-differs",
        "not sharded: model.layers.0.self_attn.q_proj.lora_A",
    ),
    "adapter scaled twice": ("readback-differs", "to be scaled by 2, the run scales it by 4"),
    "B of one layer not updated": (
        "invariant-broken",
        "ranks 0 and 1: `model.layers.1.self_attn.q_proj.lora_B",
    ),
    "dropout of adapters equal on all ranks": (
        "invariant-broken",
        "the CPU generators of ranks 0 and 1 are in the same state",
    ),
}
"""Not here are a scale in the forward, which is PEFT's code, and a cast of bytes where they are read: only
parity finds them."""


def checked_run(bench: Bench, name: str) -> tuple[RunDir, list[dict[str, Any]]]:
    """A run with a planted bug and all checks, and every rank's outcome."""
    run = bench.prepared_run(replace(SEEN_BY[name], training=(("witness", "first"),)))
    return run, bench.on_ranks.run(2, functools.partial(run_broken_with_checks, str(run.path), name))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "B of one layer not updated"))
        for name in STOPPED_BY
    ],
)
def test_run_stops_at_a_planted_bug_of_its_adapters(name: str, bench: Bench) -> None:
    code, words = STOPPED_BY[name]
    _, outcomes = checked_run(bench, name)
    assert {outcome["problem"]["code"] for outcome in outcomes} == {code}
    assert words in outcomes[0]["problem"]["message"]


@pytest.mark.ranks
@pytest.mark.slow
def test_run_warns_of_lost_gradients_of_its_adapters(bench: Bench) -> None:
    run, _ = checked_run(bench, "gradients of B lost in one layer")
    (warning,) = json.loads(run.readback_json.read_text())["warnings"]
    assert "1 of 3 q_proj, 1 of 3 k_proj" in warning


@pytest.mark.ranks
@pytest.mark.slow
def test_merge_and_resume_refuse_one_rank_s_slice_of_an_adapter(bench: Bench, tmp_path: Path) -> None:
    name = "adapter saved as one rank's slice"
    run, outcomes = checked_run(bench, name)
    assert {outcome["exit_reason"] for outcome in outcomes} == {"finished"}
    config = bench.adapter(SEEN_BY[name])
    for adapter, words in (
        (True, "the rank of `model.layers.0.self_attn.q_proj` is 4, and the factors have 2"),
        (False, "do not fit"),
    ):
        with pytest.raises(FsdpTuneError, match=words):
            merge_checkpoint(
                run.checkpoint(runs.STEPS),
                MergeOptions(tmp_path / "out", adapter=adapter, adapter_config=config),
            )
    further = bench.prepared_run(SEEN_BY[name])
    runs.resume_from(further, run)
    outcomes = bench.on_ranks.run(2, functools.partial(runs.run_worker, str(further.path)))
    assert {outcome["problem"]["code"] for outcome in outcomes} == {"checkpoint-of-another-model"}
