"""Inspect a recipe's model on the meta device in a separate process, so that the command line never imports
torch.

    python -m fsdp_tune.model.loading.inspect [ENTRY STARTED_NS] < recipe.json

prints a `ModelInspection` as JSON, and keeps it in the file ENTRY if it can be reused
(`model.kept_inspections`). STARTED_NS is the time before the process was started, in ns since the epoch:
files that are imported before `main` may have changed since then.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where, collected
from fsdp_tune.core.reads import Reads
from fsdp_tune.core.tensors.activation_scales import dropped_notices
from fsdp_tune.core.units import format_bytes
from fsdp_tune.model import kept_inspections
from fsdp_tune.model.model_files import AdapterFacts, KernelChoice, ModelFacts, ModelInspection
from fsdp_tune.recipe.schema.optimizers import pairs_of
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import BaseLayout, BaseRecord
from fsdp_tune.run.written_files import require_unchanged_output

_KINDS_SHOWN = 4

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from fsdp_tune.model.loading.tensor_account import BaseTensors, TensorAccount


def find_facts(recipe: Recipe) -> ModelInspection:
    """Return all facts of the model that do not need its weights. Problems are collected, not raised."""
    from fsdp_tune.model.kernels.fake_quantised import choose_quantised
    from fsdp_tune.model.kernels.install import choose_kernels
    from fsdp_tune.model.kernels.linear_layers import choose_fp8
    from fsdp_tune.model.loading.adapter_files import check_base
    from fsdp_tune.model.loading.check_weight_files import check_weight_files
    from fsdp_tune.model.loading.construct import build_empty
    from fsdp_tune.model.loading.exported_config import local_tensors
    from fsdp_tune.model.loading.model_config import config_or_facts
    from fsdp_tune.model.loading.tensor_account import account_for
    from fsdp_tune.model.optim.adamw_in_blocks import require_optimizer

    problems = check_weight_files(recipe)
    notices: list[Notice] = []
    found: ModelFacts | None = None
    try:
        if (folder := Path(str(recipe.model.name_or_path))).is_dir():
            require_unchanged_output(folder)  # of a merge; other directories have no record
        config, packaged = config_or_facts(recipe)
        model = build_empty(recipe, config)
        base = local_tensors(recipe) if not problems else None
        account = account_for(recipe, config, model, base) if base is not None else None
        found = _facts(recipe, config, model, base, account, packaged=packaged, has_files=not problems)
        problems += account.problems if account is not None else ()
        notices += dropped_notices(
            account.names("dropped") if account is not None else (), Where(key="model.name_or_path")
        )
        if recipe.lora is not None:
            found = found.model_copy(update=_adapter(recipe, model))
            notices += [] if packaged else check_base(recipe, found.config_changes)
            notices += [*_untrained_experts(model), *_untrained_parts(model)]
        notices += [*_kept_notices(recipe, model), *_rounded_notices(model, base, account)]
        more_problems, more_notices = _limits(recipe, model, packaged=packaged, positions=found.max_positions)
        problems, notices = problems + more_problems, notices + more_notices
        with collected(problems):
            found = found.model_copy(update=_wrapping(recipe, model))
        with collected(problems):
            require_optimizer(recipe)
            problems += _optimizer_problems(recipe)
        with collected(problems):
            kernels = (
                choose_fp8(recipe, model)
                | choose_quantised(recipe, model)
                | choose_kernels(recipe, model, str(recipe.launch.device))
            )
            notices += _kernel_notices(recipe, model, kernels, found.layers)
            found = found.model_copy(update={"kernels": kernels})
    except FsdpTuneError as error:
        problems += error.problems
        if found is None and recipe.lora is not None:  # the base may have problems of its own
            problems += [problem for problem in _problems_of_base(recipe) if problem not in problems]
    return ModelInspection(found, tuple(problems), tuple(notices))


def _kernel_notices(
    recipe: Recipe, model: PreTrainedModel, kernels: dict[str, KernelChoice], layers: int
) -> list[Notice]:
    from fsdp_tune.model.adapters.nf4 import nf4_notices
    from fsdp_tune.model.kernels.attention import large_mask_notices
    from fsdp_tune.model.kernels.class_kernels import slow_kernel_notices
    from fsdp_tune.model.kernels.fake_quantised import quantised_notices
    from fsdp_tune.model.kernels.linear_layers import fp8_notices
    from fsdp_tune.model.packed_mixers import packing_notices

    return [
        *nf4_notices(recipe, model),
        *fp8_notices(recipe, model, str(recipe.launch.device)),
        *quantised_notices(recipe, model),
        *slow_kernel_notices(model, kernels),
        *packing_notices(kernels.get("data.packing")),
        *large_mask_notices(recipe, model.config, layers, kernels["model.attn_implementation"]),
    ]


def _problems_of_base(recipe: Recipe) -> list[Problem]:
    """Return the problems that a recipe has whatever its adapters are, which cannot be made."""
    from fsdp_tune.model.kernels.install import choose_kernels
    from fsdp_tune.model.loading.check_weight_files import check_weight_files
    from fsdp_tune.model.loading.construct import build_base
    from fsdp_tune.model.loading.exported_config import local_tensors
    from fsdp_tune.model.loading.model_config import config_or_facts
    from fsdp_tune.model.loading.positions import positions_of_run
    from fsdp_tune.model.loading.tensor_account import account_for
    from fsdp_tune.model.optim.adamw_in_blocks import require_optimizer

    problems: list[Problem] = []
    with collected(problems):
        config, packaged = config_or_facts(recipe)
        model = build_base(recipe, config)
        base = local_tensors(recipe) if not check_weight_files(recipe) else None
        problems += account_for(recipe, config, model, base).problems if base is not None else ()
        problems += _limits(recipe, model, packaged=packaged, positions=positions_of_run(recipe, config))[0]
        with collected(problems):
            _wrapping(recipe, model)
        with collected(problems):
            require_optimizer(recipe)
            problems += _optimizer_problems(recipe)
        with collected(problems):
            choose_kernels(recipe, model, str(recipe.launch.device))
    return problems


def _facts(
    recipe: Recipe,
    config: PreTrainedConfig,
    model: PreTrainedModel,
    base: BaseTensors | None,
    account: TensorAccount | None,
    *,
    packaged: bool,
    has_files: bool,
) -> ModelFacts:
    from fsdp_tune.model.internals.transformers_internals import attention_of
    from fsdp_tune.model.loading import construct
    from fsdp_tune.model.loading.exported_config import (
        base_folder,
        exported_config,
        exported_generation_config,
        is_on_hub,
        is_part_of_other,
        record_of_run,
    )
    from fsdp_tune.model.loading.kept_precision import with_rounded
    from fsdp_tune.model.loading.model_config import config_changes, generation_config
    from fsdp_tune.model.loading.positions import positions_of_run
    from fsdp_tune.model.loading.tensor_account import parameters_of
    from fsdp_tune.model.shard.local import count_elements

    changes: dict[str, object] = {} if packaged else config_changes(recipe)
    folder = base_folder(recipe)
    tensors = account.record() if account is not None else record_of_run(recipe)
    exported = exported_config(recipe, changes, config, model, tensors)
    layout = _layout(recipe, config, model, base, account, tensors, has_files=has_files)
    tensors = with_rounded(tensors, recipe, parameters_of(model), layout, base, account)
    tensors = tensors.of_base(str(recipe.model.name_or_path), recipe.model.revision)
    return ModelFacts(
        packaged=packaged,
        model_type=config.model_type,
        architecture=type(model).__name__,
        config=json.loads(config.to_json_string(use_diff=False)),
        base_folder=str(folder) if folder is not None else None,
        config_changes=changes,
        exported_config=exported,
        generation_config=exported_generation_config(recipe, generation_config(recipe, config)),
        base_layout=layout,
        tensors=tensors,
        has_unread_tensors=base is None and has_files and is_on_hub(recipe) and not packaged,
        keeps_architectures=is_part_of_other(config, model, tensors),
        parameters=count_elements(model.named_parameters()),
        trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        embedding_rows=construct.embedding_rows(model),
        tied_embeddings=construct.is_tied(model),
        is_embedding_trained=construct.is_embedding_trained(model),
        trains_new_tokens=construct.trains_new_tokens(model),
        max_positions=positions_of_run(recipe, config),
        attention=attention_of(model.config),
    )


def _layout(
    recipe: Recipe,
    config: PreTrainedConfig,
    model: PreTrainedModel,
    base: BaseTensors | None,
    account: TensorAccount | None,
    tensors: BaseRecord,
    *,
    has_files: bool,
) -> BaseLayout:
    from fsdp_tune.model.loading.exported_config import is_text_alone
    from fsdp_tune.model.loading.kept_precision import HALVES, kinds_of_base
    from fsdp_tune.model.loading.saved_layout import base_layout, published_names
    from fsdp_tune.model.loading.tensor_account import parameters_of

    layout = BaseLayout()
    if has_files:
        layout = base_layout(recipe, model, base, text_alone=is_text_alone(config, model, tensors))
        layout = layout.with_fp32(_kept_by_class(recipe, config))
        if base is not None and account is not None:
            layout = layout.with_fp32(
                dict.fromkeys(HALVES, kinds_of_base(base, account, parameters_of(model)))
            )
    if recipe.lora is not None:
        layout = replace(layout, published=published_names(config, model, layout))
    return layout


def _kept_by_class(recipe: Recipe, config: PreTrainedConfig) -> dict[str, tuple[str, ...]]:
    import torch

    from fsdp_tune.model.loading.construct import construct
    from fsdp_tune.model.loading.kept_precision import kinds_in_fp32

    with torch.device("meta"):
        return kinds_in_fp32(lambda dtype: construct(recipe, config, dtype))


def _kept_notices(recipe: Recipe, model: PreTrainedModel) -> list[Notice]:
    """Return the notice about parameters that stay in fp32 although the recipe stores the model's parameters
    in bf16."""
    from fsdp_tune.model.shard.local import kept_in_fp32

    kept = kept_in_fp32(model)
    if recipe.model.dtype != "bf16" or not kept:
        return []
    named = [*model.named_parameters(), *model.named_buffers()]
    size_bytes = sum(tensor.numel() * tensor.element_size() for name, tensor in named if name in kept)
    message = (
        f"{type(model).__name__} keeps {len(kept):,} tensors in fp32 ({format_bytes(size_bytes)}), as "
        f"transformers does: {_kinds_of(kept)}"
    )
    return [Notice("kept-in-fp32", message, where=Where(key="model.dtype"))]


def _rounded_notices(
    model: PreTrainedModel, base: BaseTensors | None, account: TensorAccount | None
) -> list[Notice]:
    """Return the notice about trained tensors that the base stores in fp32 among others in 16 bits, and a
    checkpoint of the run in 16 bits.

    A merge reads those that are not trained from the base.
    """
    import torch

    from fsdp_tune.model.loading.kept_precision import fp32_of_base
    from fsdp_tune.model.loading.tensor_account import parameters_of

    if base is None or account is None:
        return []
    state = {name: each for name, each in parameters_of(model).items() if each.requires_grad}
    names = sorted(
        name for name in fp32_of_base(base, account) & state.keys() if state[name].dtype != torch.float32
    )
    if not names:
        return []
    message = (
        f"the run stores and trains {len(names):,} tensors in 16 bits that the base has in fp32, as "
        f"transformers would: {_kinds_of(names)}"
    )
    hint = "`--set model.dtype=fp32` keeps them in fp32"
    return [Notice("fp32-of-base-rounded", message, where=Where(key="model.dtype"), hint=hint)]


def _kinds_of(names: Iterable[str]) -> str:
    """Return the different last two parts of names, sorted, as text: the first few, and how many more."""
    kinds = sorted({".".join(name.split(".")[-2:]) for name in names})
    more = f" and {len(kinds) - _KINDS_SHOWN} more kinds" if len(kinds) > _KINDS_SHOWN else ""
    return ", ".join(kinds[:_KINDS_SHOWN]) + more


def _adapter(recipe: Recipe, model: PreTrainedModel) -> dict[str, object]:
    from fsdp_tune.model.adapters.lora import adapter_config, name_in_base, name_in_file
    from fsdp_tune.model.adapters.nf4 import describe_nf4, layers_in_4_bits

    return {
        "adapter": adapter_facts(model),
        "adapter_config": adapter_config(recipe, model),
        "adapter_tensors": {
            name_in_file(name): tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad
        },
        "nf4_weights": tuple(name_in_base(f"{name}.weight") for name in layers_in_4_bits(model)),
        "quantization": describe_nf4(recipe, model) if recipe.nf4 is not None else None,
    }


def adapter_facts(model: PreTrainedModel) -> AdapterFacts:
    from fsdp_tune.model.adapters.lora import adapters_of, is_of_adapter
    from fsdp_tune.model.shard.local import count_elements

    modules = Counter(name.rpartition(".")[2] for name in adapters_of(model))
    trained = [p for p in model.parameters() if p.requires_grad]
    parameters = sum(p.numel() for p in trained)
    base = count_elements((name, p) for name, p in model.named_parameters() if not is_of_adapter(name))
    trained_bytes = sum(p.numel() * p.element_size() for p in trained)
    return AdapterFacts(dict(sorted(modules.items())), parameters, parameters / base, trained_bytes)


def _optimizer_problems(recipe: Recipe) -> list[Problem]:
    """Try an optimizer with arguments; without any, the rules of the recipe have checked everything, and its
    imports take time."""
    if not pairs_of(recipe.training):
        return []
    from fsdp_tune.model.optim.trial import optimizer_problems

    return optimizer_problems(recipe)


def _untrained_experts(model: PreTrainedModel) -> list[Notice]:
    from fsdp_tune.model.adapters.lora import stacks_without_adapters

    stacks = stacks_without_adapters(model)
    if not stacks:
        return []
    names = ", ".join(dict.fromkeys(".".join(name.split(".")[-3:]) for name in stacks))
    share = sum(stacks.values())
    message = (
        f"{names} of {type(model).__name__} get no adapters: {share:.0%} of the model; "
        "`lora.target_parameters` adapts them"
    )
    return [Notice("lora-experts-frozen", message)]


def _untrained_parts(model: PreTrainedModel) -> list[Notice]:
    from fsdp_tune.model.adapters.targets import parts_without_text

    parts = [
        name
        for name in parts_without_text(model)
        if any(True for _ in model.get_submodule(name).parameters())
    ]
    if not parts:
        return []
    message = f"{', '.join(parts)} of {type(model).__name__} get no adapters: rows of text do not call them"
    return [Notice("lora-text-alone", message)]


def _wrapping(recipe: Recipe, model: PreTrainedModel) -> dict[str, object]:
    from fsdp_tune.model.shard.fsdp_units import decoder_layers, plan_units
    from fsdp_tune.model.shard.local import count_elements

    layers = decoder_layers(model, recipe.layer_classes)
    units = plan_units(recipe, model) if recipe.is_sharded else None
    return {
        "layer_classes": tuple(sorted({type(layer).__name__ for _, layer in layers})),
        "layers": len(layers),
        "layer_parameters": count_elements(layers[0][1].named_parameters()) if layers else 0,
        "units": tuple(tuple(group) for group in units.groups) if units else (),
    }


def _limits(
    recipe: Recipe, model: PreTrainedModel, *, packaged: bool, positions: int | None
) -> tuple[list[Problem], list[Notice]]:
    from fsdp_tune.model.loading.model_config import tie_notices
    from fsdp_tune.model.loading.packing import packing_problem
    from fsdp_tune.model.loading.positions import beyond_table_of_positions
    from fsdp_tune.model.loading.rotary import fixed_rotary

    problems: list[Problem] = []
    notices: list[Notice] = [] if packaged else tie_notices(recipe)
    longest = recipe.data.max_length
    if positions is not None and longest > positions:
        if (problem := beyond_table_of_positions(recipe, model)) is not None:
            problems.append(problem)
        elif (
            recipe.model.rope_scaling is None
        ):  # rotary positions can be computed for any length, so nothing would fail
            message = (
                f"data.max_length is {longest}, and the model's configuration has {positions} positions: "
                "it was not trained beyond them"
            )
            factor = math.ceil(longest / positions)
            hint = (
                f"lower data.max_length, or stretch rotary positions: `model: {{rope_scaling: "
                f"{{rope_type: yarn, factor: {factor}.0}}}}`"
            )
            notices.append(Notice("positions-never-trained", message, hint=hint))
    for kind, original in fixed_rotary(model).items():
        if longest > original:
            message = (
                f"`rope_type: {kind}`: every row uses the rotary frequencies for data.max_length ({longest} "
                f"tokens); transformers uses others for batches of up to {original} tokens"
            )
            notices.append(
                Notice(
                    "rotary-frequencies-fixed",
                    message,
                    hint=f"`--set data.max_length={original}` trains with the frequencies of short batches",
                )
            )
    if (problem := packing_problem(recipe, model)) is not None:
        problems.append(problem)
    return problems, notices


def main() -> None:
    """Print the facts of the recipe on stdin, and keep them in ENTRY; STARTED_NS as for `Reads`."""
    entry, started_ns = [*sys.argv[1:3], None, None][:2]
    recipe = Recipe.model_validate_json(sys.stdin.buffer.read())
    # libraries print; stdout must contain one document only
    with (
        Reads(None if started_ns is None else int(started_ns)) as reads,
        contextlib.redirect_stdout(sys.stderr),
    ):
        found = find_facts(recipe)
    sys.stdout.write(found.to_json())
    if entry is not None:
        kept_inspections.keep(Path(entry), recipe, found, reads)


if __name__ == "__main__":
    gc.disable()  # collections would take a tenth of the time, and the process is short
    main()
    sys.stdout.flush()
    os._exit(0)  # without the end of all modules, which takes a second
