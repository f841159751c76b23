"""Memory and speed of a stream over many rows, read by all lanes in one process.

    python benchmarks/stream.py [--rows 10000000] [--packing]
    python benchmarks/stream.py --divisions

Short texts are written to Parquet files first (about 50 bytes a row). Each line has the rows of the files that were read, those per second,
and the resident memory of the process, in MiB; a stream that kept anything of what it read would grow from line to line.

`--divisions` prints the tables of docs/guide/streaming.md instead: rows read of 10,900 rows in ten files, and the shares of a mixture.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from fsdp_tune.data.stream.lanes import Lane, StreamRow
from fsdp_tune.data.stream.row_stream import open_stream
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.recipe.schema import Recipe

FILES, LANES, LINES = 8, 16, 20
PREFIXES = (1000, 3000, 16_000)


def write_rows(folder: Path, rows: int) -> None:
    for file in range(FILES):
        with pq.ParquetWriter(folder / f"{file}.parquet", pa.schema([("text", pa.string())])) as writer:
            for start in range(0, rows // FILES, 100_000):
                numbers = range(start, min(start + 100_000, rows // FILES))
                writer.write_table(
                    pa.table({"text": [f"{file}: {number} plus {number % 97} is {number + number % 97}." for number in numbers]})
                )


def write_file(path: Path, rows: list[dict[str, str]]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def rows_of_run(folder: Path, entries: list[dict[str, Any]], count: int | None, **options: Any) -> list[StreamRow]:
    """Return the rows that 16 lanes give in turn: `count`, or all until the stream ends."""
    data = {"train": entries, "streaming": True, "stream_lanes": LANES, "max_length": 64, "cache_dir": str(folder)} | options
    recipe = Recipe.model_validate({"model": {"tokenizer": "builtin:arithmetic"}, "data": data, "launch": {"num_processes": 1}})
    stream = open_stream(recipe, load_encoder(recipe), {})
    lanes = [iter(Lane(stream, number, stream.first_state())) for number in range(LANES)]
    found: list[StreamRow] = []
    while count is None or len(found) < count:
        turn = [row for lane in lanes if (row := next(lane)).lengths]
        if not turn:
            break
        found += turn
    return found[:count]


def print_divisions(folder: Path) -> None:
    lognormal = [round(10_900 * part) for part in (0.62, 0.17, 0.08, 0.05, 0.03, 0.02, 0.012, 0.01, 0.005)]
    sizes = {"10,000 and nine of 100": [10_000] + [100] * 9, "equal": [1090] * 10, "lognormal": [*lognormal, 10_900 - sum(lognormal)]}
    print("| sizes | format | read with `repeats: 1` | never read after a pass | times read after three |\n|---|---|---:|---:|---:|")
    for kind, files in sizes.items():
        for suffix in ("parquet", "jsonl.gz", "jsonl"):
            path = folder / f"{kind}-{suffix}"
            path.mkdir()
            for file, rows in enumerate(files):
                write_file(path / f"{file}.{suffix}", [{"text": f"{row} plus {file}."} for row in range(rows)])
            entry = {"path": f"{path}/*.{suffix}"}
            once = Counter(row.origins for row in rows_of_run(folder, [{**entry, "repeats": 1}], None))
            endless = [row.origins for row in rows_of_run(folder, [entry], 32_700)]
            never, times = 10_900 - len(set(endless[:10_900])), set(Counter(endless).values())
            read = f"{sum(once.values()):,} of 10,900" if set(once.values()) == {1} else "not once each"
            print(f"| {kind} | {suffix} | {read} | {never:,} | {min(times)} to {max(times)} |")
    weights = (0.6, 0.39, 0.01)
    entries = [{"path": f"{folder}/{kind}-parquet/*.parquet", "weight": weight} for kind, weight in zip(sizes, weights, strict=True)]
    print("\n| weights | rows | " + " | ".join(f"first {count:,}" for count in PREFIXES) + " |\n|---|---|" + "---:|" * len(PREFIXES))
    for weight_by, packing in (("rows", False), ("rows", True), ("tokens", False), ("tokens", True)):
        rows = rows_of_run(folder, entries, PREFIXES[-1], packing=packing, mixture={"weight_by": weight_by})
        amounts = np.array([np.bincount(row.sources, row.lengths if weight_by == "tokens" else None, minlength=3) for row in rows])
        shares = [" / ".join(f"{share:.4f}" for share in done / done.sum()) for done in np.cumsum(amounts, 0)[np.array(PREFIXES) - 1]]
        print(f"| of {weight_by} | {'packed' if packing else 'not packed'} | " + " | ".join(shares) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--divisions", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.divisions:
            print_divisions(Path(name))
            return
        write_rows(Path(name), options.rows)
        data = {
            "train": [{"path": f"{name}/*.parquet"}],
            "streaming": True,
            "stream_lanes": LANES,
            "packing": options.packing,
            "max_length": 512,
        }
        recipe = Recipe.model_validate({"model": {"tokenizer": "builtin:arithmetic"}, "data": data, "launch": {"num_processes": 1}})
        stream = open_stream(recipe, load_encoder(recipe), {})
        lanes = [iter(Lane(stream, number, stream.first_state())) for number in range(LANES)]
        process, started, read, line = psutil.Process(), time.monotonic(), 0, 1
        while line <= LINES:
            for lane in lanes:
                read += len(next(lane).origins)
            if read >= line * options.rows // LINES:
                seconds, resident = time.monotonic() - started, process.memory_info().rss / 2**20
                print(json.dumps({"rows": read, "rows_per_second": round(read / seconds), "resident_mib": round(resident)}), flush=True)
                line += 1


if __name__ == "__main__":
    main()
