"""Get traces of recipes from a cache or from a child process, which imports torch, so that the command line
does not.

Plans are cached too: replaying the step of a hundred layers takes longer than reading a stored plan.

The name of a cached trace is a digest of everything that the trace depends on: the recipe's keys that affect
memory or time (`recipe.schema.key_effects`), the model's configuration, this package's sources, and the
installed packages with their versions.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import write_json
from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.core.gpus import Hardware
from fsdp_tune.core.hub import cached_model_file
from fsdp_tune.core.processes import JsonChild
from fsdp_tune.core.version import PACKAGE
from fsdp_tune.planner.predict.predict import Plan
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema.key_effects import Affects
from fsdp_tune.recipe.schema.keys import effect_of, values_by_key
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import weights_in
from fsdp_tune.run.directory import run_of
from fsdp_tune.run.manifest import digest

_OWN = Path(__file__).parent
_UNSEEN = ("name", "output_dir")


def plan_key(recipe: Recipe, hardware: Hardware, calibrations: object, trace: str) -> str:
    """Return a digest of everything that a plan depends on. `trace` is the key of the trace, which includes
    its sources and the installed packages; `calibrations` is what was learned about the GPU model, with the
    driver that is there."""
    data: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True)
    for name in _UNSEEN:
        data.pop(name)
    parts = [json.dumps(data, sort_keys=True), repr(hardware), repr(calibrations), trace, state_of(_OWN)]
    return digest(*parts, size=16)


def state_of(folder: Path) -> str:
    """Return sizes and modification times of the files in a directory of the package, so that a change
    invalidates cached plans."""
    states = [
        (path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".pyc"
    ]
    return "".join(f"{path.name} {state.st_size} {state.st_mtime_ns}\n" for path, state in states)


def kept_plan(cache: Path, key: str, recipe: Recipe) -> Plan | None:
    """Return the cached plan of a key, without its timeline; None if there is none, or if the file is not
    readable as a plan."""
    try:
        found: Any = json.loads((cache / f"{key}.json").read_text(encoding="utf-8"))
        return replace(Plan.from_dict(found), recipe=recipe.name or "recipe")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def keep_plan(cache: Path, key: str, plan: Plan) -> None:
    """Store a plan; `kept_plan` leaves out what depends on the search."""
    cache.mkdir(parents=True, exist_ok=True)
    write_json(cache / f"{key}.json", plan.as_dict())


CONFIG = "config.json"
COMMAND = (sys.executable, "-P", "-m", "fsdp_tune.planner.trace.trace_server")


class Tracing:
    """Traces on demand. The child process is started for the first recipe that is not cached and runs until
    `close`.

    `exact` traces at full depth. `vocabulary` is that of a tokenizer that may grow the embedding. `traced` is
    called after each trace.
    """

    def __init__(
        self,
        cache: Path,
        *,
        exact: bool = False,
        vocabulary: int | None = None,
        offline: bool = False,
        traced: Callable[[], None] = lambda: None,
    ) -> None:
        self.cache, self.exact, self.vocabulary, self.offline, self.traced = (
            cache,
            exact,
            vocabulary,
            offline,
            traced,
        )
        self._found: dict[str, Trace | FsdpTuneError] = {}
        self._requested: list[tuple[str, Recipe]] = []
        """Keys and recipes, indexed by job."""
        self._child: JsonChild | None = None

    def __enter__(self) -> Tracing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Terminate the child process, even during a trace."""
        if self._child is not None:
            self._child.close()
        self._child = None

    def request(self, recipes: Sequence[Recipe]) -> list[str]:
        """Request traces of resolved recipes in the background; return the keys for `result`."""
        keys = [self._key(recipe) for recipe in recipes]
        for key, recipe in zip(keys, recipes, strict=True):
            if key in self._found or any(key == requested for requested, _ in self._requested):
                continue
            cached = _cached(self._file(key))
            if cached is not None:
                self._found[key] = cached
                continue
            self._send(
                {
                    "job": len(self._requested),
                    "recipe": recipe.model_dump(mode="json", by_alias=True),
                    "output": str(self._file(key)),
                }
            )
            self._requested.append((key, recipe))
        return keys

    def result(self, key: str) -> Trace | FsdpTuneError:
        """Wait for a trace, and return it or the error."""
        while key not in self._found:
            self._receive()
        return self._found[key]

    def __call__(self, recipes: Sequence[Recipe]) -> list[Trace | FsdpTuneError]:
        return [self.result(key) for key in self.request(recipes)]

    def _key(self, recipe: Recipe) -> str:
        return trace_key(recipe, exact=self.exact, vocabulary=self.vocabulary)

    def _file(self, key: str) -> Path:
        return self.cache / f"{key}.npz"

    def _send(self, job: dict[str, Any]) -> None:
        if self._child is None:
            self.cache.mkdir(parents=True, exist_ok=True)
            environment = os.environ | {
                "CUDA_VISIBLE_DEVICES": "",
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                "OMP_NUM_THREADS": "1",
            }
            environment |= {"HF_HUB_OFFLINE": "1"} if self.offline else {}
            self._child = JsonChild(COMMAND, environment)
        self._child.send(json.dumps(job | {"exact": self.exact, "vocabulary": self.vocabulary}))

    def _receive(self) -> None:
        """Receive one result. If the child has ended, its last output is the result of all open requests, and
        the next request starts another child."""
        assert self._child is not None
        answer = self._child.receive()
        if answer is None:
            message, hint = (
                f"the step could not be traced: {self._child.failure()}",
                "`fsdp-tune env` shows the installation",
            )
            lost = FsdpTuneError(Problem("trace-failed", message, hint=hint))
            self._found |= {key: lost for key, _ in self._requested if key not in self._found}
            self.close()
            return
        key, recipe = self._requested[int(answer["job"])]
        self._found[key] = _result(self._file(key), answer["problems"])
        if self._key(recipe) != key:  # the model's configuration was downloaded or edited in the meantime
            self._file(key).unlink(missing_ok=True)
        self.traced()


def trace_key(recipe: Recipe, *, exact: bool, vocabulary: int | None) -> str:
    """Return the name of a trace: a digest of everything that it depends on."""
    values = {
        key: value
        for key, value in values_by_key(recipe).items()
        if effect_of(key).affects & (Affects.MEMORY | Affects.TIME)
    }
    parts = [
        json.dumps(values, sort_keys=True),
        str(exact),
        str(vocabulary),
        _configuration(recipe),
        *installed_code(),
    ]
    return digest(*parts, size=16)


def _configuration(recipe: Recipe) -> str:
    """Return a digest of the model's config.json, and of the code next to it that `trust_remote_code` runs.

    A hub model that is not cached is traced from its bundled configuration or from a download during the
    trace; `_receive` caches only a trace of the former.
    """
    if isinstance(recipe.model.from_config, dict):
        return "inline"
    source = str(recipe.model.from_config or recipe.model.name_or_path)
    run = run_of(Path(source)) if recipe.model.from_config is None else None
    path = run.model if run is not None else Path(source)
    if not path.exists():
        cached = cached_model_file(source, recipe.model.revision, CONFIG)
        if cached is None:
            return "not cached"
        path = cached.parent
    files = [path / CONFIG, *sorted(path.glob("*.py"))] if path.is_dir() else [path]
    digests = [digest(file.read_bytes(), size=16) for file in files if file.is_file()]
    # Weights decide whether head and embedding are tied (`model.loading.stored_tensors`).
    states = [file.stat() for file in weights_in(path)] if path.is_dir() else []
    return " ".join([path.name, *digests, *(f"{state.st_size} {state.st_mtime_ns}" for state in states)])


@functools.cache
def installed_code() -> tuple[str, ...]:
    """Return the state of this package's sources, and every installed distribution with its version
    (`torch-2.13.0.dist-info`)."""
    installed = {found.name for folder in sys.path for found in Path(folder).glob("*.dist-info")}
    return (state_of(PACKAGE), sys.version, *sorted(installed))


def _cached(path: Path) -> Trace | None:
    """Return a cached trace, or None if there is none or it is not readable, so that it is traced again."""
    try:
        return Trace.load(path)
    except (OSError, ValueError, KeyError):
        return None


def _result(path: Path, problems: list[dict[str, Any]]) -> Trace | FsdpTuneError:
    if not problems:
        trace = _cached(path)
        if trace is not None:
            return trace
        return FsdpTuneError(Problem("trace-failed", f"{path} was written and cannot be read"))
    return FsdpTuneError(*map(Problem.from_dict, problems))
