"""What a tracker needs is what the callback of the installed transformers checks."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from fsdp_tune.core import package_versions
from fsdp_tune.recipe.rules.trackers import TRACKERS, missing
from fsdp_tune.recipe.schema.recipe import Training

AVAILABLE = {
    "azure_ml": "is_azureml_available",
    "clearml": "is_clearml_available",
    "codecarbon": "is_codecarbon_available",
    "dagshub": "is_dagshub_available",
    "dvclive": "is_dvclive_available",
    "flyte": "is_flytekit_available",
    "kubeflow": "is_kubeflow_available",
    "mlflow": "is_mlflow_available",
    "swanlab": "is_swanlab_available",
    "tensorboard": "is_tensorboard_available",
    "trackio": "is_trackio_available",
    "wandb": "is_wandb_available",
}
"""Functions of transformers.integrations.integration_utils. Those of comet_ml and neptune are computed when
it is imported."""
ALL = frozenset(
    {module for each in TRACKERS.values() for names in each.modules for module in names.split("|")}
    | {"azureml", "azureml.core"}
)


def install(
    monkeypatch: pytest.MonkeyPatch,
    modules: frozenset[str],
    variables: dict[str, str],
    folders: frozenset[str],
) -> None:
    """Let `find_spec` see exactly these modules; `folders` are directories without code."""

    def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
        parent = name.rpartition(".")[0]
        if parent and parent not in modules:
            raise ModuleNotFoundError(parent)
        if name not in modules | folders:
            return None
        return importlib.machinery.ModuleSpec(name, None, origin=f"/{name}.py" if name in modules else None)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    wandb = ModuleType("wandb")
    if "wandb" in modules:
        wandb.run = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for name in {
        variable for each in TRACKERS.values() for variable in (*each.variables, each.disabled_by) if variable
    } - variables.keys():
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("modules", "variables", "folders"),
    [
        (frozenset[str](), {}, frozenset[str]()),
        (
            ALL,
            {"KUBEFLOW_TRAINER_SERVER_URL": "https://x", "MLFLOW_TRACKING_URI": "https://x/y/z"},
            frozenset[str](),
        ),
        (ALL - {"tensorboard"}, {}, frozenset[str]()),
        (ALL - {"tensorboard", "tensorboardX"}, {}, frozenset[str]()),
        (ALL - {"mlflow"}, {"MLFLOW_TRACKING_URI": "https://x/y/z"}, frozenset[str]()),
        (ALL - {"azureml.core.run"}, {}, frozenset[str]()),
        (ALL - {"azureml", "azureml.core", "azureml.core.run"}, {}, frozenset[str]()),
        (ALL, {"DISABLE_MLFLOW_INTEGRATION": "true"}, frozenset[str]()),
        (
            ALL,
            {"DISABLE_KUBEFLOW_INTEGRATION": "TRUE", "KUBEFLOW_TRAINER_SERVER_URL": "https://x"},
            frozenset[str](),
        ),
        (frozenset[str](), {}, frozenset({"wandb"})),
    ],
)
def test_trackers_are_available_as_their_callbacks_say(
    monkeypatch: pytest.MonkeyPatch,
    modules: frozenset[str],
    variables: dict[str, str],
    folders: frozenset[str],
) -> None:
    from transformers.integrations import integration_utils

    environment = dict(variables)
    install(monkeypatch, modules, variables, folders)
    for name, function in AVAILABLE.items():
        expected = getattr(integration_utils, function)()
        # DagsHub's callback extends that of mlflow and splits the URI, which its own function does not check.
        if name == "dagshub":
            expected = (
                expected and integration_utils.is_mlflow_available() and "MLFLOW_TRACKING_URI" in variables
            )
        assert (missing(name, environment) is None) == expected, name


@pytest.mark.parametrize(
    ("version", "is_usable"), [("3.43.1", False), ("3.43.2", True), ("3.100.0", True), (None, False)]
)
def test_comet_needs_the_version_of_its_callback(
    monkeypatch: pytest.MonkeyPatch, version: str | None, is_usable: bool
) -> None:
    install(monkeypatch, ALL, {}, frozenset())
    monkeypatch.setattr(package_versions, "_installed_version", lambda package: version)
    found = missing("comet_ml", {})
    assert (found is None) == is_usable
    assert found is None or "comet-ml>=3.43.2" in found.hint


@pytest.mark.parametrize("name", [name for name, tracker in TRACKERS.items() if tracker.packages])
def test_shell_passes_the_hint_of_a_missing_tracker_to_pip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """An unquoted `>=3.43.2` would be a redirection to a file, and unquoted brackets are a pattern."""
    install(monkeypatch, frozenset[str](), {}, frozenset())
    found = missing(name, {})
    assert found is not None
    line = found.hint.strip("`")
    (tmp_path / "fsdp-tunet").touch()  # which the pattern `fsdp-tune[tensorboard]` matches
    script = f"pip() {{ printf '%s\\n' \"$@\"; }}\n{line}"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["install", *TRACKERS[name].packages]


def test_extra_of_tensorboard_is_declared_and_not_a_dependency(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(
        r"fsdp-tune\[(\w+)\]",
        " ".join(package for tracker in TRACKERS.values() for package in tracker.packages),
    )
    assert extras == ["tensorboard"]
    names = {Requirement(each).name for extra in extras for each in project["optional-dependencies"][extra]}
    assert names == {"tensorboard"}
    assert names.isdisjoint(Requirement(each).name for each in project["dependencies"])
    assert Training().report_to == [], "a new installation has no tracker"


def test_every_tracker_of_transformers_is_compared() -> None:
    assert AVAILABLE.keys() | {"comet_ml", "neptune"} == TRACKERS.keys()
