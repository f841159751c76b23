"""`plan` against published figures of other people's runs: each predicted beside the published one, with the
error.

    python benchmarks/plan_rows.py [FILE …] [--cache DIR] [--only WORD] [--markdown]

A FILE has tab-separated columns under a header (default: docs/evidence/data/published-rows.tsv). One line is
one published figure; lines of one run share its trace.

    model        a model whose configuration the package has (`recipe/model_configs.json`), or the path of a config.json
    gpu          a name of the table of GPUs
    ranks        GPUs; more than the vendor's machine has are several machines
    strategy     as in a recipe: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD …
    ep           ranks that share the experts of a layer; 1 without expert parallelism
    micro_batch  sequences of a forward
    length       tokens of a sequence
    precision    mixed: stored in fp32, computed in bf16; bf16: parameters, gradients and moments in bf16
    adapters     none, `lora r=16` or `qlora r=16`
    keys         other keys of a recipe as `section.key=value`, separated by spaces
    figure       the published number
    unit         tokens/s/GPU, tokens/s (of all GPUs), s/step, GiB allocated, GiB reserved
    program      what was run
    differs      in what the program differs from what is planned; `-` if the source names nothing
    source       the address of the figure

Nothing is fitted on these rows. An error of a speed is that of its time: positive if the prediction is too
slow.
"""  # noqa: E501

from __future__ import annotations

import argparse
import csv
import functools
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.gpus import Hardware, find_hardware
from fsdp_tune.planner.predict.mixture import with_ep_size
from fsdp_tune.planner.predict.predict import plan
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.planner.tracing import Tracing
from fsdp_tune.recipe.read.catalogue import architecture
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.recipe import Recipe

PUBLISHED = Path(__file__).parents[1] / "docs" / "evidence" / "data" / "published-rows.tsv"
SPEED, MEMORY = "speed", "memory"
UNITS = {
    "tokens/s/GPU": SPEED,
    "tokens/s": SPEED,
    "s/step": SPEED,
    "GiB allocated": MEMORY,
    "GiB reserved": MEMORY,
}
DEVICES_PER_MACHINE = 8
"""Of a GPU whose vendor sells no machine."""
STORED = {"mixed": ("fp32", "bf16"), "bf16": ("bf16", "no")}
"""Precision → `model.dtype` and `precision.mixed_precision`."""


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure, as written."""

    model: str
    gpu: str
    ranks: str
    strategy: str
    ep: str
    micro_batch: str
    length: str
    precision: str
    adapters: str
    keys: str
    figure: str
    unit: str
    program: str
    differs: str
    source: str

    @property
    def kind(self) -> str:
        return UNITS[self.unit]

    @property
    def published(self) -> float:
        return float(self.figure)


COLUMNS = tuple(field.name for field in fields(Row))


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file. Raises: SystemExit naming file and line for other columns, or a value that
    is none of the documented."""
    with file.open(encoding="utf-8", newline="") as lines:
        table = csv.DictReader(
            (line for line in lines if not line.startswith("#")), delimiter="\t", quoting=csv.QUOTE_NONE
        )
        if tuple(table.fieldnames or ()) != COLUMNS:
            raise SystemExit(f"{file}: the columns are {table.fieldnames}, not {', '.join(COLUMNS)}")
        return [_checked(Row(**values), f"{file}, row {number}") for number, values in enumerate(table, 1)]


def _checked(row: Row, where: str) -> Row:
    known = {"unit": UNITS, "precision": STORED}
    for column, values in known.items():
        if getattr(row, column) not in values:
            raise SystemExit(f"{where}: {column} `{getattr(row, column)}` is none of {', '.join(values)}")
    try:
        row_recipe_data(row)
        float(row.figure)
    except (TypeError, ValueError, AttributeError) as error:
        raise SystemExit(f"{where}: {error}") from error
    return row


def row_recipe_data(row: Row) -> dict[str, Any]:
    """Return the recipe of a row, by section. Raises: ValueError or TypeError for a value that cannot be
    read."""
    ranks, (dtype, computed) = int(row.ranks), STORED[row.precision]
    data: dict[str, Any] = {
        "model": {"from_config": configuration(row.model), "tokenizer": "builtin:arithmetic", "dtype": dtype},
        "data": {"train": [{"path": "builtin:arithmetic"}], "max_length": int(row.length)},
        "fsdp": {"sharding_strategy": row.strategy},
        "precision": {"mixed_precision": computed},
        "training": {"per_device_train_batch_size": int(row.micro_batch), "gradient_accumulation_steps": 1},
        "launch": {
            "num_processes": ranks,
            "num_machines": machines_of(ranks, find_hardware(row.gpu)),
            "device": "cuda",
        },
    }
    method, _, rank = row.adapters.partition(" r=")
    if method != "none":
        data["lora"] = {"r": int(rank)}
    if method == "qlora":
        data["quantization"] = {"load": "nf4"}
    for key, value in _pairs(row.keys):
        section, name = key.split(".")
        data.setdefault(section, {})[name] = value
    return data


def _pairs(keys: str) -> Iterator[tuple[str, Any]]:
    for word in keys.split() if keys != "-" else ():
        key, sign, value = word.partition("=")
        if not sign or key.count(".") != 1:
            raise ValueError(f"keys: `{word}` is not section.key=value")
        yield key, yaml.safe_load(value)


@functools.cache
def configuration(model: str) -> dict[str, Any]:
    facts = architecture(model)
    return json.loads(Path(model).read_text(encoding="utf-8")) if facts is None else facts


def machines_of(ranks: int, hardware: Hardware) -> int:
    return -(-ranks // (hardware.devices_per_machine or DEVICES_PER_MACHINE))


def recipe_of(row: Row) -> Recipe:
    """Return the resolved recipe of a row. Raises: FsdpTuneError for one that this release refuses."""
    ranks = int(row.ranks)
    recipe = Recipe.model_validate(row_recipe_data(row))
    return resolve(recipe, Machine("cuda", ranks, 8, None), cwd=Path.cwd(), assume="cuda").recipe


Figures = dict[str, float | None]
"""By unit."""


def figures_of(row: Row, recipe: Recipe, trace: Trace) -> Figures | str:
    """Return the predictions of a run, or why there are none."""
    ranks = int(row.ranks)
    try:
        made = plan(recipe, find_hardware(row.gpu), with_ep_size(trace, int(row.ep)))
    except FsdpTuneError as error:
        return error.problems[0].message
    of_device = made.tokens_per_second_per_device
    return {
        "tokens/s/GPU": of_device,
        "tokens/s": None if of_device is None else of_device * ranks,
        "s/step": made.step_seconds,
        "GiB allocated": made.peak_allocated_gib,
        "GiB reserved": made.peak_reserved_gib,
    }


def error_percent(row: Row, value: float) -> float:
    is_rate = row.unit.startswith("tokens")
    return 100 * (row.published / value - 1 if is_rate else value / row.published - 1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row with its prediction, or the reason why there is none."""

    row: Row
    predicted: float | None
    reason: str = ""

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else error_percent(self.row, self.predicted)


def outcomes(rows: Sequence[Row], cache: Path) -> Iterator[Outcome]:
    """Plan every row, in order; rows of one run share its trace and its plan."""
    recipes: list[Recipe | FsdpTuneError | ValueError] = []
    for row in rows:
        try:
            recipes.append(recipe_of(row))
        except (FsdpTuneError, ValueError) as error:
            recipes.append(error)
    made: dict[tuple[str, str, str], Figures | str] = {}
    with Tracing(cache, offline=True) as tracing:
        keys = iter(tracing.request([each for each in recipes if isinstance(each, Recipe)]))
        for row, recipe in zip(rows, recipes, strict=True):
            if not isinstance(recipe, Recipe):
                yield Outcome(row, None, str(recipe).splitlines()[0])
                continue
            key = next(keys)
            trace = tracing.result(key)
            if isinstance(trace, FsdpTuneError):
                yield Outcome(row, None, trace.problems[0].message)
                continue
            run = (key, row.gpu, row.ep)
            found = made[run] if run in made else made.setdefault(run, figures_of(row, recipe, trace))
            yield Outcome(row, None, found) if isinstance(found, str) else Outcome(row, found[row.unit])


def summary(errors: Iterable[float]) -> str:
    sizes = [abs(error) for error in errors]
    worst = max(sizes, default=0.0)
    return (
        f"median {statistics.median(sizes):.1f} %, worst {worst:.1f} %, of {len(sizes)}"
        if sizes
        else "no row"
    )


def described(found: Outcome) -> list[str]:
    """Return the cells of a row: run, program, unit, predicted, published, error."""
    row = found.row
    kept = [word.partition(".")[2] for word in row.keys.split() if word != "-"]
    others = [
        row.precision,
        *([] if row.adapters == "none" else [row.adapters]),
        *([] if row.ep == "1" else [f"ep {row.ep}"]),
        *kept,
    ]
    run = (
        f"{row.model.rpartition('/')[2]}, {row.ranks} × {row.gpu}, {row.strategy}, {row.micro_batch} × "
        f"{row.length}, {', '.join(others)}"
    )
    figures = (
        ("–", "–")
        if found.predicted is None or found.error is None
        else (f"{found.predicted:,.4g}", f"{found.error:+.1f} %")
    )
    published = f"{row.published:,.0f}" if row.published >= 1000 else f"{row.published:g}"
    value = figures[0] if found.predicted is None or found.predicted < 1000 else f"{found.predicted:,.0f}"
    return [run, row.program, row.unit, value, published, figures[1]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, default=[PUBLISHED], metavar="FILE")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "fsdp-tune-traces"))
    parser.add_argument("--only", default="", help="rows in which a column has this word")
    parser.add_argument("--markdown", action="store_true", help="print a table of Markdown")
    options = parser.parse_args()
    rows = [row for file in options.files for row in read_rows(file)]
    rows = [row for row in rows if any(options.only in getattr(row, column) for column in COLUMNS)]
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    if options.markdown:
        print(
            "| run | program | unit | predicted | published | error |\n| --- | --- | --- | --- | --- | --- |"
        )
    for found in outcomes(rows, options.cache):
        cells = described(found)
        print(f"| {' | '.join(cells)} |" if options.markdown else "  ".join(cells), found.reason, flush=True)
        if found.error is not None:
            errors[found.row.kind, found.row.program].append(found.error)
    print()
    for kind in (SPEED, MEMORY):
        for program in sorted({program for of, program in errors if of == kind}):
            print(f"{kind}, {program}: {summary(errors[kind, program])}")
        print(
            f"{kind}, all: {summary(error for (of, _), found in errors.items() if of == kind for error in found)}"  # noqa: E501
        )


if __name__ == "__main__":
    main()
