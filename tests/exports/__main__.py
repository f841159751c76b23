"""`python -m tests.exports PYTHON`: export a tiny model of each architecture, load it in another version of
transformers, write a table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers

from tests.architectures.tiny import config_of, make_model
from tests.data.test_tokenizer import write_base as write_tokenizer
from tests.evidence import Results
from tests.exports.case import IDS, TEXT, Job, differences, load_with, train_and_export
from tests.exports.older import describe
from tests.exports.page import EVIDENCE

_NAMES = (
    "from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names; "
    "print('\\n'.join(sorted(names)))"
)
VOCABULARY = 300
THETA = 54321.0
"""Unlike every default, so that a version that does not read it computes other logits."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test --suite exports", description=__doc__)
    parser.add_argument("python", type=Path, help="an interpreter with the older version of transformers")
    parser.add_argument("architectures", nargs="*", help="all that both versions have unless given")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("exports.jsonl"),
        help="results are appended; architectures in it are skipped",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write docs/evidence/data/exports.json and docs/reference/exports.md",
    )
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    known = arguments.architectures or _in_both(arguments.python)
    lines = (
        [json.loads(line) for line in arguments.results.read_text().splitlines()]
        if arguments.results.exists()
        else []
    )
    for name in [name for name in known if name not in {each["architecture"] for each in lines}]:
        lines.append(compare(name, arguments.python))
        with arguments.results.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(json.dumps(lines[-1]), flush=True)
    if arguments.write:
        older = next((each["versions"][1] for each in lines if each["versions"][1]), "4")
        not_run = sorted(set(_in_both(arguments.python)) - {each["architecture"] for each in lines})
        rows = [
            {name: value for name, value in each.items() if name != "versions"}
            for each in sorted(lines, key=lambda each: each["architecture"])
        ]
        EVIDENCE.write(Results({"new": transformers.__version__, "old": older, "not_run": not_run}, rows))
    return 0


def _in_both(python: Path) -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    older = subprocess.run([python, "-c", _NAMES], capture_output=True, text=True, check=True).stdout.split()
    return [name for name in older if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


def compare(name: str, python: Path) -> dict[str, Any]:
    """Return the differences of the merged model and of the adapter between the two versions; why there are
    none of them."""
    result: dict[str, Any] = {
        "architecture": name,
        "versions": [transformers.__version__, ""],
        "full": None,
        "adapter": None,
        "not_tried": {},
    }
    with tempfile.TemporaryDirectory(prefix="exports-") as scratch:
        folder = Path(scratch)
        jobs: list[Job] = []
        try:
            config = config_of(name) | {"vocab_size": VOCABULARY, "output_router_logits": False}
            base = make_model(
                _sensitive({key: value for key, value in config.items() if key in config_of(name)}),
                folder / "base",
            )
            write_tokenizer(base)
            jobs.append(Job("full", train_and_export(base, folder / "full")))
        except Exception as error:  # noqa: BLE001  the reason is the result
            result["not_tried"]["full"] = _first_line(error)
        try:
            if jobs:
                jobs.append(
                    Job(
                        "adapter",
                        jobs[0].folder,
                        train_and_export(jobs[0].folder, folder / "adapter", lora=True),
                    )
                )
        except Exception as error:  # noqa: BLE001
            result["not_tried"]["adapter"] = _first_line(error)
        for job, old in zip(jobs, load_with(python, jobs, folder), strict=True):
            try:
                new = describe(str(job.folder), str(job.adapter) if job.adapter else None, IDS, TEXT)
            except Exception as error:  # noqa: BLE001
                new = {"error": _first_line(error)}
            result["versions"][1] = old.get("version", result["versions"][1])
            result[job.name] = differences(new, old)
    return result


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _sensitive(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose rotary base is THETA in all layers."""
    changed = {
        name: _sensitive(value) if name.endswith("_config") and isinstance(value, dict) else value
        for name, value in config.items()
    }
    parameters = changed.get("rope_parameters")
    if isinstance(parameters, dict):
        nested = {
            name: value | {"rope_theta": THETA}
            for name, value in parameters.items()
            if isinstance(value, dict)
        }
        changed["rope_parameters"] = parameters | (nested or {"rope_theta": THETA})
    return changed


if __name__ == "__main__":
    sys.exit(main())
