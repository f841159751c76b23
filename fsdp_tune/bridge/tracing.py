"""Traces of recipes, from a cache or from a child process that imports torch: the surface never does.

A trace depends on what the key holds and on nothing else: the recipe without the keys that no allocation sees, the model's
configuration, the versions of torch, transformers and this package's own sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import fsdp_tune
from fsdp_tune.errors import FsdpTuneError, Problem
from fsdp_tune.plan.trace_format import Trace
from fsdp_tune.recipe.schema import Recipe

COMMAND = (sys.executable, "-P", "-m", "fsdp_tune.trace.many")
_UNSEEN = ("name", "output_dir", "checkpoint", "merge", "recipe_version")
"""Sections and keys that change nothing on the device."""
_SEEN_OF_DATA = ("max_length", "packing", "pad_to_multiple_of")
_SEEN_OF_LAUNCH = ("num_processes", "num_machines", "device")
_SEEN_OF_TRAINING = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "optim",
    "optim_args",
    "max_grad_norm",
    "label_smoothing_factor",
    "weight_decay",
)


def trace_recipes(
    recipes: Sequence[Recipe],
    *,
    cache: Path,
    exact: bool = False,
    vocabulary: int | None = None,
    offline: bool = False,
    traced: Callable[[int, int], None] = lambda _done, _of: None,
) -> list[Trace | FsdpTuneError]:
    """One trace, or the reason why there is none, for each resolved recipe. `traced(done, of)` is called as the missing ones come in.

    `exact`: at full depth. `vocabulary`: of the tokenizer, where it may grow the embedding.
    """
    keys = [trace_key(recipe, exact=exact, vocabulary=vocabulary) for recipe in recipes]
    found: dict[str, Trace | FsdpTuneError] = {}
    missing: dict[str, Recipe] = {}
    for key, recipe in zip(keys, recipes, strict=True):
        if key in found or key in missing:
            continue
        cached = _cached(cache / f"{key}.npz")
        if cached is not None:
            found[key] = cached
        else:
            missing[key] = recipe
    if missing:
        cache.mkdir(parents=True, exist_ok=True)
        found |= _run(missing, cache, exact=exact, vocabulary=vocabulary, offline=offline, traced=traced)
    return [found[key] for key in keys]


def trace_key(recipe: Recipe, *, exact: bool, vocabulary: int | None) -> str:
    """Names a trace by everything that it depends on."""
    data: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True)
    for name in _UNSEEN:
        data.pop(name)
    for section, seen in (("data", _SEEN_OF_DATA), ("launch", _SEEN_OF_LAUNCH), ("training", _SEEN_OF_TRAINING)):
        data[section] = {key: value for key, value in data[section].items() if key in seen}
    parts = [json.dumps(data, sort_keys=True), str(exact), str(vocabulary), _configuration(recipe), _sources(), *_versions()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _configuration(recipe: Recipe) -> str:
    """The config.json of a local model: two of them may have one path."""
    for path in (recipe.model.name_or_path, recipe.model.from_config):
        file = Path(path) if isinstance(path, str) else None
        config = file / "config.json" if file is not None and file.is_dir() else file
        if config is not None and config.is_file():
            return hashlib.sha256(config.read_bytes()).hexdigest()
    return ""


def _sources() -> str:
    """The package's own code that a trace runs, by size and time of change."""
    root = Path(fsdp_tune.__file__).parent
    digest = hashlib.sha256()
    for part in ("trace", "model", "recipe"):
        for path in sorted((root / part).rglob("*.py")):
            state = path.stat()
            digest.update(f"{path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _versions() -> list[str]:
    return [f"{name} {metadata.version(name)}" for name in ("torch", "transformers")]


def _cached(path: Path) -> Trace | None:
    """A file that is no trace any more is made anew."""
    try:
        return Trace.load(path)
    except (OSError, ValueError, KeyError):
        return None


def _run(
    missing: dict[str, Recipe], cache: Path, *, exact: bool, vocabulary: int | None, offline: bool, traced: Callable[[int, int], None]
) -> dict[str, Trace | FsdpTuneError]:
    keys = list(missing)
    jobs = [
        {
            "recipe": recipe.model_dump(mode="json", by_alias=True),
            "exact": exact,
            "vocabulary": vocabulary,
            "output": str(cache / f"{key}.npz"),
        }
        for key, recipe in missing.items()
    ]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    found: dict[str, Trace | FsdpTuneError] = {}
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryFile("w+") as wanted:
        json.dump(jobs, wanted)
        wanted.seek(0)
        with subprocess.Popen(COMMAND, stdin=wanted, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as child:
            assert child.stdout is not None
            for line in child.stdout:
                result = json.loads(line)
                key = keys[result["job"]]
                found[key] = _result(cache / f"{key}.npz", result["problems"])
                traced(len(found), len(keys))
        log.seek(0)
        lines = log.read().strip().splitlines()
    last = lines[-1] if lines else f"it ended with exit code {child.returncode}"
    lost = FsdpTuneError(Problem("trace-failed", f"the step could not be traced: {last}", hint="`fsdp-tune env` shows the installation"))
    return {key: found.get(key, lost) for key in keys}


def _result(path: Path, problems: list[dict[str, Any]]) -> Trace | FsdpTuneError:
    if not problems:
        trace = _cached(path)
        if trace is not None:
            return trace
        return FsdpTuneError(Problem("trace-failed", f"{path} was written and cannot be read"))
    return FsdpTuneError(*map(Problem.from_dict, problems))
