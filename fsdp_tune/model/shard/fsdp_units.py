"""Choose the modules that become FSDP units, by name, on the bare model before wrapping."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.model.internals.transformers_internals import LAYER_CLASSES
from fsdp_tune.model.shard.expert_parallel import divided_experts, refused_experts
from fsdp_tune.model.shard.local import kept_in_fp32
from fsdp_tune.recipe.schema.recipe import Recipe

_ROOT = -1
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """The FSDP units. `groups` are in the order of wrapping (children first); the modules of a group share
    one all-gather.

    The root unit, with all parameters outside of the groups, is implied. `keeps_gathered` names the groups
    whose parameters are needed first in the backward.
    """

    groups: tuple[tuple[str, ...], ...]
    keeps_gathered: frozenset[tuple[str, ...]]
    in_fp32: frozenset[tuple[str, ...]] = frozenset()
    """The groups whose parameters are all kept in fp32 by the model's class: they are gathered as they are
    stored."""
    holder: str | None = None
    """The module whose unit has the kept parameters of all other groups, or None if there are none. It is
    wrapped before the groups."""
    held: frozenset[str] = frozenset()
    """The names of the parameters in the holder's unit."""

    divided: frozenset[str] = frozenset()
    """The modules of stacked experts that the ranks divide, each a unit."""

    @property
    def of_precision(self) -> frozenset[tuple[str, ...]]:
        """The units, by their modules, that are gathered as they are stored."""
        return self.in_fp32 | ({(self.holder,)} if self.holder is not None else frozenset())


def decoder_layer_classes(model: PreTrainedModel, wanted: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the class names of the repeated decoder layers: `wanted`, checked against the model, or detected
    if None."""
    present = Counter(type(module).__name__ for module in model.modules())
    if wanted is not None:
        for name in wanted:
            if name not in present:
                raise usage_error(
                    "layer-class-not-found",
                    f"fsdp.transformer_layer_cls_to_wrap: the model has no class `{name}`",
                    hint="its repeated classes are "
                    + ", ".join(f"{known} ({count})" for known, count in _candidates(model)),
                )
        return tuple(wanted)
    declared = [name for name in sorted(LAYER_CLASSES.of(model) or []) if present[name]]
    repeated = {name for name, _ in _candidates(model)}
    found = (
        [name for name in declared if name in repeated]
        or [name for name, _ in _candidates(model)[:1]]
        or declared
    )
    if not found:
        raise usage_error(
            "layer-class-unknown",
            f"no decoder layer class was found in {type(model).__name__}",
            hint="set it as fsdp.transformer_layer_cls_to_wrap, or wrap by size: fsdp.auto_wrap_policy: "
            "SIZE_BASED_WRAP",
        )
    return tuple(found)


def _candidates(model: nn.Module) -> list[tuple[str, int]]:
    """Return (class name, count) of the members of the model's module lists, those with most parameters
    first."""
    weight: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for member in module:
                weight[type(member).__name__] += sum(p.numel() for p in member.parameters())
                count[type(member).__name__] += 1
    return [(name, count[name]) for name, _ in weight.most_common(5)]


def decoder_layers(
    model: PreTrainedModel, wanted: Sequence[str] | None = None
) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of every decoder layer of the bare model, in the order of the forward.

    A layer inside another one (the Mamba layer of Zamba2's hybrid layers) is part of the outer layer. Call
    before wrapping: FSDP2 renames the classes of its units, and `_no_split_modules` no longer names them.
    """
    classes = decoder_layer_classes(model, wanted)
    layers: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():  # an outer module comes before its inner ones
        is_inside = any(name.startswith(f"{outer}.") for outer, _ in layers[-1:])
        if type(module).__name__ in classes and not is_inside:
            layers.append((name, module))
    return layers


def plan_units(recipe: Recipe, model: PreTrainedModel) -> UnitPlan:
    """Return the units of the recipe's wrap policy. Raises: usage error (exit 2) if recomputation cannot
    enclose them, or if ignored modules would be trained."""
    plan = _join_tied(model, _units_of_policy(recipe, model))
    experts = divided_experts(recipe, model)
    _require_one_stack_in_a_layer(recipe, model, experts)
    groups = (*((name,) for name in experts), *plan.groups)  # each a unit, over another mesh than its layer
    plan = replace(_hold_precision(recipe, model, replace(plan, groups=groups)), divided=frozenset(experts))
    _refuse_ignored_that_train(recipe, model)
    _refuse_units_in_selective_layers(recipe, model, plan)
    return plan


def _require_one_stack_in_a_layer(recipe: Recipe, model: PreTrainedModel, experts: Sequence[str]) -> None:
    """Refuse divided experts outside of the decoder layers, or several in one.

    A layer may call one of several for some rows only (experts of text and of images), and a rank that does
    not call it would not take part in the exchange. Raises: usage error.
    """
    layers = [name for name, _ in decoder_layers(model, recipe.layer_classes)] if experts else []
    owners = Counter(
        next((layer for layer in layers if name.startswith(f"{layer}.")), None) for name in experts
    )
    for layer, count in owners.items():
        if layer is None:
            raise refused_experts(recipe, "it has experts outside of its decoder layers")
        if count > 1:
            raise refused_experts(
                recipe,
                f"`{layer}` has {count} modules of experts, and a rank may call one that others do not",
            )


def _refuse_ignored_that_train(recipe: Recipe, model: PreTrainedModel) -> None:
    """Refuse ignored modules that are trained: FSDP does not sum their gradients over ranks, nor, with bf16
    weights, in fp32."""
    if not recipe.is_sharded or (recipe.world_size == 1 and recipe.model.dtype == "fp32"):
        return
    modules = {name: model.get_submodule(name) for name in sorted(ignored_module_names(recipe, model))}
    name = next(
        (name for name, module in modules.items() if any(p.requires_grad for p in module.parameters())), None
    )
    if name is not None:
        raise usage_error(
            "ignored-modules-trained",
            f"`fsdp.ignored_modules` excludes `{name}`, which is trained: FSDP does not sum "
            "gradients of ignored modules, "
            + (
                "so that the ranks would differ"
                if recipe.world_size > 1
                else "so that micro-batches would be added in bf16"
            ),
            ways_out=(
                f'`model: {{freeze: ["{name}.*"]}}` freezes it',
                "leave `fsdp.ignored_modules` out to train it",
            ),
        )


def _refuse_units_in_selective_layers(recipe: Recipe, model: PreTrainedModel, plan: UnitPlan) -> None:
    """Refuse FSDP units inside selectively recomputed layers. torch's selective recomputation requires the
    same operations as in the forward, including those of FSDP2's hooks, which differ: a prefetched unit is
    gathered by the hook of another unit."""
    fsdp = recipe.fsdp
    if fsdp.activation_checkpointing != "selective" or fsdp.version != 2 or not recipe.is_sharded:
        return
    recomputed = tuple(
        f"{name}."
        for name, _ in decoder_layers(model, recipe.layer_classes)[:: fsdp.activation_checkpointing_every]
    )
    inside = next((name for group in plan.groups for name in group if name.startswith(recomputed)), None)
    if inside is not None:
        raise usage_error(
            "contradiction",
            "`fsdp.activation_checkpointing: selective` cannot recompute a layer with an FSDP unit inside, "
            f"and `fsdp.auto_wrap_policy: {fsdp.auto_wrap_policy}` makes one of `{inside}`",
            hint="write `auto_wrap_policy: TRANSFORMER_BASED_WRAP`, or `activation_checkpointing: full`",
        )


def _units_of_policy(recipe: Recipe, model: PreTrainedModel) -> UnitPlan:
    policy = recipe.fsdp.auto_wrap_policy
    ignored = ignored_module_names(recipe, model)
    if policy == "NO_WRAP":
        return UnitPlan((), frozenset())
    if policy == "MODULE_NAMES_WRAP":
        groups = [(name,) for name in _by_patterns(recipe, model)]
        return UnitPlan(_without(_children_first(groups), ignored), frozenset())
    if policy == "SIZE_BASED_WRAP":
        groups = [(name,) for name in _by_size(recipe, model)]
        return UnitPlan(_without(_children_first(groups), ignored), frozenset())
    layers = [(name,) for name, _ in decoder_layers(model, recipe.layer_classes)]
    ends = _end_groups(model, [name for (name,) in layers])
    tail = frozenset(ends[-1:])
    return UnitPlan(_without([*_children_first(layers), *ends], ignored), tail)


def _join_tied(model: nn.Module, plan: UnitPlan) -> UnitPlan:
    """Join the groups that share a parameter, which FSDP2 allows in one unit only (BERT's tied bias, Zamba2's
    shared block).

    A group that shares a parameter with a module outside of all groups is removed, so that its modules are in
    the root unit.
    """
    innermost = sorted(
        ((name, index) for index, group in enumerate(plan.groups) for name in group),
        key=lambda each: -len(each[0]),
    )
    owners: dict[int, set[int]] = {}  # parameter → its groups, _ROOT for none
    for name, module in model.named_modules(remove_duplicate=False):
        group = next(
            (index for prefix, index in innermost if name == prefix or name.startswith(f"{prefix}.")), _ROOT
        )
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(group)
    joined = [{index} for index in (_ROOT, *range(len(plan.groups)))]
    for sharing in owners.values():
        touched = [each for each in joined if each & sharing]
        if len(touched) > 1:
            joined = [each for each in joined if not each & sharing] + [set().union(*touched)]
    if len(joined) == len(plan.groups) + 1:
        return plan
    kept = sorted((sorted(each) for each in joined if _ROOT not in each), key=lambda each: each[0])
    groups = tuple(tuple(name for index in each for name in plan.groups[index]) for each in kept)
    return UnitPlan(groups, plan.keeps_gathered & frozenset(groups))


def _hold_precision(recipe: Recipe, model: PreTrainedModel, plan: UnitPlan) -> UnitPlan:
    """Give the parameters that the class keeps in fp32 units that FSDP2 does not cast. Raises: usage error.

    FSDP2 needs one dtype in a unit, for its trained parameters and for what it gathers. Most kept parameters
    are few in a layer, and many are in a module with others (`sinks`, `A_log`) or are read outside of the
    forward of their own module (`conv1d`), so that they cannot be units. All of them are the unit of the
    decoder, which gathers them once in a step and holds them until its backward ends.
    """
    kept = _kept_names(recipe, model)
    if not kept:
        return plan
    names = dict.fromkeys(name for name, _ in model.named_parameters())
    groups = [part for group in plan.groups for part in _split(model, group, kept)]
    in_fp32 = frozenset(
        group for group in groups if (own := _own_names(names, group, groups)) and own <= kept
    )
    held = kept - {name for group in in_fp32 for name in _own_names(names, group, groups)}
    tail = {part for group in plan.keeps_gathered for part in _split(model, group, kept)}
    if not held:
        return UnitPlan(tuple(groups), frozenset(tail), in_fp32)
    holder = model.base_model_prefix if model.base_model is not model else ""
    if not holder or not all(name.startswith(f"{holder}.") for name in held):
        raise _refused_precision(recipe, model, held)
    return UnitPlan(
        tuple(group for group in groups if group != (holder,)), frozenset(tail), in_fp32, holder, held
    )


def _kept_names(recipe: Recipe, model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the parameters that FSDP must not cast. Raises: usage error for FSDP1, which has
    one dtype in a unit."""
    if not recipe.is_sharded or recipe.compute_dtype == "fp32":
        return frozenset()
    kept, ignored = kept_in_fp32(model), tuple(f"{name}." for name in ignored_module_names(recipe, model))
    found = frozenset(
        name for name, _ in model.named_parameters() if name in kept and not name.startswith(ignored)
    )
    if recipe.fsdp.version == 2:
        return found
    if found and recipe.model.dtype != "fp32":
        raise _refused_precision(recipe, model, found)
    return frozenset()


def _refused_precision(recipe: Recipe, model: PreTrainedModel, names: Collection[str]) -> FsdpTuneError:
    more = f" and {len(names) - 1} more parameters" if len(names) > 1 else ""
    message = f"{type(model).__name__} keeps {min(names)}{more} in fp32, and "
    if recipe.fsdp.version == 1:
        message += "FSDP1 joins the parameters of a unit in one flat tensor of one dtype"
        ways = ("write `fsdp: {version: 2}`", "write `model: {dtype: fp32}`")
    else:
        message += "no module of its own can hold them as an FSDP2 unit"
        ways = (
            "write `model: {dtype: fp32}` and `precision: {mixed_precision: no}`",
            "write `fsdp: {sharding_strategy: NO_SHARD}`",
        )
    return usage_error("precision-not-kept", message, where=Where(key="model.dtype"), ways_out=ways)


def _split(model: nn.Module, group: tuple[str, ...], kept: frozenset[str]) -> list[tuple[str, ...]]:
    """Return the group, in two parts if some of its modules have only kept parameters: those modules are a
    unit of their own."""
    alone = tuple(
        name
        for name in group
        if {own for own, _ in model.get_submodule(name).named_parameters(prefix=name)} <= kept
    )
    others = tuple(name for name in group if name not in alone)
    return [part for part in (others, alone) if part]


def _own_names(names: Iterable[str], group: tuple[str, ...], groups: Sequence[tuple[str, ...]]) -> set[str]:
    """Return the parameters of a group that are in no group inside of it."""
    inner = tuple(
        f"{name}."
        for other in groups
        if other != group
        for name in other
        if name.startswith(tuple(f"{g}." for g in group))
    )
    return {
        name
        for name in names
        if name.startswith(tuple(f"{each}." for each in group)) and not name.startswith(inner)
    }


def ignored_module_names(recipe: Recipe, model: nn.Module) -> set[str]:
    """Return the names of the modules that `fsdp.ignored_modules` matches (a regular expression for full
    names, as in Accelerate)."""
    if recipe.fsdp.ignored_modules is None:
        return set()
    pattern = re.compile(recipe.fsdp.ignored_modules)
    names = {name for name, _ in model.named_modules() if pattern.fullmatch(name)}
    if not names:
        raise usage_error(
            "ignored-modules-match-nothing",
            f"fsdp.ignored_modules: `{recipe.fsdp.ignored_modules}` matches no module",
        )
    return names


def _without(groups: Sequence[tuple[str, ...]], ignored: set[str]) -> tuple[tuple[str, ...], ...]:
    return tuple(group for group in groups if not any(name in ignored for name in group))


def _children_first(groups: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return sorted(groups, key=lambda group: -group[0].count("."))


def _end_groups(model: PreTrainedModel, layers: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the groups of the embedding and of the final norm with the head, which are large and not part of
    a layer.

    Tied embedding and head must share a unit, since a parameter cannot belong to two. The embedding comes
    first, so that its gather starts with the forward.
    """
    name_of = {id(module): name for name, module in model.named_modules()}
    ends: tuple[Any, Any] = (model.get_input_embeddings(), model.get_output_embeddings())
    embedding, head = ends
    norm = _final_norm(model, layers, None if head is None else head.weight.shape[-1])
    tied = head is not None and embedding is not None and embedding.weight is head.weight
    tail = [norm, embedding, head] if tied else [norm, head]
    names = tuple(name_of[id(module)] for module in tail if module is not None)
    groups = [] if tied or embedding is None else [(name_of[id(embedding)],)]
    return [*groups, names] if names else groups


def _final_norm(model: PreTrainedModel, layers: Sequence[str], width: int | None) -> nn.Module | None:
    """Return the last norm of this width after the list of the last decoder layer, among the siblings of the
    list, or None. `width`: of the head's input; None: any.

    The last layer counts, since models with a vision tower have its layers before those of the language
    model. Other norms after the list are those of inputs, before the final one (mBART) or of another width
    (Gemma 3n and 4).
    """
    parent_name, _, list_name = layers[-1].rpartition(".")[0].rpartition(".")
    siblings = model.get_submodule(parent_name).named_children()
    after = [child for _, child in dropwhile(lambda sibling: sibling[0] != list_name, siblings)]
    norms = [
        child
        for child in after
        if "norm" in type(child).__name__.lower()
        and all(width in (None, parameter.shape[-1]) for parameter in child.parameters())
    ]
    return norms[-1] if norms else None


def _by_patterns(recipe: Recipe, model: nn.Module) -> list[str]:
    names = [name for name, module in model.named_modules() if name and not isinstance(module, _CONTAINERS)]
    chosen: list[str] = []
    for pattern in recipe.fsdp.modules_to_wrap:
        matches = [
            name
            for name in names
            if fnmatch.fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")
        ]
        if not matches:
            raise usage_error(
                "wrap-pattern-matches-nothing",
                f"fsdp.modules_to_wrap: `{pattern}` matches no module of {type(model).__name__}",
                hint="a `*` matches one part of a name, as in `model.layers.*`; names look like "
                + ", ".join(f"`{name}`" for name in names[:4]),
            )
        chosen += [name for name in matches if name not in chosen]
    return chosen


def minimum_unit_parameters(recipe: Recipe, model: PreTrainedModel) -> int:
    """Return `fsdp.min_num_params`; auto is half of one decoder layer, so that each layer becomes a separate
    unit."""
    if isinstance(recipe.fsdp.min_num_params, int):
        return recipe.fsdp.min_num_params
    layers = decoder_layers(model, recipe.layer_classes)
    return max(1, sum(p.numel() for p in layers[0][1].parameters()) // 2)


def _by_size(recipe: Recipe, model: PreTrainedModel) -> list[str]:
    """Return the modules with at least the minimum of parameters outside of units below them; containers are
    skipped.

    Bottom up, as in torch's size policy: a parent counts only parameters that are in no unit of its children.
    Modules that share a parameter (tied embedding and head) stay in the root unit.
    """
    minimum = minimum_unit_parameters(recipe, model)
    owners: Counter[int] = Counter()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] += 1
    shared = {key for key, count in owners.items() if count > 1}
    chosen: list[str] = []

    def visit(name: str, module: nn.Module) -> int:
        # PEFT's DoRA reads the weights of an adapted layer outside of the forward of its parts, so that these
        # cannot be units.
        is_adapted = hasattr(module, "lora_A")
        own = [p for p in module.parameters(recurse=is_adapted) if id(p) not in shared]
        left = sum(p.numel() for p in own)
        for child_name, child in [] if is_adapted else module.named_children():
            left += visit(f"{name}.{child_name}" if name else child_name, child)
        holds_shared = any(id(p) in shared for p in module.parameters())
        if name and left >= minimum and not isinstance(module, _CONTAINERS) and not holds_shared:
            chosen.append(name)
            return 0
        return left

    visit("", model)
    return chosen
