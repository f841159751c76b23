"""What each tracker of `training.report_to` needs, as the callback of transformers checks it
(integrations/integration_utils.py)."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_tune.core.package_versions import installed_versions


@dataclass(frozen=True, slots=True)
class Tracker:
    """Modules that are imported (`a|b`: either), what to install for them, and variables that must be set."""

    modules: tuple[str, ...]
    packages: tuple[str, ...] = ()
    """Requirements, as pip takes them."""
    variables: tuple[str, ...] = ()
    disabled_by: str = ""
    """A variable that switches the callback off when it is `TRUE`."""


TRACKERS = {
    "azure_ml": Tracker(("azureml.core.run",), ("azureml-sdk",)),
    "clearml": Tracker(("clearml",), ("clearml",)),
    "codecarbon": Tracker(("codecarbon",), ("codecarbon",)),
    "comet_ml": Tracker(("comet_ml",), ("comet-ml>=3.43.2",)),
    # Its callback extends that of mlflow, and takes owner and repository from the tracking URI.
    "dagshub": Tracker(
        ("dagshub", "mlflow"), ("dagshub", "mlflow"), ("MLFLOW_TRACKING_URI",), "DISABLE_MLFLOW_INTEGRATION"
    ),
    "dvclive": Tracker(("dvclive",), ("dvclive",)),
    "flyte": Tracker(("flytekit",), ("flytekit",)),
    # Talks HTTP to the server that the variable names; a TrainJob sets it.
    "kubeflow": Tracker((), (), ("KUBEFLOW_TRAINER_SERVER_URL",), "DISABLE_KUBEFLOW_INTEGRATION"),
    "mlflow": Tracker(("mlflow",), ("mlflow",), (), "DISABLE_MLFLOW_INTEGRATION"),
    "neptune": Tracker(("neptune",), ("neptune",)),
    "swanlab": Tracker(("swanlab",), ("swanlab",)),
    "tensorboard": Tracker(("tensorboard|tensorboardX",), ("fsdp-tune[tensorboard]",)),
    "trackio": Tracker(("trackio",), ("trackio",)),
    "wandb": Tracker(("wandb",), ("wandb",)),
}
"""The names of transformers' INTEGRATION_TO_CALLBACK."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Why a tracker cannot be used, and what to type."""

    reason: str
    hint: str
    is_set_elsewhere: bool = False
    """Whether the machine that trains may have it: a variable."""


def missing(name: str, environment: Mapping[str, str]) -> Missing | None:
    """Return why the callback of a tracker would not start with the variables of the ranks, or None."""
    tracker = TRACKERS[name]
    if environment.get(tracker.disabled_by, "FALSE").upper() == "TRUE":
        return Missing(
            f"`{tracker.disabled_by}={environment[tracker.disabled_by]}` switches it off",
            f"`unset {tracker.disabled_by}`",
            True,
        )
    # quoted: the shell takes `>` and brackets for its own
    install = f"`pip install {shlex.join(tracker.packages)}`"
    for module in tracker.modules:
        if not any(_is_installed(alternative) for alternative in module.split("|")):
            return Missing(f"the package `{module.split('|')[0]}` is not installed", install)
    for package, _, least in (requirement.partition(">=") for requirement in tracker.packages):
        if least and not _is_recent(package, least):
            return Missing(f"the package `{package}` is older than {least}", install)
    for variable in tracker.variables:
        if variable not in environment:
            return Missing(
                f"the variable `{variable}` is not set", f"`export {variable}=…` where the run starts", True
            )
    return None


def _is_installed(module: str) -> bool:
    """Return whether a module can be imported. A folder without code is none: W&B writes its runs into
    `wandb/`."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a parent of the module is missing
        return False
    return spec is not None and spec.origin is not None


def _is_recent(package: str, least: str) -> bool:
    found = installed_versions([package])[package]
    return found is not None and _numbers(found) >= _numbers(least)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
