"""The problem of memory that ran out, from sizes alone: what held it, and three changes to the recipe that
would help."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_tune.core.errors import Problem
from fsdp_tune.core.library_errors import OUT_OF_MEMORY_SIZES
from fsdp_tune.core.units import GIB, KIB, MIB, format_bytes
from fsdp_tune.recipe.rules.contradictions import RULES
from fsdp_tune.recipe.schema.recipe import Recipe

WAYS = 3
REST = "activations, gathered parameters and workspace"
_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
# If the allocator holds more than this share of the device without using it, fragmentation is the cause.
_FRAGMENTED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Moment:
    """The state when memory ran out. Sizes in bytes; unknown sizes are left out."""

    phase: str
    step: int
    """The last completed step."""
    components: Mapping[str, int] = field(default_factory=dict[str, int])
    """Memory of this rank's parameters, gradients and optimizer state."""
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    """The sizes in the allocator's message: requested, capacity, free, allocated, unused."""
    module: str | None = None
    """The innermost module whose forward was running; None outside of a forward and its recomputation."""

    @property
    def live(self) -> dict[str, int]:
        """Memory by component, largest first; allocated memory that belongs to no component is `REST`."""
        rest = self.sizes.get("allocated", 0) - sum(self.components.values())
        everything = {**self.components, **({REST: rest} if rest > 0 else {})}
        return dict(
            sorted(
                ((name, size) for name, size in everything.items() if size),
                key=lambda item: (-item[1], item[0]),
            )
        )

    def as_dict(self) -> dict[str, object]:
        sizes = {f"{name}_bytes": size for name, size in self.sizes.items()}
        return {
            "phase": self.phase,
            "step": self.step,
            "module": self.module,
            "live_bytes": self.live,
            **sizes,
        }


def sizes_in(message: str) -> dict[str, int]:
    """Parse the sizes in torch's message, in bytes."""
    found = {name: pattern.search(message) for name, pattern in OUT_OF_MEMORY_SIZES.items()}
    return {name: round(float(match[1]) * _UNITS[match[2]]) for name, match in found.items() if match}


def device_problem(recipe: Recipe, moment: Moment) -> Problem:
    """Describe where device memory ran out, what was live, and the first three changes that apply."""
    sizes = moment.sizes
    requested = (
        f"{format_bytes(sizes['requested'])} requested" if "requested" in sizes else "an allocation failed"
    )
    of = f" on a device with {format_bytes(sizes['capacity'])}" if "capacity" in sizes else ""
    live = ", ".join(f"{name} {format_bytes(size)}" for name, size in moment.live.items())
    held = f"; {format_bytes(sizes['unused'])} held but not used" if sizes.get("unused") else ""
    where = f"`{moment.phase}`, in `{moment.module}`" if moment.module else f"`{moment.phase}`"
    message = f"out of device memory in {where}: {requested}{of}"
    if live or held:
        message += f"; live: {live or 'unknown'}{held}"
    return Problem("device-out-of-memory", message, ways_out=_possible(recipe, device_ways(recipe, moment)))


class Way(NamedTuple):
    """Something that saves memory, and the keys of the recipe that it changes, with their values."""

    text: str
    changes: Mapping[str, object] | None = None


def _change(key: str, value: object, why: str, **derived: object) -> Way:
    """Return a change to a key; `why` begins with `: `, or with the present value. `derived` are keys of the
    same section that were resolved from it."""
    section = key.partition(".")[0]
    changes = {key: value} | {f"{section}.{name}": other for name, other in derived.items()}
    return Way(f"{key}: {str(value).lower() if isinstance(value, bool) else value}{why}", changes)


def _possible(recipe: Recipe, ways: Iterable[Way]) -> tuple[str, ...]:
    """Return the first ways that no rule refuses with this recipe."""
    return tuple(
        way.text
        for _, way in zip(range(WAYS), (way for way in ways if not _is_refused(recipe, way)), strict=False)
    )


def _is_refused(recipe: Recipe, way: Way) -> bool:
    if not way.changes:
        return False
    data = recipe.model_dump(by_alias=True)
    for key, value in way.changes.items():
        section, name = key.split(".")
        data[section][name] = value
    other = Recipe.model_validate(data)
    before = {(found.code, found.keys) for rule in RULES for found in rule(recipe)}
    return any((found.code, found.keys) not in before for rule in RULES for found in rule(other))


def device_ways(recipe: Recipe, moment: Moment) -> Iterator[Way]:
    """Yield changes to the recipe, starting with the cheapest one that shrinks the largest component."""
    sizes = moment.sizes
    is_fragmented = sizes.get("unused", 0) > max(
        sizes.get("requested", 0), _FRAGMENTED_SHARE * sizes.get("capacity", 0)
    )
    if is_fragmented and not any("expandable_segments:True" in value for value in recipe.launch.env.values()):
        yield Way(
            "launch.env: {PYTORCH_ALLOC_CONF: 'expandable_segments:True'}: free memory is "
            "fragmented; costs nothing"
        )
    if moment.phase == "evaluating":  # a forward without gradients
        yield from _less_evaluation(recipe)
        yield from _less_state(recipe, has_gradients=False)
        yield from _more_devices(recipe)
        return
    if moment.phase in ("saving", "probing a save") and recipe.fsdp.state_dict_type == "FULL_STATE_DICT":
        yield _change(
            "fsdp.state_dict_type", "SHARDED_STATE_DICT", ": no rank gathers the full model to save it"
        )
    largest = next(iter(moment.live), REST)
    if recipe.fsdp.reshard_after_backward is False and (recipe.training.gradient_accumulation_steps or 1) > 1:
        yield _change(
            "fsdp.reshard_after_backward",
            True,
            " (now false): no rank keeps gathered parameters between micro-batches",
        )
    if largest == REST:
        yield from _less_activation(recipe)
    yield from _less_state(recipe, has_gradients=True)
    if largest != REST:
        yield from _less_activation(recipe)
    yield from _more_devices(recipe)


def _less_evaluation(recipe: Recipe) -> Iterator[Way]:
    size = recipe.training.per_device_eval_batch_size or recipe.training.per_device_train_batch_size
    if size > 1:
        yield _change(
            "training.per_device_eval_batch_size", size // 2, f" (now {size}): the eval loss stays the same"
        )
    yield from _narrower(recipe)


def _less_activation(recipe: Recipe) -> Iterator[Way]:
    size, length = recipe.training.per_device_train_batch_size, recipe.data.max_length
    budget = recipe.training.per_device_train_batch_tokens
    if size > 1 and budget is not None:
        why = f" (now {budget}): the global batch stays, in more micro-batches"
        yield _change(
            "training.per_device_train_batch_tokens",
            size // 2 * length,
            why,
            per_device_train_batch_size=size // 2,
        )
    elif size > 1:
        yield _change(
            "training.per_device_train_batch_size",
            size // 2,
            f" (now {size}): the global batch stays, in more micro-batches",
        )
    if recipe.fsdp.activation_checkpointing != "full":
        now = recipe.fsdp.activation_checkpointing
        yield _change(
            "fsdp.activation_checkpointing",
            "full",
            f" (now {now}): keeps one activation per layer, for a third more compute",
        )
    elif not recipe.fsdp.activation_checkpointing_offload and recipe.fsdp.version == 2:
        yield _change(
            "fsdp.activation_checkpointing_offload",
            True,
            " (now false): inputs of layers in host memory, copied while layers compute",
        )
    yield from _narrower(recipe)


def _narrower(recipe: Recipe) -> Iterator[Way]:
    length = recipe.data.max_length
    if recipe.precision.mixed_precision == "no":
        yield _change("precision.mixed_precision", "bf16", " (now no): activations take half the memory")
    if length > 1:
        yield _change(
            "data.max_length",
            length // 2,
            f" (now {length}): longer rows are cut or dropped, so this changes what is trained",
        )


def _less_state(recipe: Recipe, *, has_gradients: bool) -> Iterator[Way]:
    strategy = recipe.fsdp.sharding_strategy
    if strategy != "FULL_SHARD" and recipe.world_size > 1:
        why = f" (now {strategy}): parameters, gradients and moments are all split over the ranks"
        yield _change("fsdp.sharding_strategy", "FULL_SHARD", why, reshard_after_forward=None)
    accumulates = (recipe.training.gradient_accumulation_steps or 1) > 1
    if has_gradients and not recipe.fsdp.sync_each_batch and accumulates:
        yield _change(
            "fsdp.sync_each_batch",
            True,
            " (now false): no rank keeps unsharded gradients between micro-batches",
        )
    if not recipe.fsdp.offload_params and strategy != "NO_SHARD":
        yield _change(
            "fsdp.offload_params",
            True,
            " (now false): parameters, gradients and moments live in host memory; a step takes much longer",
        )


def _more_devices(recipe: Recipe) -> Iterator[Way]:
    world_size = recipe.world_size
    if recipe.is_sharded:
        yield _change(
            "launch.num_processes",
            2 * world_size,
            f" (now {world_size}): each device holds half of the sharded state",
        )
    yield Way("a device with more memory")
    yield Way("a smaller model (model.name_or_path)")


@dataclass(frozen=True, slots=True)
class Host:
    """The machine's memory when an allocation on the host failed, in bytes; None where it is unknown."""

    process_bytes: int | None
    available_bytes: int | None
    total_bytes: int | None


def host_problem(recipe: Recipe, phase: str, host: Host, *, page_locked: bool = False) -> Problem:
    """Name the phase in which host memory ran out, how much was held, and the first three changes that
    apply."""
    parts: list[str] = []
    if page_locked:
        parts.append("page-locked memory for copies to the device was refused")
    if host.process_bytes is not None:
        parts.append(f"this rank has held up to {format_bytes(host.process_bytes)}")
    if host.available_bytes is not None and host.total_bytes is not None:
        parts.append(
            f"{format_bytes(host.available_bytes)} of the machine's {format_bytes(host.total_bytes)} are left"
        )
    message = f"out of host memory in `{phase}`" + (f": {', '.join(parts)}" if parts else "")
    return Problem("host-out-of-memory", message, ways_out=_possible(recipe, host_ways(recipe, phase)))


def host_ways(recipe: Recipe, phase: str) -> Iterator[Way]:
    """Yield changes to the recipe that save host memory, starting with those that fit the phase."""
    if (
        phase in ("importing", "loading the model")
        and not recipe.fsdp.cpu_ram_efficient_loading
        and recipe.fsdp.version == 2
    ):
        yield _change(
            "fsdp.cpu_ram_efficient_loading",
            True,
            " (now false): one rank of the machine reads the weights, not each",
        )
    if recipe.checkpoint.async_:
        yield _change(
            "checkpoint.async",
            False,
            " (now true): no copy of this rank's state in host memory while it is written",
        )
    workers = int((recipe.training.model_extra or {}).get("dataloader_num_workers", 0) or 0)
    if workers:
        yield _change(
            "training.dataloader_num_workers", workers // 2, f" (now {workers}): fewer processes per rank"
        )
    if recipe.fsdp.offload_params:
        yield _change(
            "fsdp.offload_params", False, " (now true): parameters, gradients and moments live on the device"
        )
    if recipe.fsdp.activation_checkpointing_offload:
        yield _change(
            "fsdp.activation_checkpointing_offload", False, " (now true): inputs of layers stay on the device"
        )
    if recipe.fsdp.state_dict_type == "FULL_STATE_DICT":
        yield _change(
            "fsdp.state_dict_type",
            "SHARDED_STATE_DICT",
            " (now FULL_STATE_DICT): no rank gathers the full model to save it",
        )
    yield _change(
        "launch.num_machines", recipe.launch.num_machines + 1, ": fewer ranks share a machine's memory"
    )
    yield Way("a machine with more memory, or a higher limit where a container or scheduler sets one")
    yield Way("fewer other processes on the machine")
