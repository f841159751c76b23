"""The table of published figures, and how a prediction is compared with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fsdp_tune.core.topology import Topology
from tests.planner.hand_trace import Hand

if TYPE_CHECKING:
    from plan_rows import Row

FIELDS = {
    "model": "Qwen/Qwen2.5-0.5B",
    "gpu": "B200",
    "ranks": "2",
    "strategy": "FULL_SHARD",
    "ep": "1",
    "micro_batch": "1",
    "length": "128",
    "precision": "bf16",
    "adapters": "none",
    "keys": "fsdp.activation_checkpointing=full",
    "figure": "1000",
    "unit": "tokens/s/GPU",
    "program": "a trainer",
    "differs": "-",
    "source": "https://example.org",
}


def written(folder: Path, *rows: dict[str, str], header: Sequence[str] = tuple(FIELDS)) -> Path:
    lines = ["\t".join(header), *("\t".join((FIELDS | row).values()) for row in rows)]
    (folder / "rows.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "rows.tsv"


def row(**values: str) -> Row:
    from plan_rows import Row

    return Row(**(FIELDS | values))


def test_published_table_is_readable_and_each_row_has_its_source() -> None:
    import plan_rows

    rows = plan_rows.read_rows(plan_rows.PUBLISHED)
    assert {each.kind for each in rows} == {plan_rows.SPEED, plan_rows.MEMORY}
    assert [each for each in rows if not each.source.startswith("https://") or not each.program] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "parsecs"}, "row 1: unit `parsecs` is none of tokens/s/GPU"),
        ({"precision": "fp64"}, "precision `fp64` is none of mixed"),
        ({"keys": "fsdp.version"}, "keys: `fsdp.version` is not section.key=value"),
        ({"figure": "fast"}, "could not convert string to float: 'fast'"),
    ],
)
def test_value_outside_the_format_is_refused_with_its_row(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    import plan_rows

    with pytest.raises(SystemExit, match="row 1") as caught:
        plan_rows.read_rows(written(tmp_path, change))
    assert message in str(caught.value)


def test_other_columns_are_refused(tmp_path: Path) -> None:
    import plan_rows

    with pytest.raises(SystemExit, match="the columns are"):
        plan_rows.read_rows(written(tmp_path, header=("model", "gpu")))


def test_row_is_the_recipe_that_it_describes() -> None:
    import plan_rows

    recipe = plan_rows.recipe_of(row(ranks="16", micro_batch="4", precision="mixed", adapters="qlora r=8"))
    assert (recipe.world_size, recipe.launch.num_machines) == (16, 2)
    assert (recipe.training.per_device_train_batch_size, recipe.data.max_length) == (4, 128)
    assert (recipe.model.dtype, recipe.precision.mixed_precision, recipe.fsdp.activation_checkpointing) == (
        "fp32",
        "bf16",
        "full",
    )
    assert recipe.lora is not None
    assert recipe.lora.r == 8
    assert recipe.quantization is not None


@pytest.mark.parametrize(
    ("unit", "published", "value", "error"),
    [
        ("tokens/s/GPU", "1000", 500.0, 100.0),  # half of the speed: twice the time
        ("s/step", "2", 1.0, -50.0),
        ("GiB allocated", "40", 50.0, 25.0),
    ],
)
def test_positive_error_is_too_slow_or_too_large(
    unit: str, published: str, value: float, error: float
) -> None:
    import plan_rows

    assert plan_rows.error_percent(row(unit=unit, figure=published), value) == pytest.approx(error)


class Traced:
    """In place of the child that traces."""

    def __init__(self, *_: object, **__: object) -> None:
        self.requested: list[Any] = []

    def __enter__(self) -> Traced:
        return self

    def __exit__(self, *_: object) -> None: ...

    def request(self, recipes: Sequence[Any]) -> list[str]:
        return [recipe.fsdp.sharding_strategy for recipe in recipes]

    def result(self, _key: str) -> Any:
        hand = Hand().hold(1, 2**30).op("mm", flops=1e12)
        return hand.trace(topology=Topology(shard=2))


def test_figures_are_printed_beside_the_published_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import plan_rows

    monkeypatch.setattr(plan_rows, "Tracing", Traced)
    file = written(tmp_path, {}, {"unit": "GiB allocated", "figure": "2"}, {"keys": "data.max_length=0"})
    monkeypatch.setattr("sys.argv", ["plan_rows.py", str(file)])
    main: Callable[[], None] = plan_rows.main
    main()
    lines = capsys.readouterr().out.splitlines()
    assert "GiB allocated  1.031  2  -48.4 %" in lines[1]
    assert "–  1,000  –" in lines[2], "a recipe that is refused"
    assert "memory, all: median 48.4 %, worst 48.4 %, of 1" in lines
