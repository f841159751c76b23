"""A cached plan round-trips, and is never returned for another recipe, GPU or trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.core.units import GIB
from fsdp_tune.jobs.plan_session import PlanSession
from fsdp_tune.planner.predict.predict import Plan, plan
from fsdp_tune.planner.tracing import keep_plan, kept_plan, plan_key
from tests.planner.hand_trace import Hand
from tests.planner.recipes import resolved

A100 = find_hardware("A100-40GB")


def made() -> Plan:
    return plan(resolved(), A100, Hand().hold(0, 10 * GIB).op("mm", flops=1e12).trace())


def test_cached_plan_equals_plan_without_timeline(tmp_path: Path) -> None:
    keep_plan(tmp_path, "key", made())
    assert kept_plan(tmp_path, "key", resolved()) == replace(made(), memory=None)
    renamed = resolved().model_copy(update={"name": "other"})
    found = kept_plan(tmp_path, "key", renamed)
    assert found is not None
    assert found.recipe == "other"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"recipe": "x", "unknown": 1}'])
def test_invalid_cached_plan_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "key.json").write_text(text)
    assert kept_plan(tmp_path, "key", resolved()) is None


def test_key_changes_with_whatever_the_plan_depends_on() -> None:
    base = plan_key(resolved(), A100, None, "trace")
    assert (
        plan_key(
            resolved().model_copy(update={"output_dir": "/elsewhere", "name": "other"}), A100, None, "trace"
        )
        == base
    )
    others = [
        plan_key(resolved(micro_batch=2), A100, None, "trace"),
        plan_key(resolved(), replace(A100, usable_gib=1.0), None, "trace"),
        plan_key(resolved(), A100, None, "another trace"),
    ]
    assert len({base, *others}) == 4


def test_second_session_reads_cached_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = resolved(data={"cache_dir": str(tmp_path)})
    calls: list[int] = []

    def counted(_session: PlanSession) -> Plan:
        calls.append(1)
        return made()

    monkeypatch.setattr(PlanSession, "plan", counted)
    answers = [PlanSession(recipe, A100).plan_once() for _ in range(2)]
    assert answers[0].as_dict() == answers[1].as_dict()
    assert len(calls) == 1
