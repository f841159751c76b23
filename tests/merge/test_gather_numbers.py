"""dtype, NaN and infinity, averages: the values of the output, against torch."""

from __future__ import annotations

import json

import pytest
import torch

from fsdp_tune.core.errors import FsdpTuneError
from tests.merge.checkpoints import SHARDS, finish_checkpoint, make_run, merged_tensors, same_bits, save_dcp

KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GENERATOR = torch.Generator().manual_seed(0)
STATE = {
    # Enough of them that some lie where rounding twice and rounding once differ.
    "double": torch.randn(200_000, dtype=torch.float64, generator=GENERATOR),
    "single": torch.randn(3000, generator=GENERATOR) * 100,
    "half": torch.randn(500, generator=GENERATOR).half(),
    "brain": torch.randn(500, generator=GENERATOR).bfloat16(),
    "transposed": torch.randn(300, 500, generator=GENERATOR).t(),
    "scalar": torch.tensor(1.0 / 3),
    "integer": torch.arange(10),
    "byte": torch.arange(10, dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "fp8": torch.randn(64, generator=GENERATOR).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("option", ["keep", *KINDS])
def test_dtype_option_converts_floats_only(option, tmp_path, merge):
    save_dcp({"model": STATE}, tmp_path / SHARDS)
    merged = merged_tensors(merge(tmp_path / SHARDS, dtype=option).output)
    for name, value in STATE.items():
        floats = name not in ("integer", "byte", "bool", "fp8")
        assert same_bits(merged[name], value.to(KINDS[option]) if floats and option != "keep" else value), (
            name
        )


def test_config_agrees_with_the_weights(tmp_path, merge):
    (tmp_path / "base").mkdir()
    config = {
        "model_type": "x",
        "torch_dtype": "float64",
        "dtype": "float64",
        "text_config": {"torch_dtype": "float64", "a": 1},
    }
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    save_dcp({"model": STATE}, tmp_path / SHARDS)
    for option, name in (("keep", "float64"), ("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        output = merge(
            tmp_path / SHARDS,
            dtype=option,
            base=str(tmp_path / "base"),
            verify="none",
            output=tmp_path / option,
        ).output
        assert json.loads((output / "config.json").read_text()) == {
            "model_type": "x",
            "text_config": {"a": 1, "dtype": name, "torch_dtype": name},
            "dtype": name,
            "torch_dtype": name,
        }


@pytest.mark.parametrize("option", ["keep", "bf16", "fp16"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2]
)
def test_weights_that_are_not_finite_are_counted_by_tensor(option, dtype, tmp_path, merge):
    bad = torch.ones(5000)
    bad[7], bad[4000], bad[4999] = float("nan"), float("inf"), float("-inf")
    state = {
        "good": torch.ones(10, dtype=torch.float32),
        "bad": bad.to(dtype),
        "worse": torch.full((3, 3), float("nan")).to(dtype),
    }
    save_dcp({"model": state}, tmp_path / "c" / SHARDS)
    with pytest.raises(FsdpTuneError) as caught:
        merge(tmp_path / "c", dtype=option)
    assert caught.value.exit_code == 1
    assert [problem.message for problem in caught.value.problems] == [
        "`bad` has values that are not finite: 1 NaN, 2 infinite",
        "`worse` has values that are not finite: 9 NaN",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    result = merge(tmp_path / "c", dtype=option, allow_nonfinite=True)
    assert sum("not finite" in notice.message for notice in result.notices) == 2
    assert json.loads((result.output / "merge.json").read_text())["non_finite"] == {
        "bad": "1 NaN, 2 infinite",
        "worse": "9 NaN",
    }
    kept = merged_tensors(result.output)["bad"].float()
    assert torch.equal(torch.isnan(kept), torch.isnan(bad))
    assert torch.equal(torch.isinf(kept), torch.isinf(bad))


def test_values_beyond_fp16_are_refused_but_fit_bf16(tmp_path, merge):
    state = {"large": torch.tensor([1.0, 70000.0, -70000.0, 65504.0, 65519.0, 65520.0])}
    save_dcp({"model": state}, tmp_path / "c" / SHARDS)
    with pytest.raises(FsdpTuneError, match="`large` has values that are not finite: 3 too large") as caught:
        merge(tmp_path / "c", dtype="fp16")
    assert "--dtype bf16" in str(caught.value.problems[0].hint)
    assert torch.isfinite(merged_tensors(merge(tmp_path / "c", dtype="bf16").output)["large"]).all()


def test_values_that_bf16_rounds_to_infinity_are_refused(tmp_path, merge):
    save_dcp({"model": {"w": torch.tensor([torch.finfo(torch.float32).max])}}, tmp_path / "c" / SHARDS)
    with pytest.raises(FsdpTuneError, match="1 too large") as caught:
        merge(tmp_path / "c", dtype="bf16")
    assert "--dtype bf16" not in str(caught.value.problems[0].hint)


def test_model_that_diverged_everywhere_is_reported_briefly(tmp_path, merge):
    save_dcp(
        {"model": {f"layer.{index:03d}": torch.tensor([float("nan")]) for index in range(100)}},
        tmp_path / "c" / SHARDS,
    )
    with pytest.raises(FsdpTuneError) as caught:
        merge(tmp_path / "c")
    assert len(caught.value.problems) == 21
    assert "80 more tensors" in caught.value.problems[-1].message


def states(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "single": torch.randn(70, 30, generator=generator),
            "brain": torch.randn(1000, generator=generator).bfloat16(),
            "transposed": torch.randn(30, 50, generator=generator).t(),
            "scalar": torch.randn((), generator=generator),
            "steps": torch.arange(5),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("option", ["keep", "bf16"])
def test_average_is_computed_in_float64(option, tmp_path, merge):
    saved = states(4)
    run = make_run(tmp_path / "run", dict(zip((10, 20, 30, 40), saved, strict=True)))
    result = merge(run, average="last:3", dtype=option)
    merged = merged_tensors(result.output)
    for name in ("single", "brain", "transposed", "scalar"):
        kind = saved[0][name].dtype if option == "keep" else torch.bfloat16
        mean = sum(state[name].double() for state in saved[1:]) / 3
        assert same_bits(merged[name], mean.to(kind)), name
    assert same_bits(merged["steps"], torch.arange(5))
    assert "20" in result.reason
    assert json.loads((result.output / "merge.json").read_text())["steps"] == [40, 30, 20]
    assert same_bits(
        merged_tensors(merge(run, average="10,40", dtype="keep", output=tmp_path / "two").output)["scalar"],
        ((saved[0]["scalar"].double() + saved[3]["scalar"].double()) / 2).float(),
    )


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tensors_larger_than_a_buffer_are_averaged(kind, tmp_path, merge):
    """The sum is in float64: four times the bytes of the 16-bit types."""
    saved = [
        {"w": torch.randn(700, 500, generator=torch.Generator().manual_seed(seed)).to(kind)}
        for seed in (1, 2)
    ]
    run = make_run(tmp_path / "run", {1: saved[0], 2: saved[1]})
    merged = merged_tensors(merge(run, average="1,2", dtype="keep").output)["w"]
    assert same_bits(merged, ((saved[0]["w"].double() + saved[1]["w"].double()) / 2).to(kind))


@pytest.mark.parametrize("text", ["last:1", "last:9", "last:x", "10", "10,11", "10,10", "first:2", ""])
def test_invalid_averages_are_refused(text, tmp_path, merge):
    run = make_run(tmp_path / "run", dict(zip((10, 20), states(2), strict=True)))
    with pytest.raises(FsdpTuneError) as caught:
        merge(run, average=text)
    assert caught.value.exit_code == 2


def test_averaging_different_models_is_refused(tmp_path, merge):
    first, second = states(2)
    run = make_run(tmp_path / "run", {1: first, 2: {**second, "scalar": torch.zeros(2)}})
    with pytest.raises(FsdpTuneError, match="`scalar` is not the same tensor"):
        merge(run, average="last:2")


def test_averaging_different_integers_is_refused(tmp_path, merge):
    first, second = states(2)
    run = make_run(tmp_path / "run", {1: first, 2: {**second, "steps": torch.arange(5) + 1}})
    with pytest.raises(
        FsdpTuneError, match=r"`steps` is int64, which has no mean, and differs from that in .*checkpoint-2"
    ) as caught:
        merge(run, average="last:2")
    [problem] = caught.value.problems
    assert str(run / "checkpoint-1") in str(problem.where)
    assert problem.hint == "merge one of them: `--step N`"


def test_flipped_bit_in_any_of_the_averaged_checkpoints_is_found(tmp_path, merge):
    run = make_run(tmp_path / "run", dict(zip((10, 20, 30), states(3), strict=True)))
    shard = next((run / "checkpoint-10" / SHARDS).glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(FsdpTuneError) as caught:
        merge(run, average="last:3")
    assert caught.value.problems[0].where.source == str(shard)
    assert merge(run, average="last:2").tensors == 5


def test_checkpoint_selection_needs_a_run_and_is_exclusive(tmp_path, merge):
    run = make_run(tmp_path / "run", dict(zip((10, 20), states(2), strict=True)))
    finish_checkpoint(run / "checkpoint-10", 10)
    for options in ({"step": 10, "best": True}, {"best": True, "average": "last:2"}):
        with pytest.raises(FsdpTuneError, match="exclude each other"):
            merge(run, **options)
    for options in ({"step": 10}, {"best": True}, {"average": "last:2"}):
        with pytest.raises(FsdpTuneError, match="this is not one"):
            merge(run / "checkpoint-10", **options)
    with pytest.raises(FsdpTuneError, match="no evaluation"):
        merge(run, best=True)
