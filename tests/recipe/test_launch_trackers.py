"""What a tracker needs is what the callback of the installed transformers checks."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from types import ModuleType

import pytest

from fsdp_tune.core import devices
from fsdp_tune.recipe.rules.trackers import TRACKERS, missing

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
"""Functions of transformers.integrations.integration_utils. Those of comet_ml and neptune are computed when it is imported."""
ALL = frozenset(
    {module for each in TRACKERS.values() for names in each.modules for module in names.split("|")} | {"azureml", "azureml.core"}
)


def install(monkeypatch: pytest.MonkeyPatch, modules: frozenset[str], variables: dict[str, str], folders: frozenset[str]) -> None:
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
    for name in {variable for each in TRACKERS.values() for variable in (*each.variables, each.disabled_by) if variable} - variables.keys():
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("modules", "variables", "folders"),
    [
        (frozenset[str](), {}, frozenset[str]()),
        (ALL, {"KUBEFLOW_TRAINER_SERVER_URL": "https://x", "MLFLOW_TRACKING_URI": "https://x/y/z"}, frozenset[str]()),
        (ALL - {"tensorboard"}, {}, frozenset[str]()),
        (ALL - {"tensorboard", "tensorboardX"}, {}, frozenset[str]()),
        (ALL - {"mlflow"}, {"MLFLOW_TRACKING_URI": "https://x/y/z"}, frozenset[str]()),
        (ALL - {"azureml.core.run"}, {}, frozenset[str]()),
        (ALL - {"azureml", "azureml.core", "azureml.core.run"}, {}, frozenset[str]()),
        (ALL, {"DISABLE_MLFLOW_INTEGRATION": "true"}, frozenset[str]()),
        (ALL, {"DISABLE_KUBEFLOW_INTEGRATION": "TRUE", "KUBEFLOW_TRAINER_SERVER_URL": "https://x"}, frozenset[str]()),
        (frozenset[str](), {}, frozenset({"wandb"})),
    ],
)
def test_trackers_are_available_as_their_callbacks_say(
    monkeypatch: pytest.MonkeyPatch, modules: frozenset[str], variables: dict[str, str], folders: frozenset[str]
) -> None:
    from transformers.integrations import integration_utils

    environment = dict(variables)
    install(monkeypatch, modules, variables, folders)
    for name, function in AVAILABLE.items():
        expected = getattr(integration_utils, function)()
        # DagsHub's callback extends that of mlflow and splits the URI, which its own function does not check.
        if name == "dagshub":
            expected = expected and integration_utils.is_mlflow_available() and "MLFLOW_TRACKING_URI" in variables
        assert (missing(name, environment) is None) == expected, name


@pytest.mark.parametrize(("version", "is_usable"), [("3.43.1", False), ("3.43.2", True), ("3.100.0", True), (None, False)])
def test_comet_needs_the_version_of_its_callback(monkeypatch: pytest.MonkeyPatch, version: str | None, is_usable: bool) -> None:
    install(monkeypatch, ALL, {}, frozenset())
    monkeypatch.setattr(devices, "_installed_version", lambda package: version)
    found = missing("comet_ml", {})
    assert (found is None) == is_usable
    assert found is None or "comet-ml>=3.43.2" in found.hint


def test_every_tracker_of_transformers_is_compared() -> None:
    assert AVAILABLE.keys() | {"comet_ml", "neptune"} == TRACKERS.keys()
