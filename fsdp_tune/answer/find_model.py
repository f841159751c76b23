"""The model that a user names: a directory of Hugging Face, a run, an adapter with its base, or a hub id."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.files import expanded
from fsdp_tune.core.hub import MODEL_FILES, HubResource, snapshot
from fsdp_tune.core.tensors.peft_config import CONFIG_FILE
from fsdp_tune.recipe.references import can_only_be_a_path
from fsdp_tune.run.base_model import BASE_FILE, BaseModel, open_base
from fsdp_tune.run.directory import RunDir, checkpoint_step, run_of
from fsdp_tune.run.written_files import require_unchanged_output

OF_A_RUN = ("merged", "merged-quantised", "adapter")
PROMPT_TYPES = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE")
"""Types of PEFT whose values PEFT's wrapper adds to the input (`PeftConfig.is_prompt_learning`)."""


@dataclass(frozen=True, slots=True)
class ModelToEvaluate:
    name: str
    """As the user named it."""
    weights: str
    """Directory or hub id of a complete model."""
    adapter: str | None = None
    """Directory of a PEFT adapter on `weights`."""
    revision: str = "main"
    """Of `weights` on the hub: the one that the adapter was trained on."""

    @property
    def trained_base(self) -> BaseModel | None:
        """What the adapter's base.json records; None for models and for adapters of other tools."""
        return BaseModel.read(Path(self.adapter) / BASE_FILE) if self.adapter is not None else None

    @property
    def tokenizer(self) -> str:
        """Directory or hub id with the tokenizer: the adapter's own, if it has one."""
        has_own = self.adapter is not None and (Path(self.adapter) / "tokenizer_config.json").is_file()
        return self.adapter if self.adapter is not None and has_own else self.weights


def find_model(name: str) -> ModelToEvaluate:
    """Return the model that is named: a directory of Hugging Face, RUN (its merged model), RUN/adapter, or
    else a hub id.

    Raises: usage error for a directory without a model, and for a run that is not merged.
    """
    path = expanded(name)
    if path.is_dir():
        require_unchanged_output(path / "merged" if run_of(path) is not None else path)
    if not path.is_dir():
        if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise usage_error(
                "model-not-found",
                f"there is no model directory `{name}`",
                hint="give a model directory, a run or a hub id",
            )
        return _of_hub(name)
    if (path / CONFIG_FILE).is_file() and run_of(path) is None:
        return _adapter(name, path)
    if run_of(path) is None:
        if not (path / "config.json").is_file():
            raise usage_error(
                "model-not-found",
                f"`{name}` has no config.json",
                hint="give a directory that transformers can load, or a run",
            )
        return ModelToEvaluate(name, str(path))
    if checkpoint_step(path) is None and (path / "merged" / "config.json").is_file():
        return ModelToEvaluate(name, str(path / "merged"))
    options = "" if checkpoint_step(path) is None else f" --step {checkpoint_step(path)}"
    run = path if checkpoint_step(path) is None else path.parent
    hint = f"`fsdp-tune merge-checkpoint {run}{options}` writes one"
    raise usage_error("run-not-merged", f"`{name}` holds sharded checkpoints, and no merged model", hint=hint)


def _of_hub(name: str) -> ModelToEvaluate:
    """Return a repository's model, or its adapter: loaded by name, transformers would leave out what
    base.json records."""
    repository = HubResource("model", name, "MODEL", "model-not-found")
    if not (snapshot(repository, (CONFIG_FILE, BASE_FILE)) / CONFIG_FILE).is_file():
        return ModelToEvaluate(name, name)
    return _adapter(name, snapshot(repository, (*MODEL_FILES, "*.bin")))


def _adapter(name: str, folder: Path) -> ModelToEvaluate:
    """Return an adapter with its base. Raises: usage error if it is not one of layers, or if its base is
    unknown or has changed."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        message = f"`{name}`: its {CONFIG_FILE} cannot be read: {error}"
        raise usage_error("model-not-found", message, hint="give the directory that PEFT wrote") from error
    if config.get("peft_type") in PROMPT_TYPES:
        message = f"it trains a prompt ({config['peft_type']}), which is not part of the model's layers"
        raise usage_error(
            "model-not-found",
            f"`{name}` cannot be evaluated: {message}",
            hint="give an adapter of layers, such as LoRA",
        )
    base = open_base(config, folder / BASE_FILE)
    if base.name is None:
        message = f"{CONFIG_FILE} does not name the base model"
        raise usage_error(
            "model-not-found",
            f"`{name}`: {message}",
            hint="set `base_model_name_or_path` in it to a directory or hub id",
        )
    if Path(base.name).is_dir():
        require_unchanged_output(Path(base.name))
    correct = f"correct `base_model_name_or_path` in {folder / CONFIG_FILE}"
    if can_only_be_a_path(base.name) and not Path(base.name).is_dir():
        raise usage_error(
            "model-not-found", f"`{name}`: there is no directory `{base.name}`, its base", hint=correct
        )
    if Path(base.name).is_dir() and base.has_other_weights(Path(base.name)):
        message = f"`{name}`: the weights of {base.name} are not those that the adapter was trained on"
        raise usage_error(
            "base-changed", message, ways_out=("restore the weights that it was trained on", correct)
        )
    return ModelToEvaluate(name, base.name, str(folder), base.revision or "main")


def run_of_model(model: ModelToEvaluate) -> RunDir | None:
    """Return the run that wrote a model: RUN, RUN/merged, RUN/merged-quantised or RUN/adapter; None for any
    other."""
    path = Path(model.adapter or model.weights)
    return run_of(path.parent) if path.name in OF_A_RUN else None
