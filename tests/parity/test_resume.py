"""A run resumed on as many ranks equals the uninterrupted one bit for bit; mismatched checkpoints are refused
before loading."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fsdp_tune.run.directory import RunDir, latest_checkpoint
from tests.cuda.devices import require
from tests.parity import runs
from tests.parity.bench import Bench, shared_bench
from tests.parity.cases import SHORT, SHORT_SAVED_STEP, Case

BASE, ALONE, DROPOUT = (
    Case(steps=SHORT),
    Case(ranks=1, steps=SHORT),
    Case("gpt2-dropout", accumulation=2, steps=SHORT),
)


def numbers(run: RunDir) -> list[tuple[Any, ...]]:
    keys = (
        "step",
        "epoch",
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens",
        "supervised_tokens",
        "loss_scale",
    )
    return [tuple(line.get(key) for key in keys) for line in runs.loss_lines(run)]


def evaluations(run: RunDir) -> list[tuple[int, float]]:
    return [(line["step"], line["eval_loss"]) for line in runs.lines(run) if "eval_loss" in line]


def resumed(
    bench: Bench, case: Case, donor: RunDir, changes: dict[str, Any] | None = None, step: int | None = None
) -> RunDir:
    """A run of a case that continues from a checkpoint of `donor`, by default that of the case's
    `saved_step`."""
    recipe = runs.merged(case.recipe(str(bench.model(case.architecture))), changes or {})
    run = bench.written_run(recipe, packed=case.packed)
    runs.resume_from(run, donor, case.saved_step if step is None else step)
    return run


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(DROPOUT, id=str(DROPOUT)),
        *(
            pytest.param(case, id=str(case), marks=pytest.mark.slow)
            for case in [
                Case("gpt2-dropout"),
                Case("gpt2-dropout", strategy="NO_SHARD"),
                Case("gpt2-dropout", fsdp=(("state_dict_type", "FULL_STATE_DICT"),)),
                Case("gpt2-dropout", version=1),
                Case("llama", precision="fp16", accumulation=4, packed=True),
                Case("mixtral", ranks=4, strategy="HYBRID_SHARD"),
            ]
        ),
    ],
)
def test_resume_on_the_same_ranks_is_bitwise_equal(case: Case, bench: Bench) -> None:
    whole = bench.run(case)
    run = resumed(bench, case, whole)
    runs.train(bench.on_ranks, run, case.ranks)
    assert numbers(run) == numbers(whole)
    assert evaluations(run) == evaluations(whole)
    one, other = (runs.saved_parameters(each, case.steps) for each in (run, whole))
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        (Case(), 2),
        (Case(offload=True), 2),
        (Case(fsdp=(("state_dict_type", "FULL_STATE_DICT"),)), 4),
        (Case(training=(("optim_args", "state_dtype=bf16"),)), 2),
        (Case("mixtral"), 4),
    ],
    ids=str,
)
def test_resume_on_the_other_device_continues_losses(case: Case, ranks: int, bench: Bench) -> None:
    """A checkpoint of CPU ranks is resumed on GPUs, and one of GPUs on CPU ranks; also on another number of
    ranks."""
    require("cuda")
    whole = shared_bench("cuda" if bench.device == "cpu" else "cpu").run(case)
    run = resumed(bench, replace(case, ranks=ranks), whole)
    runs.train(bench.on_ranks, run, ranks)
    one, other = numbers(run), numbers(whole)
    assert [(line[0], *line[4:]) for line in one] == [(line[0], *line[4:]) for line in other], (
        "steps, rates and rows"
    )
    assert one[: runs.SAVED_STEP] == other[: runs.SAVED_STEP]
    assert [line[2] for line in one] == pytest.approx([line[2] for line in other], rel=1e-5)
    assert evaluations(run)[-1] == pytest.approx(evaluations(whole)[-1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("first", [1, 2])
def test_run_with_frozen_layers_in_bf16_goes_on_under_the_other_version(first: int, bench: Bench) -> None:
    """FSDP1 stores a frozen unit in fp32, FSDP2 in bf16: both compute with the same values."""
    steps, saved_step = 4, 2
    training = {"max_steps": steps, "eval_steps": steps, "save_steps": saved_step}
    frozen = {"model": {"freeze": ["*.layers.0.*"]}, "training": training}
    case, other = (Case(version=version, precision="bf16") for version in (first, 3 - first))
    whole = bench.written_run(runs.merged(case.recipe(str(bench.model("llama"))), frozen))
    runs.train(bench.on_ranks, whole, case.ranks)
    run = resumed(bench, other, whole, frozen, saved_step)
    runs.train(bench.on_ranks, run, other.ranks)
    saved = runs.saved_parameters(whole, steps)
    assert {value.dtype for name, value in saved.items() if ".layers.0.mlp." in name} == {
        torch.float32 if first == 1 else torch.bfloat16
    }
    losses, expected = ([line["loss"] for line in runs.loss_lines(each)] for each in (run, whole))
    assert losses[:saved_step] == expected[:saved_step]
    assert losses == pytest.approx(expected, rel=2e-3)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_metrics_line_spanning_a_checkpoint_is_complete(ranks: int, bench: Bench) -> None:
    """Lines every 4 steps, a save at 10: what the first run summed of steps 9 and 10 comes with it, on any
    number of ranks."""
    lines = {"training": {"logging_steps": 4}}
    recipe = runs.merged(Case().recipe(str(bench.model("llama"))), lines)
    whole = bench.written_run(recipe)
    runs.train(bench.on_ranks, whole, 2)
    run = resumed(bench, Case(ranks=ranks), whole, lines)
    runs.train(bench.on_ranks, run, ranks)
    one, other = numbers(run), numbers(whole)
    assert [line[0] for line in one] == [4, 8, 12, 16, 20, 22]
    for line, expected in zip(one, other, strict=True):
        assert line[5:7] == expected[5:7], "tokens"
        assert line[2] == pytest.approx(expected[2], rel=1e-6)


def stop_after(path: str, step: int, rank: int) -> dict[str, Any]:
    """The worker; one rank gets SIGUSR1 while it takes `step`."""
    import os
    import signal

    import torch.distributed as dist

    from fsdp_tune.worker.trainer import FsdpTrainer

    original = FsdpTrainer.training_step

    def training_step(self: Any, *arguments: Any) -> Any:
        if dist.get_rank() == rank and self.state.global_step + 1 == step:
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(self, *arguments)

    with patch.object(FsdpTrainer, "training_step", training_step):
        return runs.run_worker(path)


@pytest.mark.ranks
@pytest.mark.parametrize("signalled", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_signal_to_one_rank_saves_on_all_and_resume_continues(signalled: int, bench: Bench) -> None:
    case, whole = DROPOUT, bench.run(DROPOUT)
    run = bench.written_run(case.recipe(str(bench.model(case.architecture))))
    outcomes = bench.on_ranks.run(2, functools.partial(stop_after, str(run.path), 5, signalled))
    assert [(outcome["exit_code"], outcome["exit_reason"]) for outcome in outcomes] == [
        (143, "preempted")
    ] * 2
    [stop] = {outcome["step"] for outcome in outcomes}
    assert 5 <= stop <= 7
    checkpoint, _ = latest_checkpoint(run, digests=True)
    assert checkpoint is not None
    assert checkpoint.step == stop
    again = resumed(bench, case, run, step=stop)
    runs.train(bench.on_ranks, again, 2)
    assert numbers(again) == numbers(whole)


@pytest.mark.ranks
def test_stop_inside_an_epoch_keeps_log_and_eval_schedule(bench: Bench) -> None:
    """The Trainer calls the end of the epoch a step's end where it leaves the epoch early."""
    by_epoch = {
        "max_steps": -1,
        "num_train_epochs": 1.5,
        "eval_strategy": "epoch",
        "logging_strategy": "epoch",
        "warmup_steps": 0,
    }
    recipe = runs.merged(Case().recipe(str(bench.model("llama"))), {"training": by_epoch})
    run = bench.written_run(recipe)
    [stop] = {
        outcome["step"]
        for outcome in bench.on_ranks.run(2, functools.partial(stop_after, str(run.path), 2, 0))
    }

    def steps(kind: str) -> list[int]:
        return [line["step"] for line in runs.lines(run) if kind in line]

    assert (steps("loss"), steps("eval_loss")) == ([], [])
    (run.path / "resume.json").write_text(json.dumps({"resume_from": str(run.checkpoint(stop))}))
    runs.train(bench.on_ranks, run, 2)
    assert steps("loss") == steps("eval_loss") == [6, 9]


def damage_file(run: RunDir, pattern: str) -> Path:
    [path, *_] = sorted(run.checkpoint(SHORT_SAVED_STEP).glob(pattern))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    return path


@pytest.mark.ranks
@pytest.mark.parametrize(
    "pattern",
    [
        "pytorch_model_fsdp_0/*.distcp",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("optimizer_0/.metadata", "rng_state_1.pth", "trainer_state.json")
        ),
    ],
)
def test_flipped_bit_is_detected_before_loading(pattern: str, bench: Bench) -> None:
    run = resumed(bench, BASE, bench.run(BASE))
    path = damage_file(run, pattern)
    outcomes = bench.on_ranks.run(2, functools.partial(runs.run_worker, str(run.path)))
    assert {(outcome["exit_code"], outcome["problem"]["code"]) for outcome in outcomes} == {
        (1, "checkpoint-damaged")
    }
    assert path.name in outcomes[1]["problem"]["message"]
    assert not run.readback_json.exists()


@pytest.mark.ranks
def test_directory_without_a_manifest_is_not_a_checkpoint(bench: Bench) -> None:
    run = resumed(bench, ALONE, bench.run(BASE))
    (run.checkpoint(SHORT_SAVED_STEP) / "manifest.json").unlink()
    outcomes = bench.on_ranks.run(ALONE.ranks, functools.partial(runs.run_worker, str(run.path)))
    assert {outcome["problem"]["code"] for outcome in outcomes} == {"checkpoint-unusable"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fields", "tensor"),
    [
        ({"num_hidden_layers": 2}, "is not in the model"),
        ({"num_hidden_layers": 4}, "is missing"),
        ({"intermediate_size": 48}, "the model has"),
    ],
)
def test_checkpoint_of_another_model_is_refused_by_name(
    fields: dict[str, int], tensor: str, bench: Bench
) -> None:
    """DCP would ignore what the model lacks."""
    from tests.parity.architectures import ARCHITECTURES

    config = {"model": {"name_or_path": None, "from_config": ARCHITECTURES["llama"] | fields}}
    run = resumed(bench, ALONE, bench.run(BASE), config)
    outcomes = bench.on_ranks.run(ALONE.ranks, functools.partial(runs.run_worker, str(run.path)))
    assert {outcome["problem"]["code"] for outcome in outcomes} == {"checkpoint-of-another-model"}
    assert tensor in outcomes[0]["problem"]["message"]


@pytest.mark.ranks
def test_more_steps_continue_a_finished_run(bench: Bench) -> None:
    whole = bench.run(BASE)
    longer = {"training": {"max_steps": SHORT + 6}}
    run = resumed(bench, ALONE, whole, longer, step=SHORT)
    runs.train(bench.on_ranks, run, ALONE.ranks)
    assert [line[0] for line in numbers(run)] == list(range(1, SHORT + 7))
    assert numbers(run)[:SHORT] == numbers(whole)
    rates = [line[4] for line in numbers(run)[SHORT:]]
    assert rates[0] > 0.0, "the schedule is that of the longer run, at this step"


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4))])
def test_checkpoint_weights_initialise_another_run(ranks: int, bench: Bench) -> None:
    """`model.name_or_path: RUN/checkpoint-N`: the first loss is that of the source's next step on the same
    rows."""
    source = bench.run(BASE)
    source_model = source.path / "model"
    if not source_model.exists():
        shutil.copytree(bench.model("llama"), source_model)
        (source_model / "model.safetensors").unlink()
    recipe = Case(ranks=ranks).recipe(str(source.checkpoint(SHORT)))
    run = bench.written_run(runs.merged(recipe, {"training": {"max_steps": 2, "warmup_steps": 1}}))
    runs.train(bench.on_ranks, run, ranks)
    saved = runs.saved_parameters(source, SHORT)
    first = json.loads(run.metrics_jsonl.read_text().splitlines()[1])
    assert first["step"] == 1
    begun = runs.saved_parameters(run, 2)
    moved = max(float((begun[name] - saved[name]).abs().max()) for name in saved)
    assert moved <= 2 * 3e-3 * 1.2, "two steps of AdamW from there, not from random weights"
