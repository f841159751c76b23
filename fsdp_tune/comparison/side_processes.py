"""The processes that compute the sides of a comparison: one for an interpreter (`comparison/observe.py`), one
for a tool (`comparison/tool_side.py`)."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fsdp_tune.comparison.environments import tool_variables
from fsdp_tune.comparison.stages import Observation, stages_until
from fsdp_tune.comparison.tool_options import NOT_SENT, SETTINGS, TOOLS
from fsdp_tune.core.errors import FsdpTuneError, failed_error, usage_error
from fsdp_tune.core.processes import QUIET_LIBRARIES, JsonChild
from fsdp_tune.core.version import PACKAGE
from fsdp_tune.recipe.schema.recipe import Recipe

OBSERVE = ("-P", "-m", "fsdp_tune.comparison.observe")
TOOL_SIDE = ("-P", "-m", "fsdp_tune.comparison.tool_side")
LENT = (
    *(
        "accelerate",
        "annotated-types",
        "isal",
        "jinja2",
        "markupsafe",
        "ml_dtypes",
        "packaging",
        "peft",
        "psutil",
        "pydantic",
    ),
    *("pydantic_core", "pyyaml", "typing-inspection", "typing_extensions", "xxhash"),
)
"""Packages that another interpreter of the same version of Python gets from this one if it lacks them. It
needs its own torch, transformers and what these need."""


def _link(paths: Sequence[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in paths:
        with contextlib.suppress(FileExistsError):
            (folder / path.name).symlink_to(path)


def _files_of(name: str) -> list[Path]:
    """Return the files and folders of an installed package at the top of its environment, metadata
    included."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return []
    tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
    return [Path(str(found.locate_file(top))) for top in sorted(tops)]


class _ComputedStages:
    """What a process has computed, by key: up to which stage. B with A's values is often A."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, Observation]] = {}

    def get(self, key: str, until: str, compute: Callable[[], Observation]) -> Observation:
        """Return the observation of a key up to a stage or beyond, computed if it is not known that far."""
        known = self._found.get(key)
        if known is None or until not in stages_until(known[0]):
            known = self._found[key] = until, compute()
        return known[1]


class ObservingChild:
    """The process that computes sides with one interpreter. It starts with the first request."""

    def __init__(
        self,
        python: str,
        folder: Path,
        *,
        rows: int,
        model: str,
        shows_defaults: bool = False,
        is_beside_tool: bool = False,
    ) -> None:
        """`rows`: of each source. `model`: small or full. `shows_defaults`: the stage `defaults` is computed
        too. `is_beside_tool`: a tool computes the other side."""
        self._python, self._folder = python, folder
        self.settings = {
            "rows": rows,
            "model": model,
            "folder": str(folder),
            "defaults": shows_defaults,
            "beside_tool": is_beside_tool,
        }
        self._child: JsonChild | None = None
        self._known = _ComputedStages()

    def __enter__(self) -> ObservingChild:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.close()

    def observe(self, recipe: Recipe, until: str) -> Observation:
        """Compute a resolved recipe up to a stage or beyond. Raises: usage error if the interpreter lacks a
        package, failed error if it crashed."""
        key = recipe.model_copy(update={"name": None, "output_dir": "RUN"}).model_dump_json()
        return self._known.get(key, until, lambda: self.computed(recipe, until))

    def computed(self, recipe: Recipe, until: str, inputs: Path | None = None) -> Observation:
        """Compute a recipe, whether or not it is known, and write to the file `inputs` what a tool needs for
        it. Raises: as `observe`."""
        request = {"recipe": recipe.model_dump(mode="json", by_alias=True), "until": until, **self.settings}
        request |= {"inputs": str(inputs)} if inputs is not None else {}
        child = self._started()
        child.send(json.dumps(request))
        found = child.receive()
        if found is None:
            raise self._crashed(child.failure())
        return Observation.from_json(found)

    def _started(self) -> JsonChild:
        if self._child is None:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            lent: list[str] = []
            if self._python != sys.executable:
                # A folder with this package alone: other packages of this environment must not hide those of
                # the other one.
                alone, folder = (
                    self._folder / "package",
                    self._folder / f"lent-{sys.version_info.major}.{sys.version_info.minor}",
                )
                _link([PACKAGE], alone)
                _link([path for name in LENT for path in _files_of(name)], folder)
                environment["PYTHONPATH"], lent = str(alone), [str(folder)]
            self._child = JsonChild((self._python, *OBSERVE, *lent), environment | QUIET_LIBRARIES)
        return self._child

    def _crashed(self, how: str) -> FsdpTuneError:
        if "ImportError" in how or "ModuleNotFoundError" in how:
            own = f"{sys.version_info.major}.{sys.version_info.minor}"
            hint = (
                f"it needs torch and transformers; packages such as pydantic are lent to a Python {own}, "
                "and another one needs its own"
            )
            return usage_error(
                "compare-python", f"`{self._python}` cannot run the comparison: {how}", hint=hint
            )
        return failed_error(
            "compare-failed",
            f"the comparison ended with {self._python}: {how}",
            hint="`fsdp-tune env` shows the installation",
        )


class ToolChild:
    """The process that computes one side with the tool of its configuration. It starts with the first
    request."""

    def __init__(self, python: str, tool: str, inputs: Mapping[str, object]) -> None:
        """`inputs`: rows, model and sizes, the same for all requests."""
        self._python, self._tool, self._inputs = python, tool, {**inputs, "settings": SETTINGS[tool]}
        self._child: JsonChild | None = None
        self._known = _ComputedStages()

    def close(self) -> None:
        if self._child is not None:
            self._child.close()

    def observe(self, values: Mapping[str, object], until: str) -> Observation:
        """Compute the options of a configuration up to a stage or beyond. Raises: failed error if the process
        ended."""
        values = {name: value for name, value in values.items() if name not in NOT_SENT[self._tool]}
        key = json.dumps(values, sort_keys=True, default=str)
        return self._known.get(key, until, lambda: self._computed(values, until))

    def started(self) -> JsonChild:
        if self._child is None:
            # A folder with this package alone: others of this environment must not hide those of the tool's.
            alone = Path(str(self._inputs["rows"])).parent / "package"
            _link([PACKAGE], alone)
            variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(alone), **QUIET_LIBRARIES}
            self._child = JsonChild((self._python, *TOOL_SIDE), tool_variables() | variables)
        return self._child

    def _computed(self, values: Mapping[str, object], until: str) -> Observation:
        child = self.started()
        request = {"tool": self._tool, "values": values, "until": list(stages_until(until)), **self._inputs}
        child.send(json.dumps(request, default=str))
        found = child.receive()
        if found is None:
            message = f"{self._tool} did not compute its side with {self._python}: {child.failure()}"
            other = f"`--with {TOOLS[self._tool]}==VERSION` tries another version"
            hint = f"`compare --tools import` compares the recipe that `import` makes; {other}"
            raise failed_error("compare-failed", message, hint=hint)
        return Observation.from_json(found)
