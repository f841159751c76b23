"""Memory and speed of a stream over many rows, read by all lanes in one process.

    python benchmarks/stream.py [--rows 10000000] [--packing]

Short texts are written to Parquet files first (about 50 bytes a row). Each line has the rows of the files that were read, those per second,
and the resident memory of the process, in MiB; a stream that kept anything of what it read would grow from line to line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from fsdp_tune.data.stream.lanes import Lane, open_stream
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.recipe.schema import Recipe

FILES, LANES, LINES = 8, 16, 20


def write_rows(folder: Path, rows: int) -> None:
    for file in range(FILES):
        with pq.ParquetWriter(folder / f"{file}.parquet", pa.schema([("text", pa.string())])) as writer:
            for start in range(0, rows // FILES, 100_000):
                numbers = range(start, min(start + 100_000, rows // FILES))
                writer.write_table(
                    pa.table({"text": [f"{file}: {number} plus {number % 97} is {number + number % 97}." for number in numbers]})
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--packing", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_rows(Path(name), options.rows)
        data = {
            "train": [{"path": f"{name}/*.parquet"}],
            "streaming": True,
            "stream_lanes": LANES,
            "packing": options.packing,
            "max_length": 512,
        }
        recipe = Recipe.model_validate({"model": {"tokenizer": "builtin:arithmetic"}, "data": data, "launch": {"num_processes": 1}})
        stream = open_stream(recipe, load_encoder(recipe))
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
