"""The fake device `gpu`, which torch treats as an accelerator, and the recipe's model on it: all layers, or
one of each run of equal ones.

The device uses torch's PrivateUse1 slot with a Python backend: autograd, FSDP2 and autocast take their
accelerator paths (streams, events, fused dropout), unlike on `cpu`, and also in a build of torch without
CUDA. Streams and events only record waits.

torch leaves autocast's list of operations to each backend; this is CUDA's (`autocast_mode.h`). Plain DDP
computes in half precision by
autocast: matrices are cast, a weight once for each forward (autocast's own cache), and norms and sums run in
fp32.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import library, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.core.families import layer_types
from fsdp_tune.model.internals.torch_internals import BACKEND_MODULE, HOST_VALUES, REGISTER_BACKEND
from fsdp_tune.model.internals.transformers_internals import SUPPORTS_FLASH, SUPPORTS_SDPA
from fsdp_tune.model.kernels.attention import has_variable_lengths
from fsdp_tune.model.kernels.fake_quantised import plan_quantised
from fsdp_tune.model.kernels.linear_layers import plan_fp8
from fsdp_tune.model.loading.construct import attention, build_empty
from fsdp_tune.model.loading.positions import beyond_table_of_positions
from fsdp_tune.model.shard.expert_parallel import require_divisible_experts
from fsdp_tune.model.shard.fsdp_units import decoder_layers, ignored_module_names
from fsdp_tune.model.shard.recompute import checkpointed_layers
from fsdp_tune.planner.predict.depth import Repeated
from fsdp_tune.recipe.rules.limits import computes_in_fp8
from fsdp_tune.recipe.schema.recipe import Recipe


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module or class for the duration of the block."""
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def nothing(*_args: object, **_options: object) -> None:
    """Do nothing, in place of a function whose effect a trace must not have."""


@contextlib.contextmanager
def values_of_host() -> Iterator[None]:
    """Let lists, numbers and arrays become tensors of the fake device and indices of its tensors; enter it
    before the fake mode.

    Below the modes, where nothing is fake, torch would allocate such a tensor on the device itself. Now it
    makes one on the host, and an operation copies it.
    """
    get, put = torch.Tensor.__getitem__, torch.Tensor.__setitem__

    def selected(tensor: torch.Tensor, index: Any) -> torch.Tensor:
        return get(tensor, _by_position(index))

    def assigned(tensor: torch.Tensor, index: Any, value: Any) -> None:
        put(tensor, _by_position(index), value)

    with (
        HOST_VALUES.replaced(True),
        replaced(torch.Tensor, "__getitem__", selected),
        replaced(torch.Tensor, "__setitem__", assigned),
    ):
        yield


def _by_position(index: Any) -> Any:
    """Replace masks (lists and arrays of booleans) by the positions that they select, since a mask on the
    fake device has no values."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_mask, parts)):
        return index
    return tuple(
        each for part in parts for each in (np.asarray(part).nonzero() if _is_mask(part) else (part,))
    )


def _is_mask(part: Any) -> bool:
    if isinstance(part, np.ndarray):
        return part.dtype == np.bool_
    return isinstance(part, list) and bool(part) and all(isinstance(each, bool) for each in part)


DEVICE = "gpu"
# FSDP2 creates its streams in this order, in the first forward (`FSDPCommContext.lazy_init`). A stream with
# an explicit priority of 0 is that of the host copies (`model/shard/recompute.py`).
STREAMS = ("compute", "all-gather copy-in", "all-gather", "reduce-scatter", "all-reduce", "host copies")


@dataclass
class Clock:
    """The common order of all records, the current stream, and the waits between streams."""

    now: int = 0
    streams: list[int] = field(default_factory=lambda: [0])
    next_stream: int = 1
    waits: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])
    """(at, waiting stream, source stream, position in the order up to which it waits)"""

    def tick(self) -> int:
        self.now += 1
        return self.now - 1

    def wait(self, stream: int, source: int, until: int) -> None:
        if stream != source:
            self.waits.append((self.tick(), stream, source, until))


clock = Clock()
"""The clock of the current trace: torch gets streams from the device module, of which a process has one."""


def restart() -> Clock:
    """Start a new order for the next trace of this process."""
    global clock
    clock = Clock()
    return clock


class Event:
    def __init__(self, *_args: object, **_options: object) -> None:
        self.source, self.until = 0, 0

    def record(self, stream: Stream | None = None) -> Event:
        self.source, self.until = stream.index if stream is not None else clock.streams[-1], clock.now
        return self

    def wait(self, stream: Stream | None = None) -> None:
        clock.wait(stream.index if stream is not None else clock.streams[-1], self.source, self.until)

    def synchronize(self) -> None:
        """Block the CPU. In the order of records, the compute stream continues after the event."""
        clock.wait(0, self.source, self.until)

    def query(self) -> bool:
        return True


class Stream:
    # Attributes of torch's own streams; FSDP2 of torch 2.15 passes the stream to an operation that backends
    # may replace.
    device_index, device_type = 0, 0

    def __init__(
        self, *_args: object, index: int | None = None, priority: int | None = None, **_options: object
    ) -> None:
        if index is None and priority == 0:
            index = len(STREAMS) - 1
        if index is None:
            index, clock.next_stream = min(clock.next_stream, len(STREAMS) - 1), clock.next_stream + 1
        self.index = self.stream_id = index

    def wait_stream(self, other: Stream) -> None:
        clock.wait(self.index, other.index, clock.now)

    def wait_event(self, event: Event) -> None:
        clock.wait(self.index, event.source, event.until)

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).record(self)

    def synchronize(self) -> None:
        clock.wait(0, self.index, clock.now)

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is captured; optimizers of torch 2.15 query it in each step."""
        return False


def current_stream(*_device: object) -> Stream:
    return Stream(index=clock.streams[-1])


class _Module:
    """The device module, as `torch.cuda` is for CUDA, on top of torch's own for a backend in Python."""

    Stream, Event = Stream, Event

    def current_stream(self, *_device: object) -> Stream:
        return current_stream()

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        clock.streams.append(clock.streams[-1] if stream is None else stream.index)
        try:
            yield
        finally:
            clock.streams.pop()

    def device(self, *_device: object) -> Any:
        return contextlib.nullcontext()

    def set_device(self, *_device: object) -> None:
        pass

    def synchronize(self, *_device: object) -> None:
        pass

    def get_rng_state(self, *_device: object) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, *_state: object) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]


def install() -> None:
    """Register the device with torch, once per process; it cannot be undone."""
    if not hasattr(torch, DEVICE):
        REGISTER_BACKEND.get()(DEVICE, type("DeviceModule", (_Module, BACKEND_MODULE.get()), {})())


# AT_FORALL_LOWER_PRECISION_FP, those that language models use; `cuda_kernels` handles attention.
_LOWER = (
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "addbmm",
    "mv",
    "addmv",
    "addr",
    "conv1d",
    "prelu",
)
# AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE.
_FP32 = (
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "rms_norm",
    "softmax.int",
    "log_softmax.int",
    "nll_loss",
    "cross_entropy_loss",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "exp",
    "log",
    "log1p",
    "expm1",
    "rsqrt",
    "reciprocal",
    "softplus",
    "logsumexp",
    "sum",
    "sum.dim_IntList",
    "cumsum",
    "cumprod",
    "prod",
)
_weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


@functools.cache
def install_autocast() -> list[library.Library]:
    """Install autocast for the fake device, once per process; the returned objects must stay alive."""
    fallback = library.Library("_", "IMPL", "AutocastPrivateUse1")
    fallback.fallback(library.fallthrough_kernel)
    casts = library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for name in _LOWER:
        casts.impl(name, functools.partial(_run, _overload(name), None))
    for name in _FP32:
        casts.impl(name, functools.partial(_run, _overload(name), torch.float32))
    return [fallback, casts]


def forget_weights() -> None:
    """Empty the cache of cast weights, as leaving an autocast context does."""
    _weights.clear()


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _run(operation: Any, own: torch.dtype | None, /, *args: Any, **kwargs: Any) -> Any:
    wanted = own or torch.get_autocast_dtype(DEVICE)
    torch.set_autocast_enabled(DEVICE, False)  # otherwise the operation would be dispatched here again
    try:
        if not any(
            isinstance(each, torch.dtype) for each in (*args, *kwargs.values())
        ):  # `set_opt_dtype`: the caller's counts
            args, kwargs = (
                tuple(_cast(args, wanted)),
                {name: _cast(value, wanted) for name, value in kwargs.items()},
            )
        return operation(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(DEVICE, True)


def _cast(leaf: Any, wanted: torch.dtype) -> Any:
    if isinstance(leaf, list | tuple):
        return [_cast(each, wanted) for each in leaf]
    if (
        not isinstance(leaf, torch.Tensor)
        or not leaf.is_floating_point()
        or leaf.dtype in (wanted, torch.float64)
    ):
        return leaf
    if wanted == torch.float32 or not (leaf.is_leaf and leaf.requires_grad and leaf.dtype == torch.float32):
        return leaf.to(wanted)
    if id(leaf) not in _weights:
        _weights[id(leaf)] = (leaf, leaf.to(wanted))
    return _weights[id(leaf)][1]


# ---- The model


def build_traced(
    recipe: Recipe, config: PreTrainedConfig, vocabulary: int | None
) -> tuple[Recipe, PreTrainedModel]:
    """Return the recipe to trace and its model on the meta device.

    A FlashAttention package is replaced by torch's own kernel, which allocates the same: a planning machine
    rarely has the package. Divided experts are traced undivided (`planner.predict.mixture`).
    Raises: FsdpTuneError (exit 2) for a model that does not support FlashAttention, whose positions do not
    cover the recipe's rows, that computes its attention in compiled code, or whose experts `fsdp.ep_size`
    ranks cannot divide.
    """
    written = recipe
    if recipe.fsdp.ep_size > 1 and recipe.kernels.experts == "batched_mm":
        message = "`kernels.experts: batched_mm` is not predicted with `fsdp.ep_size`"
        raise usage_error(
            "trace-failed",
            message,
            hint="with `grouped_mm` the step is predicted; it computes the same products",
        )
    recipe, model = _build(_undivided(recipe), config, vocabulary)
    require_divisible_experts(written, model)
    if (
        problem := beyond_table_of_positions(recipe, model)
    ) is not None:  # indexing a fake tensor does not check bounds
        raise FsdpTuneError(problem)
    return recipe, model


NOT_TRACED = {
    "eager": "starts a product for each expert that a token chose",
    "sonicmoe": "runs kernels that it downloads",
}


def _undivided(recipe: Recipe) -> Recipe:
    """Return the recipe with each rank gathering all experts, otherwise with the kernels that divided experts
    have."""
    if recipe.fsdp.ep_size == 1:
        return recipe
    without = {"fsdp": {"ep_size": 1}, "kernels": {"liger": False}}
    return recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update=keys) for name, keys in without.items()}
    )


def _build(
    recipe: Recipe, config: PreTrainedConfig, vocabulary: int | None
) -> tuple[Recipe, PreTrainedModel]:
    kernel = attention(recipe, config)
    if kernel == "flex_attention":
        message = f"`model.attn_implementation: {kernel}` computes only in compiled code, which is not traced"
        raise usage_error(
            "trace-failed",
            message,
            hint="with `sdpa` the step is predicted, with a mask where rows are packed",
        )
    if recipe.kernels.experts in NOT_TRACED:
        message = (
            f"`kernels.experts: {recipe.kernels.experts}` {NOT_TRACED[recipe.kernels.experts]}, which is "
            "not traced"
        )
        raise usage_error(
            "trace-failed",
            message,
            hint="with `grouped_mm` the step is predicted; it computes the same products",
        )
    if not has_variable_lengths(kernel):
        return recipe, build_empty(recipe, config, vocabulary=vocabulary)
    recipe = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"attn_implementation": "sdpa"})}
    )
    with _taking_sdpa(config):
        model = build_empty(recipe, config, vocabulary=vocabulary)
    if not SUPPORTS_FLASH.of(model):
        message = f"`model.attn_implementation`: {type(model).__name__} does not support FlashAttention"
        raise usage_error("model-refused", message, hint="--set model.attn_implementation=auto")
    return recipe, model


@contextlib.contextmanager
def _taking_sdpa(config: PreTrainedConfig) -> Iterator[None]:
    """Build a model whose class takes flash kernels but not sdpa (gpt-oss: sdpa has no sinks), of which a
    trace shows only the work."""
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), PreTrainedModel)
    declares = next(each for each in found.__mro__ if SUPPORTS_SDPA.last in vars(each))
    with replaced(declares, SUPPORTS_SDPA.last, value=True):
        yield


def attention_windows(recipe: Recipe, model: PreTrainedModel) -> list[int | None]:
    """Return the sliding window of each decoder layer, as transformers passes it to a flash kernel; None for
    full attention."""
    default = getattr(model.config, "sliding_window", None)
    windows: list[int | None] = []
    for _, layer in decoder_layers(model, recipe.layer_classes):
        own = [module.sliding_window for module in layer.modules() if hasattr(module, "sliding_window")]
        found = own[0] if own else default
        windows.append(found if isinstance(found, int) else None)
    return windows


def on_fake_device(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Give every parameter and buffer of a meta model fake storage on `device`, in place; ties are kept.
    Needs a FakeTensorMode."""
    made: dict[int, Any] = {}

    def materialised(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            fake: torch.Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            made[id(tensor)] = (
                nn.Parameter(fake, requires_grad=tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else fake
            )
        return made[id(tensor)]

    for module in model.modules():
        own = [
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in [*itertools.chain(*own)]:
            setattr(module, name, materialised(tensor))
    return model


def layer_signatures(
    recipe: Recipe, model: PreTrainedModel, groups: Sequence[tuple[str, ...]]
) -> list[Hashable]:
    """Return a signature of each decoder layer of the full model; layers with equal signatures do the same
    work.

    It contains shapes, dtypes and `requires_grad` of all tensors, classes and settings of all modules, and
    the recipe's changes to
    the layer: recomputation, FSDP units (`groups`), modules that FSDP ignores, modules in fp8, and quantised
    ones.
    """
    layers = decoder_layers(model, recipe.layer_classes)
    recomputed = {name for name, _ in checkpointed_layers(recipe, model)}
    marked = [
        frozenset(name for group in groups for name in group),
        frozenset(ignored_module_names(recipe, model)) if recipe.is_sharded else frozenset[str](),
        frozenset(plan_fp8(recipe, model).converted) if computes_in_fp8(recipe) else frozenset[str](),
        frozenset(plan_quantised(recipe, model).quantised)
        if recipe.quantised_training is not None
        else frozenset[str](),
    ]
    settings = [dict(_settings(layer)) for _, layer in layers]
    positions = (
        {key for key in settings[0] if all(each.get(key) == index for index, each in enumerate(settings))}
        if settings
        else set()
    )
    kinds = layer_types(model.config) or [None] * len(layers)
    signatures: list[Hashable] = []
    for index, (name, layer) in enumerate(layers):
        inside = tuple(
            frozenset(other[len(name) :] for other in names if f"{other}.".startswith(f"{name}."))
            for names in marked
        )
        own = frozenset((key, value) for key, value in settings[index].items() if key not in positions)
        signatures.append((tuple(_tensors(layer)), own, kinds[index], name in recomputed, inside))
    return signatures


def _tensors(layer: nn.Module) -> Iterator[Hashable]:
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        yield name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _settings(layer: nn.Module) -> Iterator[tuple[tuple[str, str], Hashable]]:
    """Yield class and plain attributes of each module (`sliding_window`, `use_rope`). Floats are skipped:
    they do not affect memory."""
    for name, module in layer.named_modules():
        yield (name, ""), type(module)
        for key, value in vars(module).items():
            if value is None or isinstance(value, bool | int | str):
                yield (name, key), value


def has_unit_of_several_layers(
    recipe: Recipe, model: PreTrainedModel, groups: Sequence[tuple[str, ...]]
) -> bool:
    """Return whether an FSDP unit holds parameters of several decoder layers, so that the size of its buffers
    depends on their number."""
    if not recipe.is_sharded:
        return False
    layers = [f"{name}." for name, _ in decoder_layers(model, recipe.layer_classes)]
    ignored = [model.get_submodule(name) for name in ignored_module_names(recipe, model)]
    taken = {id(parameter) for module in ignored for parameter in module.parameters()}
    for group in (*groups, ("",)):
        inside: set[str] = set()
        for root in group:
            for name, parameter in model.get_submodule(root).named_parameters(prefix=root):
                if id(parameter) not in taken:
                    taken.add(id(parameter))
                    inside.update(layer for layer in layers if name.startswith(layer))
        if len(inside) > 1:
            return True
    return False


def container_of(recipe: Recipe, model: PreTrainedModel) -> str | None:
    """Return the name of the ModuleList of exactly the decoder layers, in order; None if there is no such
    list."""
    names = [name for name, _ in decoder_layers(model, recipe.layer_classes)]
    container = names[0].rpartition(".")[0]
    is_list = isinstance(model.get_submodule(container), nn.ModuleList)
    return container if is_list and names == [f"{container}.{index}" for index in range(len(names))] else None


def shallow_recipe(
    recipe: Recipe,
    container: str,
    repeated: Repeated,
    model: PreTrainedModel,
    groups: Sequence[tuple[str, ...]],
) -> Recipe:
    """Return the recipe for `without_dropped`: patterns are replaced by the names that they match in the full
    model.

    `model` is the full one. A pattern may match only dropped layers, and layers after them are renumbered.
    """

    def kept(names: Sequence[str]) -> list[str]:
        return [new for name in names if (new := _renamed(name, container, repeated)) is not None]

    fsdp: dict[str, Any] = {}
    if recipe.fsdp.auto_wrap_policy == "MODULE_NAMES_WRAP":
        fsdp["modules_to_wrap"] = kept([name for group in groups for name in group])
    if recipe.fsdp.ignored_modules is not None:
        ignored = kept(sorted(ignored_module_names(recipe, model)))
        fsdp["ignored_modules"] = "|".join(map(re.escape, ignored)) or None
    return recipe.model_copy(update={"fsdp": recipe.fsdp.model_copy(update=fsdp)})


def _renamed(name: str, container: str, repeated: Repeated) -> str | None:
    """Return the name of a module among the kept layers; None for one in a dropped layer."""
    inside = re.fullmatch(rf"{re.escape(container)}\.(\d+)(.*)", name)
    if inside is None:
        return name
    index = int(inside[1])
    if index in repeated.dropped:
        return None
    return f"{container}.{index if index < repeated.dropped.start else index - repeated.missing}{inside[2]}"


def without_dropped(model: PreTrainedModel, container: str, repeated: Repeated) -> PreTrainedModel:
    """Remove the dropped layers from a model, in place."""
    dropped = slice(repeated.dropped.start, repeated.dropped.stop)
    del model.get_submodule(container)[dropped]  # type: ignore[attr-defined]  # a ModuleList
    for config in {
        id(config): config
        for module in model.modules()
        if (config := getattr(module, "config", None)) is not None
    }.values():
        if getattr(config, "num_hidden_layers", None) is None:
            continue  # a composite model's outer configuration
        config.num_hidden_layers -= repeated.missing
        if (kinds := getattr(config, "layer_types", None)) is not None:
            config.layer_types = [*kinds[: dropped.start], *kinds[dropped.stop :]]
    return model
