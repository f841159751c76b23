"""The configuration of the recipe's model, with what the recipe changes in it, and its generation config."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from fsdp_tune.core.config_changes import changed_fields
from fsdp_tune.core.errors import FsdpTuneError, Notice, usage_error
from fsdp_tune.core.families import OLD_LOCAL_ROPE, OLD_ROPE, SLIDING, UNDECLARED, family_of
from fsdp_tune.core.hub import hub_is_reachable
from fsdp_tune.core.library_errors import first_line
from fsdp_tune.model.internals.transformers_internals import forget_kernels
from fsdp_tune.model.kernels.expert_kernels import request_experts
from fsdp_tune.model.loading.nf4_files import refuse_other_quantisation, without_quantisation
from fsdp_tune.model.loading.rope_scaling import scale_positions
from fsdp_tune.model.loading.untie import tie_text, untie
from fsdp_tune.recipe.read.catalogue import architecture
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import run_of
from fsdp_tune.run.written_files import model_files


def model_config(recipe: Recipe) -> PreTrainedConfig:
    """Return the model's configuration with `model.config_overrides` and `model.rope_scaling` applied and
    caching off.

    Raises: usage error (exit 2) if the model cannot be found, if the class lacks an overridden field, or if
    it cannot be scaled.
    """
    return _with_overrides(recipe, _base_config(recipe))


def config_changes(recipe: Recipe) -> dict[str, object]:
    """Return the fields of the base's configuration that the recipe changes, as in config.json."""
    before, after = (
        json.loads(config.to_json_string(use_diff=False))
        for config in (_base_config(recipe), model_config(recipe))
    )
    return changed_fields(before, after | {"use_cache": before.get("use_cache")})


def config_or_facts(recipe: Recipe) -> tuple[PreTrainedConfig, bool]:
    """Return `model_config` and False, or a bundled configuration and True if the hub is unreachable. Not for
    training."""
    name = recipe.model.name_or_path
    try:
        return model_config(recipe), False
    except FsdpTuneError:
        facts = architecture(name) if name is not None and recipe.model.from_config is None else None
        if facts is None:
            raise
        return _with_overrides(recipe, _config_from_mapping(facts, str(name))), True


def tie_notices(recipe: Recipe) -> list[Notice]:
    """Return the notice about a model whose files decide that it is not tied."""
    notice = untie(recipe, _base_config(recipe))
    return [notice] if notice is not None else []


def _with_overrides(recipe: Recipe, config: PreTrainedConfig) -> PreTrainedConfig:
    refuse_other_quantisation(recipe, config)
    without_quantisation(config)
    known = set(config.to_dict()) | set(getattr(config, "attribute_map", {}))
    for name, value in recipe.model.config_overrides.items():
        if name not in known:
            raise usage_error(
                "config-override-unknown",
                f"model.config_overrides: `{name}` is not a field of {type(config).__name__}",
                hint=_close(name, known),
            )
        setattr(config, name, value)
    untie(recipe, config)
    tie_text(recipe, config)
    scale_positions(recipe, config)
    forget_kernels(config)
    request_experts(recipe, config)
    config.use_cache = False
    return config


def _close(name: str, known: set[str]) -> str | None:
    import difflib

    matches = difflib.get_close_matches(name, known, n=1)
    return f"did you mean `{matches[0]}`?" if matches else None


def _base_config(recipe: Recipe) -> PreTrainedConfig:
    source = recipe.model.from_config
    if isinstance(source, dict):
        return _config_from_mapping(source, "model.from_config")
    if isinstance(source, str):
        path = Path(source)
        file = path / "config.json" if path.is_dir() else path
        try:
            mapping = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(mapping, dict):
                raise ValueError(f"it holds a {type(mapping).__name__}, not an object")
            return _config_from_mapping(mapping, str(file))
        except (OSError, ValueError) as error:
            raise usage_error(
                "config-unreadable", f"model.from_config: {file} cannot be read as JSON ({error})"
            ) from error
    name = recipe.model.name_or_path
    assert name is not None, "the recipe's rules require name_or_path or from_config"
    run = run_of(Path(name))
    try:
        return AutoConfig.from_pretrained(
            model_files(run) if run else name,
            revision=recipe.model.revision,
            trust_remote_code=recipe.model.trust_remote_code,
            # Without network the library would retry for most of a minute before it uses its cache.
            local_files_only=not (Path(name).exists() or hub_is_reachable()),
        )
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: a dtype that torch does not have
        raise model_not_found(name, error) from error


def _config_from_mapping(mapping: dict[str, object], origin: str) -> PreTrainedConfig:
    fields = dict(mapping)
    model_type = fields.pop("model_type", None)
    fields.pop("architectures", None)
    if model_type is None:
        raise usage_error(
            "config-without-model-type",
            f"{origin} has no `model_type`",
            hint="add for example `model_type: llama`",
        )
    try:
        config = AutoConfig.for_model(str(model_type), **fields)
    except (ValueError, TypeError, KeyError) as error:
        raise usage_error(
            "config-invalid", f"{origin}: transformers rejects this configuration: {error}"
        ) from error
    # written by transformers: fields that the class does not declare are for other readers
    if "transformers_version" in mapping:
        return config
    known = set(type(config)().to_dict()) | set(getattr(config, "attribute_map", {})) | UNDECLARED
    if "rope_parameters" in known:  # the configuration class moves the fields of transformers 4 there
        known |= {*OLD_ROPE, *family_of(model_type).old_rope_names.values()}
        known |= {OLD_LOCAL_ROPE} if SLIDING in (config.rope_parameters or ()) else set()
    unknown = sorted(
        name
        for name in fields
        if name not in known and not name.startswith(("_", "torch_dtype", "transformers"))
    )
    if unknown:
        raise usage_error(
            "config-field-unknown",
            f"{origin}: `{unknown[0]}` is not a field of {type(config).__name__}",
            hint=_close(unknown[0], known),
        )
    return config


def model_not_found(name: str, error: Exception) -> FsdpTuneError:
    return usage_error(
        "model-not-found",
        f"model.name_or_path: `{name}` cannot be loaded: {first_line(error)}",
        ways_out=(
            "give the path of a local Hugging Face model directory",
            "for a gated model, log in with `hf auth login` and accept its terms",
            "without network, download it first on a machine that has one: `hf download "
            + name
            + " --local-dir DIR`",
        ),
    )


def generation_config(recipe: Recipe, config: PreTrainedConfig) -> GenerationConfig:
    """Return the model's own generation config if it has one, else one derived from its config."""
    name = recipe.model.name_or_path
    if name is not None:
        run = run_of(Path(name))
        local_only = not (Path(name).exists() or hub_is_reachable())
        try:
            return GenerationConfig.from_pretrained(
                model_files(run) if run else name, revision=recipe.model.revision, local_files_only=local_only
            )
        except (OSError, ValueError):
            pass  # most research checkpoints have none; the config contains the same token ids
    made = GenerationConfig.from_model_config(config)
    made.use_cache = True  # the given config is for training, which uses no cache of keys and values
    return made
