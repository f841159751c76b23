"""fsdp-tune: fine-tune causal language models with PyTorch FSDP, and verify that the live run matches the recipe."""

from __future__ import annotations

from fsdp_tune.core import import_path as _import_path

if _import_path.runs_this_package():  # before anything else is imported
    _import_path.leave_out_working_directory()

from importlib import import_module
from typing import TYPE_CHECKING

from fsdp_tune.core.version import __version__ as __version__

if TYPE_CHECKING:
    from fsdp_tune.core.errors import FsdpTuneError
    from fsdp_tune.jobs.compare import compare
    from fsdp_tune.jobs.evaluate import evaluate
    from fsdp_tune.jobs.generate import generate
    from fsdp_tune.jobs.import_recipe import import_recipe
    from fsdp_tune.jobs.measure import measure
    from fsdp_tune.jobs.observer import Observer
    from fsdp_tune.jobs.options import Allowed, CompareOptions, EvaluateOptions, GenerateOptions, TrainOptions
    from fsdp_tune.jobs.plan import plan
    from fsdp_tune.jobs.results import merge_checkpoint, push, report
    from fsdp_tune.jobs.train import train
    from fsdp_tune.jobs.validate import prepare, rehearse, validate
    from fsdp_tune.merge.merge_options import MergeOptions
    from fsdp_tune.recipe.read.loader import load_recipe

__all__ = [
    "Allowed",
    "CompareOptions",
    "EvaluateOptions",
    "FsdpTuneError",
    "GenerateOptions",
    "MergeOptions",
    "Observer",
    "TrainOptions",
    "compare",
    "evaluate",
    "generate",
    "import_recipe",
    "load_recipe",
    "measure",
    "merge_checkpoint",
    "plan",
    "prepare",
    "push",
    "rehearse",
    "report",
    "train",
    "validate",
]

_MODULES = {
    "Allowed": "jobs.options",
    "CompareOptions": "jobs.options",
    "EvaluateOptions": "jobs.options",
    "FsdpTuneError": "core.errors",
    "GenerateOptions": "jobs.options",
    "MergeOptions": "merge.merge_options",
    "Observer": "jobs.observer",
    "TrainOptions": "jobs.options",
    "compare": "jobs.compare",
    "evaluate": "jobs.evaluate",
    "generate": "jobs.generate",
    "import_recipe": "jobs.import_recipe",
    "load_recipe": "recipe.read.loader",
    "measure": "jobs.measure",
    "merge_checkpoint": "jobs.results",
    "plan": "jobs.plan",
    "prepare": "jobs.validate",
    "push": "jobs.results",
    "rehearse": "jobs.validate",
    "report": "jobs.results",
    "train": "jobs.train",
    "validate": "jobs.validate",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `import fsdp_tune` itself loads only the version."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fsdp_tune' has no attribute {name!r}")
    value = getattr(import_module(f"fsdp_tune.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
