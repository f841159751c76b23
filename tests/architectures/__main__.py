"""`python -m tests.architectures`: try every architecture that transformers lists, one result a line;
`--write` makes the page of them."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import transformers

from tests.architectures.case import Bench, try_architecture
from tests.architectures.page import EVIDENCE
from tests.architectures.tiny import names
from tests.evidence import Results, installed
from tests.parity.store import LONGEST_EXAMPLE, make_store
from tests.ranks import shared_ranks


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test --suite models", description=__doc__)
    parser.add_argument("architectures", nargs="*", help="all that transformers lists unless given")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("models.jsonl"),
        help="results are appended; architectures in it are skipped",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write docs/evidence/data/models.json and docs/reference/models.md",
    )
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    run_all(arguments.architectures or names(), arguments.results)
    if arguments.write:
        lines = [json.loads(line) for line in arguments.results.read_text().splitlines()]
        EVIDENCE.write(
            Results(
                installed("transformers") | {"longest_row": LONGEST_EXAMPLE},
                sorted(lines, key=lambda line: line["architecture"]),
            )
        )
    return 0


def run_all(architectures: list[str], results: Path) -> None:
    done = (
        {json.loads(line)["architecture"] for line in results.read_text().splitlines()}
        if results.exists()
        else set()
    )
    with tempfile.TemporaryDirectory(prefix="models-") as scratch:
        folder = Path(scratch)
        store = make_store(folder / "rows")
        for name in architectures:
            if name in done:
                continue
            started = time.monotonic()
            line = json.dumps(try_architecture(name, Bench(folder / name, store, shared_ranks())).as_dict())
            with results.open("a") as file:
                file.write(line + "\n")
            print(f"{time.monotonic() - started:.1f} s {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
