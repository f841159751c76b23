"""What machines compare before a launch, and one verdict of several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_tune.core.errors import ExitReason
from fsdp_tune.launch.machines.channel import CountedBar
from fsdp_tune.launch.machines.identity import Identity, difference, identity_of
from fsdp_tune.launch.machines.verdicts import combined
from fsdp_tune.launch.supervise.attempts import _final
from fsdp_tune.run.rank_files import Verdict
from tests.launch.fake_ranks import ended
from tests.launch.links import identity
from tests.launch.recipes import resolved

KILLED = ended(ExitReason.LOST_RANK, "rank-killed", 5)
ECHO = ended(ExitReason.LOST_RANK, "lost-rank", 6)
FAILED_THERE = ended(ExitReason.LOST_RANK, "machine-failed")
STOPPED = ended(ExitReason.PREEMPTED, step=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"versions": {"torch": "2.12.0"}}, "torch 2.12.0 instead of 2.13.0"),
        ({"versions": {"torch": "2.13.0", "triton": "3.7"}}, "triton 3.7 instead of (not installed)"),
        ({"recipe": {"data.max_length": "b"}}, "another value of `data.max_length`"),
        ({"devices": ["H100"]}, "visible devices: 1 instead of 0"),
        ({"variables": {"NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE 1 instead of (unset)"),
        (
            {"ports": ["InfiniBand 400 Gb/sec"]},
            "active InfiniBand ports: 1 × InfiniBand 400 Gb/sec instead of none",
        ),
    ],
)
def test_difference_between_machines_is_described(changes: dict[str, object], said: str) -> None:
    differs = difference(1, identity("b", **changes), identity("a"), 0.0)
    assert differs is not None
    assert differs.message == f"machine 1 (b) differs from machine 0 (a): {said}"


def test_ports_may_differ_where_the_user_chooses_the_transport() -> None:
    variables = {"NCCL_IB_DISABLE": "1"}
    other = identity("b", variables=variables, ports=["InfiniBand 400 Gb/sec"])
    assert difference(1, other, identity("a", variables=variables), 0.0) is None


def test_clocks_that_differ_by_more_than_a_minute_are_refused() -> None:
    assert difference(1, identity("b"), identity("a"), -59.0) is None
    differs = difference(1, identity("b"), identity("a"), 3600.0)
    assert differs is not None
    assert (
        differs.message
        == "machine 1 (b) differs from machine 0 (a): a clock that is 1h00m00s behind the other"
    )


def test_every_difference_is_counted() -> None:
    mine = identity("b", code="x", versions={"torch": "1", "numpy": "2"}, recipe={"a": "1", "b": "2"})
    differs = difference(1, mine, identity("a"), 0.0)
    assert differs is not None
    assert differs.message.endswith("(and 1 more differences)")


def test_identity_has_no_value_of_the_recipe_and_no_secret(tmp_path: Path) -> None:
    recipe = resolved(tmp_path, "data.max_length=77")
    environment = {
        "NCCL_SECRET_THING": "value-of-it",
        "NCCL_NET_PLUGIN": "/my/plugin.so",
        "NCCL_IB_TIMEOUT": "22",
        "HF_TOKEN": "hf_x",
    }
    found = identity_of(recipe, environment)
    text = json.dumps(found.as_dict())
    assert "77" not in found.recipe.values()
    assert "/my/plugin.so" not in text
    assert "hf_x" not in text
    assert found.variables["NCCL_IB_TIMEOUT"] == "22"
    assert Identity.from_dict(json.loads(text)) == found


@pytest.mark.parametrize(
    ("here", "there", "problem", "exit_code"),
    [
        (ECHO, KILLED, "rank-killed", 5),
        (KILLED, ECHO, "rank-killed", 5),
        (FAILED_THERE, KILLED, "rank-killed", 5),
        (ECHO, ECHO, "lost-rank", 5),
        (ECHO, ended(ExitReason.OUT_OF_MEMORY, "device-out-of-memory"), "device-out-of-memory", 3),
        (ECHO, STOPPED, None, 143),
    ],
)
def test_verdict_of_all_machines_is_the_original_failure(
    here: Verdict, there: Verdict, problem: str | None, exit_code: int
) -> None:
    judged = combined(here, [there])
    assert (judged.problem and judged.problem.code, judged.exit_code) == (problem, exit_code)
    assert judged.step == max(here.step, there.step)


def test_rank_that_lost_the_ranks_of_a_stopped_machine_is_stopped_too() -> None:
    """It lost its connection to them before it could agree on a step with them."""
    judged = _final(ECHO, STOPPED, None)
    assert (judged.exit_code, judged.reason, judged.problem) == (143, ExitReason.PREEMPTED, None)


def test_tokenised_rows_are_counted() -> None:
    bar, counted = list[int](), list[int]()

    class Shown:
        def advance(self, n: int = 1) -> None:
            bar.append(n)

    CountedBar(Shown(), counted.append).advance(7)
    assert (bar, counted) == ([7], [7])
