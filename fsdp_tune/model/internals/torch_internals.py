"""Private names of torch. Each entry: what it is for, what needs it, and what replaces it where a version
does not have it.

In this order: of tensors, operations, the planner's fake device and process group, the compiler, FSDP,
optimizers, processes and checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fsdp_tune.model.internals.internal import Attribute, Name, Parameter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

READ_IN = ("2.11", "2.13", "2.15")
_COMPILED = "`kernels.compile: true`"
_SELECTIVE = "`fsdp.activation_checkpointing: selective`"
_TRACE = "the trace of a step"
_FSDP1, _FSDP2 = "`fsdp.version: 1`", "the read-back of FSDP2 units"
_LIMIT = "`launch.hang_timeout`"


def _multiply(tensors: list[torch.Tensor], factor: torch.Tensor | float) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def _norms(tensors: list[torch.Tensor], order: float, *, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


FOREACH_MUL = Name("torch:_foreach_mul_", "scaling gradients", READ_IN, fallback=_multiply)
"""Multiplies tensors in place in few kernels. Fallback: one after another, with equal results."""
FOREACH_NORM = Name("torch:_foreach_norm", "the norm of gradients", READ_IN, fallback=_norms)
"""Norms of tensors in few kernels. Fallback: one after another."""


def _without_local(tensor: DTensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local()


LOCAL_TENSOR = Attribute(
    "torch.distributed.tensor:DTensor._local_tensor", "weights in fp8", READ_IN, fallback=_without_local
)
"""The object that a DTensor holds, whose class and attributes matter. Fallback: `to_local`, a view of it if
it is a parameter."""


def _no_modes() -> contextlib.AbstractContextManager[None]:
    if type(torch.empty(0)) is not torch.Tensor:
        raise DISABLE_MODES.refused()
    return contextlib.nullcontext()


DISABLE_MODES = Name(
    "torch.utils._python_dispatch:_disable_current_modes", "a plan", READ_IN, fallback=_no_modes
)
"""A context in which tensors have values although the planner uses fake ones. Fallback: none is needed in a
run, and a plan is refused."""


class _Unobserved(contextlib.AbstractContextManager["_Unobserved"]):
    """In place of a dispatch mode: no operation is observed."""

    def __exit__(self, *_: object) -> None:
        return None


_DISPATCH_MODE = "torch.utils._python_dispatch:TorchDispatchMode"
OBSERVING_MODE = Name(_DISPATCH_MODE, "the audit of dtypes", READ_IN, fallback=_Unobserved)
"""Base class of modes that see each operation. Fallback: none is seen, and readback.json has a warning."""
RECORDING_MODE = Name(_DISPATCH_MODE, _TRACE, READ_IN)
"""The same for a trace, which is nothing without it."""


def observing_mode(
    see: Callable[[object, tuple[object, ...]], None] | None = None,
    see_result: Callable[[object, object], None] | None = None,
) -> contextlib.AbstractContextManager[object]:
    """Return a context in which `see(operator, arguments)` is called before each operation, and
    `see_result(operator, result)` after it, if this version has dispatch modes."""

    class Observing(OBSERVING_MODE.get()):  # type: ignore[misc]
        def __torch_dispatch__(
            self,
            func: Callable[..., object],
            _types: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            if see is not None:
                see(func, args)
            result = func(*args, **(kwargs or {}))
            if see_result is not None:
                see_result(func, result)
            return result

    mode: contextlib.AbstractContextManager[object] = Observing()
    return mode


def recording_mode(
    dispatch: Callable[[object, object, object, object], object],
) -> contextlib.AbstractContextManager[object]:
    """Return a context in which `dispatch(operator, types, args, kwargs)` runs each operation. Raises: usage
    error (exit 2)."""

    class Recording(RECORDING_MODE.get()):  # type: ignore[misc]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """Return False, so that torch does not wrap every call to exclude its compiler; nothing is
            compiled here."""
            return False

        def __torch_dispatch__(
            self, func: object, types: object, args: object = (), kwargs: object = None
        ) -> object:
            return dispatch(func, types, args, kwargs)

    mode: contextlib.AbstractContextManager[object] = Recording()
    return mode


_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",  # other accelerators
    "_flash_attention_forward",
)
ATTENTION_OPERATORS = tuple(
    Name(f"torch:ops.aten.{name}.default", _SELECTIVE, READ_IN, fallback=None) for name in _ATTENTION
)
"""Operators whose results selective recomputation saves. Fallback: one that a version does not have is not
called there either."""
SCHEMA = Attribute("torch._ops:OpOverload._schema", _SELECTIVE, READ_IN)
"""Of an operator: names and defaults of its arguments."""
SCALED_MM = Name("torch:ops.aten._scaled_mm.default", _SELECTIVE, READ_IN, fallback=None)
"""The matrix product of fp8. Fallback: as for attention."""
FLASH_ATTENTION = Name("torch:ops.aten._scaled_dot_product_flash_attention", _TRACE, READ_IN)
EFFICIENT_ATTENTION = Name("torch:ops.aten._scaled_dot_product_efficient_attention", _TRACE, READ_IN)
MATH_ATTENTION = Name("torch:ops.aten._scaled_dot_product_attention_math", _TRACE, READ_IN)
"""The attention operators that CUDA selects."""
GROUPED_PRODUCT = Name("torch:ops.aten._grouped_mm.default", _TRACE, READ_IN)
"""The matrix product of stacked experts, of which before 2.15 torch knows the result in bf16 alone."""

FAKE_TENSOR_MODE = Name(
    "torch._subclasses.fake_tensor:FakeTensorMode", "computing with shapes alone", READ_IN
)
"""A context of tensors without values, for a plan and for the check of a merged model that is larger than the
memory."""
FAKE_TENSOR = Name("torch._subclasses.fake_tensor:FakeTensor", _TRACE, READ_IN)
"""Its tensors."""
NO_DISPATCH = Name("torch._C:_DisableTorchDispatch", _TRACE, READ_IN)
"""A context in which operations on tensors of the meta device reach no mode."""
HOST_VALUES = Name("torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init", _TRACE, READ_IN)
"""Whether lists and numbers become tensors of the host, which an operation then copies to a device, as where
torch finds no accelerator."""
BACKEND_MODULE = Name("torch.utils.backend_registration:_DummyBackendModule", _TRACE, READ_IN)
REGISTER_BACKEND = Name(
    "torch.utils.backend_registration:_setup_privateuseone_for_python_backend", _TRACE, READ_IN
)
"""A device in Python, and the base class of its module."""
FAKE_STORE = Name("torch.testing._internal.distributed.fake_pg:FakeStore", _TRACE, READ_IN)
"""The store of a process group without processes; importing its module registers the backend `fake`."""
PROPAGATE_SHAPES = Name(
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
    _TRACE,
    READ_IN,
)
PROPAGATE_SHARDING = Name(
    "torch.distributed.tensor._sharding_prop:ShardingPropagator.propagate_op_sharding_non_cached",
    _TRACE,
    READ_IN,
)
"""DTensor's rules, which create tensors of global size that a trace must not count."""
VERIFY_SHAPES = Name(
    "torch.nn.parallel.distributed:_verify_param_shape_across_processes", _TRACE, READ_IN, fallback=None
)
"""A check of DDP that reads values, left out of traces. Fallback: nothing is left out."""
CHUNKS = Name(
    "torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty", _TRACE, READ_IN, fallback=None
)
"""Makes the chunks of all ranks, of which a trace needs two. Fallback: it makes all."""
SCRIPT_TYPE = Attribute("torch:ScriptObject._type", _TRACE, READ_IN)
"""The type of an argument of an operator, to recognise process groups."""

OPTIMIZE_DDP = Name("torch._dynamo.config:optimize_ddp", _COMPILED, READ_IN)
"""A setting that splits graphs of layers under DDP unless it is off."""
PRECOMPILED_HEADERS = Name("torch._inductor.config:cpp_cache_precompile_headers", _COMPILED, READ_IN)
"""Whether headers are compiled into TMPDIR/torchinductor_USER, which torch 2.11 has no environment variable
for."""
COMPILE_START = Name("torch._dynamo.callback:on_compile_start", _COMPILED, READ_IN)
COMPILE_END = Name("torch._dynamo.callback:on_compile_end", _COMPILED, READ_IN)
"""Calls around each compilation, for its time."""
COUNTERS = Name("torch._dynamo.utils:counters", _COMPILED, READ_IN)
"""The number of graphs, for the read-back."""
COMPILED_FROM = Attribute(
    "torch._dynamo.eval_frame:OptimizeContext._torchdynamo_orig_callable", _COMPILED, READ_IN
)
"""The function that a compiled one was made of, by which the read-back recognises compiled layers."""

FSDP_STATE = Attribute("torch.distributed.fsdp:FSDPModule._get_fsdp_state", _FSDP2, READ_IN)
"""The state of a unit, of which the following are attributes."""
PARAM_GROUP = Attribute(
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_group", _FSDP2, READ_IN
)
"""The single group of a unit before torch 2.13, None for a unit without parameters of its own."""


def _single_group(state: object) -> list[object]:
    group = PARAM_GROUP.of(state)
    return [] if group is None else [group]


PARAM_GROUPS = Attribute(
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_groups",
    _FSDP2,
    ("2.13", "2.15"),
    fallback=_single_group,
)
"""The groups of a unit. Fallback: its single group."""
FORWARD_PREFETCH = Attribute(
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._states_to_forward_prefetch", _FSDP2, READ_IN
)
BACKWARD_PREFETCH = Attribute(
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._states_to_backward_prefetch", _FSDP2, READ_IN
)
"""The units that a unit gathers ahead."""
FORWARD_RECORD = Attribute(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._post_forward_indices",
    "a forward without a backward",
    READ_IN,
)
"""The places of a unit in the order of forwards, by which the next backward would prefetch."""
LAZY_INIT = Attribute(
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._lazy_init",
    "adding gradients in fp32",
    READ_IN,
)
"""What the first forward does before anything else, and which sets the dtype of gradients."""
ORIGINAL_DTYPE = Attribute(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._orig_dtype",
    "adding gradients in fp32",
    ("2.11", "2.13"),
    fallback=lambda _: None,
)
"""The dtype of reduced gradients. Fallback: torch 2.15 reads `grad_dtype` of the parameters in its place."""
MODULE_INFO = Attribute(
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._module_info",
    "`mixed_precision: fp8`",
    READ_IN,
)
PARAM_NAME = Attribute(
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._param_fqn", "`mixed_precision: fp8`", READ_IN
)
"""The module and the name of a parameter, to read back in which dtype it was gathered, and to find its shard
meanwhile."""
FSDP_PARAM = Name(
    "torch.distributed.fsdp._fully_shard:_fsdp_param", "`quantization` with torch before 2.13", READ_IN
)
"""The module that makes sharded parameters, which must be allowed to hold bytes."""
RESHARD = Name("torch.distributed.fsdp._runtime_utils:_reshard", _FSDP1, READ_IN)
"""Frees the gathered parameters of a unit."""
HANDLE = Attribute("torch.distributed.fsdp:FullyShardedDataParallel._handle", _FSDP1, READ_IN)
"""The flat parameter of a unit."""
FULL_PARAMETER = Attribute(
    "torch.distributed.fsdp._flat_param:FlatParameter._full_param_padded",
    _FSDP1,
    READ_IN,
    fallback=lambda _: None,
)
"""The gathered parameter. Fallback: None, as before the first forward, which creates it."""
LOCAL_SHARD = Attribute(
    "torch.distributed.fsdp._flat_param:FlatParameter._local_shard",
    _FSDP1,
    READ_IN,
    fallback=lambda _: None,
)
"""This rank's part of the flat parameter. Fallback: None, as before the first forward, until which the flat
parameter itself is this part."""
SAVED_GRADIENT = Attribute(
    "torch.distributed.fsdp._flat_param:FlatParameter._saved_grad_shard",
    _FSDP1,
    READ_IN,
    fallback=lambda _: None,
)
"""The gradient of this rank's part during the backward. Fallback: None, as outside of it."""
HYBRID_ZERO2 = Name(
    "torch.distributed.fsdp:ShardingStrategy._HYBRID_SHARD_ZERO2", "`HYBRID_SHARD_ZERO2` of FSDP1", READ_IN
)
"""The strategy that shards inside a machine and does not reshard after the forward."""


def _adamw(*lists: Any, **options: object) -> None:
    """Update as `torch._fused_adamw_` does, whose step counts have been increased already."""
    from torch.optim.adamw import adamw

    *tensors, steps = lists
    update: Any = adamw
    update(*tensors, [step - 1 for step in steps], foreach=False, **options)


FUSED_ADAMW = Name("torch:_fused_adamw_", "AdamW with moments of fewer bits", READ_IN, fallback=_adamw)
"""The kernel of AdamW on plain tensors. Fallback: torch's function for several kernels, equal up to the
rounding of fp32."""
ORTHOGONALISE = Name("torch.optim._muon:_zeropower_via_newtonschulz", "`training.optim: muon`", READ_IN)
ADJUST_RATE = Name("torch.optim._muon:_adjust_lr", "`training.optim: muon`", READ_IN)
"""The two functions of `torch.optim.Muon`."""
INIT_GROUP = Name("torch.optim:AdamW._init_group", "`training.optim: adamw`", READ_IN)
"""Overridden in `model/optim/adamw.py`: fills the lists for the kernel."""

DEVICE_TYPES = Attribute("torch.distributed:ProcessGroup._device_types", _LIMIT, READ_IN)
BACKEND = Attribute("torch.distributed:ProcessGroup._get_backend", _LIMIT, READ_IN)
BACKEND_TIMEOUT = Attribute("torch._C._distributed_c10d:Backend.Options._timeout", _LIMIT, READ_IN)
SET_TIMEOUT = Attribute("torch._C._distributed_c10d:Backend._set_default_timeout", _LIMIT, READ_IN)
"""The backends of a process group, and the time that their collectives may take."""
MESH_WITHOUT_GROUPS = Parameter(
    "torch.distributed.device_mesh:DeviceMesh.__init__._init_backend",
    "copying a checkpoint to the host",
    READ_IN,
)
"""False: a mesh only describes a layout, and no process groups are created."""
STORAGE_INFO = Name(
    "torch.distributed.checkpoint.filesystem:_StorageInfo", "resuming from a sharded checkpoint", READ_IN
)
"""The position of a tensor in the files of a checkpoint."""
NON_PERSISTENT = Attribute(
    "torch.nn:Module._non_persistent_buffers_set",
    "the digest of a checkpoint",
    READ_IN,
    fallback=lambda _: frozenset(),
)
"""Names of buffers that are not saved. Fallback: none, so that computed ones are part of the digest too."""
GRAPH_TASK = Name("torch:_C._current_graph_task_id", "the load of experts", READ_IN, fallback=None)
"""The number of the running backward, to recognise recomputed layers. Fallback: loads are not counted, so
that none counts twice."""


def _flight_records(kind: str) -> tuple[Name, Name]:
    names = (f"torch._C._distributed_c10d:_dump_{kind}_trace{form}" for form in ("", "_json"))
    whole, as_json = (Name(name, "the flight recorder", READ_IN, fallback=None) for name in names)
    return whole, as_json


# Each backend has its own recorder; on an accelerator, that of gloo would name CPU collectives only.
FLIGHT_RECORDS = {
    "cpu": _flight_records("fr"),
    "cuda": _flight_records("nccl"),
    "xpu": _flight_records("xccl"),
}
"""Functions that return the recent collectives, as torchfrtrace reads them and as JSON. Fallback: no record,
as in a build without them."""
