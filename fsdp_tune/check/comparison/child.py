"""The process that computes sides of a comparison, with this interpreter or with another one (`check/comparison/observe.py`)."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp_tune.check.comparison.stages import Observation, stages_until
from fsdp_tune.core.errors import FsdpTuneError, failed_error, usage_error
from fsdp_tune.core.processes import QUIET_LIBRARIES, JsonChild
from fsdp_tune.core.version import PACKAGE
from fsdp_tune.recipe.schema.recipe import Recipe

OBSERVE = ("-P", "-m", "fsdp_tune.check.comparison.observe")
LENT = (
    *("accelerate", "annotated-types", "isal", "jinja2", "markupsafe", "ml_dtypes", "packaging", "peft", "psutil", "pydantic"),
    *("pydantic_core", "pyyaml", "typing-inspection", "typing_extensions", "xxhash"),
)
"""Packages that another interpreter of the same version of Python gets from this one if it lacks them. It needs its own torch,
transformers and what these need."""


def find_interpreter(python: Path) -> str:
    """Return the interpreter's path. Raises: usage error if it cannot be run."""
    found = shutil.which(str(python))
    if found is None:
        raise usage_error("compare-python", f"`--python {python}` is not an interpreter", hint="give the path of `bin/python` of a venv")
    return str(Path(found).absolute())


def _link(paths: Sequence[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in paths:
        with contextlib.suppress(FileExistsError):
            (folder / path.name).symlink_to(path)


def _files_of(name: str) -> list[Path]:
    """Return the files and folders of an installed package at the top of its environment, metadata included."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return []
    tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
    return [Path(str(found.locate_file(top))) for top in sorted(tops)]


class ObservingChild:
    """The process that computes sides with one interpreter. It starts with the first request."""

    def __init__(self, python: str, folder: Path, *, rows: int, model: str, shows_defaults: bool) -> None:
        """`rows`: of each source. `model`: small or full. `shows_defaults`: the stage `defaults` is computed too."""
        self._python, self._folder = python, folder
        self.settings = {"rows": rows, "model": model, "folder": str(folder), "defaults": shows_defaults}
        self._child: JsonChild | None = None
        self._known: dict[str, tuple[str, Observation]] = {}
        """By recipe: up to which stage it was computed. B with A's values is often A."""

    def __enter__(self) -> ObservingChild:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.close()

    def observe(self, recipe: Recipe, until: str) -> Observation:
        """Compute a resolved recipe up to a stage or beyond. Raises: usage error if the interpreter lacks a package, failed error if it
        crashed."""
        key = recipe.model_copy(update={"name": None, "output_dir": "RUN"}).model_dump_json()
        known = self._known.get(key)
        if known is None or until not in stages_until(known[0]):
            known = self._known[key] = until, self.computed(recipe, until)
        return known[1]

    def computed(self, recipe: Recipe, until: str) -> Observation:
        """Compute a recipe, whether or not it is known. Raises: as `observe`."""
        request = {"recipe": recipe.model_dump(mode="json", by_alias=True), "until": until, **self.settings}
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
                # A folder with this package alone: other packages of this environment must not hide those of the other one.
                alone, folder = self._folder / "package", self._folder / f"lent-{sys.version_info.major}.{sys.version_info.minor}"
                _link([PACKAGE], alone)
                _link([path for name in LENT for path in _files_of(name)], folder)
                environment["PYTHONPATH"], lent = str(alone), [str(folder)]
            self._child = JsonChild((self._python, *OBSERVE, *lent), environment | QUIET_LIBRARIES)
        return self._child

    def _crashed(self, how: str) -> FsdpTuneError:
        if "ImportError" in how or "ModuleNotFoundError" in how:
            own = f"{sys.version_info.major}.{sys.version_info.minor}"
            hint = f"it needs torch and transformers; packages such as pydantic are lent to a Python {own}, and another one needs its own"
            return usage_error("compare-python", f"`{self._python}` cannot run the comparison: {how}", hint=hint)
        return failed_error(
            "compare-failed", f"the comparison ended with {self._python}: {how}", hint="`fsdp-tune env` shows the installation"
        )
