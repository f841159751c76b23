"""Inspect a recipe's model on the meta device in a separate process, so that the command line never imports torch.

    python -m fsdp_tune.model.loading.inspect < recipe.json

prints one JSON document: parameters, layer classes, units, embedding rows, kernels, and every problem.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import sys
from typing import Any

from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where
from fsdp_tune.recipe.schema.recipe import Recipe


def facts(recipe: Recipe, *, vocabulary: int | None = None) -> dict[str, Any]:
    """Return all facts of the model that do not need its weights. Problems are collected, not raised."""
    from fsdp_tune.model.adapters.lora import adapter_config, adapter_facts, name_in_base
    from fsdp_tune.model.adapters.nf4 import count_elements
    from fsdp_tune.model.adapters.nf4_linear import describe_nf4, layers_in_4_bits, nf4_notices
    from fsdp_tune.model.internals.transformers_internals import attention_of
    from fsdp_tune.model.kernels.attention import large_mask_notices
    from fsdp_tune.model.kernels.float8 import choose_fp8, fp8_notices
    from fsdp_tune.model.kernels.install import choose_kernels
    from fsdp_tune.model.loading.adapter_files import check_base
    from fsdp_tune.model.loading.construct import build_empty, config_or_facts
    from fsdp_tune.model.loading.positions import positions_of_run
    from fsdp_tune.model.loading.saved_layout import base_layout
    from fsdp_tune.model.loading.stored_tensors import check_weight_files
    from fsdp_tune.model.optim.adamw import require_optimizer

    problems = check_weight_files(recipe)
    notices: list[Notice] = []
    found: dict[str, Any] = {}
    try:
        config, packaged = config_or_facts(recipe)
        model = build_empty(recipe, config, vocabulary=vocabulary)
        found |= {
            "packaged": packaged,
            "model_type": config.model_type,
            "architecture": type(model).__name__,
            "config": json.loads(config.to_json_string(use_diff=False)),
            **_exported(recipe, config, packaged=packaged),
            "base_layout": base_layout(recipe, model).as_dict() if not problems else {},
            "parameters": count_elements(model.named_parameters()),
            "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            **_embeddings(model),
            "max_positions": positions_of_run(recipe, config),
            "attention": attention_of(model.config),
        }
        if recipe.lora is not None:
            found |= {"adapter": adapter_facts(model), "adapter_config": adapter_config(recipe, model)}
            notices += [] if packaged else check_base(recipe, found["config_changes"])
            found["nf4_weights"] = [name_in_base(f"{name}.weight") for name in layers_in_4_bits(model)]
            found["quantization"] = describe_nf4(recipe, model) if recipe.quantization is not None else None
            notices += _untrained_experts(model)
        more_problems, more_notices = _limits(recipe, model, found)
        problems, notices = problems + more_problems, notices + more_notices
        found |= _wrapping(recipe, model)
        require_optimizer(recipe)
        device = str(recipe.launch.device)
        chosen = choose_fp8(recipe, model) | choose_kernels(recipe, model, device)
        notices += [*nf4_notices(recipe, model), *fp8_notices(recipe, model, device)]
        notices += large_mask_notices(recipe, model.config, found["layers"], chosen["model.attn_implementation"])
        found["kernels"] = {key: {"value": choice.value, "reason": choice.reason} for key, choice in chosen.items()}
    except FsdpTuneError as error:
        problems += error.problems
    return {**found, "problems": [p.as_dict() for p in problems], "notices": [n.as_dict() for n in notices]}


def _embeddings(model: Any) -> dict[str, Any]:
    from fsdp_tune.model.loading.construct import embedding_rows, is_embedding_trained, is_tied, trains_new_tokens

    return {
        "embedding_rows": embedding_rows(model),
        "tied_embeddings": is_tied(model),
        "is_embedding_trained": is_embedding_trained(model),
        "trains_new_tokens": trains_new_tokens(model),
    }


def _exported(recipe: Recipe, config: Any, *, packaged: bool) -> dict[str, Any]:
    from fsdp_tune.model.loading.construct import config_changes, generation_config
    from fsdp_tune.model.loading.saved_layout import base_folder, exported_config, exported_generation_config

    changes: dict[str, Any] = {} if packaged else config_changes(recipe)
    folder = base_folder(recipe)
    return {
        "base_folder": str(folder) if folder is not None else None,
        "config_changes": changes,
        "exported_config": exported_config(recipe, changes, config),
        "generation_config": exported_generation_config(recipe, generation_config(recipe, config)),
    }


def _untrained_experts(model: Any) -> list[Notice]:
    from fsdp_tune.model.adapters.lora import stacks_without_adapters

    stacks = stacks_without_adapters(model)
    if not stacks:
        return []
    names = ", ".join(dict.fromkeys(".".join(name.split(".")[-3:]) for name in stacks))
    share = sum(stacks.values())
    message = f"{names} of {type(model).__name__} get no adapters: {share:.0%} of the model; `lora.target_parameters` adapts them"
    return [Notice("lora-experts-frozen", message)]


def _wrapping(recipe: Recipe, model: Any) -> dict[str, Any]:
    from fsdp_tune.model.adapters.nf4 import count_elements
    from fsdp_tune.model.shard.fsdp_units import decoder_layers, plan_units

    layers = decoder_layers(model, recipe.layer_classes)
    units = plan_units(recipe, model) if recipe.is_sharded else None
    return {
        "layer_classes": sorted({type(layer).__name__ for _, layer in layers}),
        "layers": len(layers),
        "layer_parameters": count_elements(layers[0][1].named_parameters()) if layers else 0,
        "units": [list(group) for group in units.groups] if units else [],
    }


def _limits(recipe: Recipe, model: Any, found: dict[str, Any]) -> tuple[list[Problem], list[Notice]]:
    from fsdp_tune.model.loading.construct import tie_notices
    from fsdp_tune.model.loading.positions import beyond_table_of_positions, fixed_rotary

    problems: list[Problem] = []
    notices: list[Notice] = [] if found["packaged"] else tie_notices(recipe)
    positions, longest = found["max_positions"], recipe.data.max_length
    if positions is not None and longest > positions:
        if (problem := beyond_table_of_positions(recipe, model)) is not None:
            problems.append(problem)
        elif recipe.model.rope_scaling is None:  # rotary positions can be computed for any length, so nothing would fail
            message = (
                f"data.max_length is {longest}, and the model's configuration has {positions} positions: it was not trained beyond them"
            )
            factor = math.ceil(longest / positions)
            hint = f"lower data.max_length, or stretch rotary positions: `model: {{rope_scaling: {{rope_type: yarn, factor: {factor}.0}}}}`"
            notices.append(Notice("positions-never-trained", message, hint=hint))
    for kind, original in fixed_rotary(model).items():
        if longest > original:
            message = (
                f"`rope_type: {kind}`: every row uses the rotary frequencies for data.max_length ({longest} tokens); "
                f"transformers uses others for batches of up to {original} tokens"
            )
            notices.append(
                Notice(
                    "rotary-frequencies-fixed",
                    message,
                    hint=f"`--set data.max_length={original}` trains with the frequencies of short batches",
                )
            )
    if recipe.data.packing and "position_ids" not in inspect.signature(model.forward).parameters:
        problems.append(
            Problem(
                "packing-not-isolated",
                f"{type(model).__name__} takes no position ids, so packed examples would attend to each other",
                Where(key="data.packing"),
                hint="--set data.packing=false",
            )
        )
    return problems, notices


def main() -> None:
    recipe = Recipe.model_validate_json(sys.stdin.buffer.read())
    with contextlib.redirect_stdout(sys.stderr):  # libraries print; stdout must contain one document only
        document = facts(recipe)
    json.dump(document, sys.stdout)


if __name__ == "__main__":
    main()
