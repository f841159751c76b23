"""The JSON documents of a run directory: how each is written and read, and those that a start of the run
leaves.

Each is a dataclass that writes and reads its own file, with a version of its fields. environment.json,
plan.json and readback.json have what a start of the run found on the machine, predicted, and found on the
ranks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from fsdp_tune.core.atomic import json_safe, write_json
from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.files import read_regular
from fsdp_tune.run.manifest import digest_of_values

DOCUMENT_DIGEST = "document_digest"
"""Key of a document's digest of its other values. Documents of earlier versions have none, and are not
compared."""


def read_object(path: Path) -> dict[str, object]:
    """Return the values of a document. Raises: OSError; ValueError if they are not those that were
    written."""
    return verified(json.loads(read_regular(path)))


def verified(raw: object) -> dict[str, object]:
    """Return the values of a document without their digest. Raises: ValueError if they are not those that
    were written."""
    if not isinstance(raw, dict):
        raise ValueError(f"it holds a {type(raw).__name__}, not an object")
    whole = cast(dict[str, object], raw)
    values = {name: value for name, value in whole.items() if name != DOCUMENT_DIGEST}
    if DOCUMENT_DIGEST in whole and whole[DOCUMENT_DIGEST] != _digest_of(values):
        raise ValueError("its values are not those that were written (digest differs)")
    return values


def _digest_of(values: dict[str, object]) -> str:
    return digest_of_values(json.loads(json.dumps(values)))  # as it will be read: with text keys


@dataclass(frozen=True, slots=True)
class Document:
    """Base of the documents. A field named `facts` holds every field of the file that has no field of its
    own."""

    VERSION: ClassVar[int] = 1
    """The version that is written, and the newest that is read. Files without one are of version 1."""
    IS_PRIVATE: ClassVar[bool] = False
    """Whether the file is readable by its owner only."""
    IS_WRITTEN_AGAIN: ClassVar[bool] = True
    """Whether each start of the run writes the file again as it was."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the file without its version."""
        own = {
            name: value.as_dict() if isinstance(value, PartialFacts) else value
            for name, value in asdict(self).items()
        }
        return own | own.pop("facts", {})

    @classmethod
    def from_dict(cls, raw: dict[str, object]) -> Self:
        """Return the document of `as_dict`. Raises: ValueError, TypeError or KeyError for other fields."""
        names = {field.name for field in fields(cls)}
        own = {name: value for name, value in raw.items() if name in names}
        if "facts" in names:
            own["facts"] = {name: value for name, value in raw.items() if name not in names}
        return _validator(cls).validate_python(own)

    def content(self) -> dict[str, object]:
        """Return the file as a JSON object, with a digest of its values; NaN and infinity are text in it."""
        values = json_safe({"version": self.VERSION, **self.as_dict()})
        return values | {DOCUMENT_DIGEST: _digest_of(values)}

    def write(self, path: Path) -> None:
        """Replace the file. Raises: OSError."""
        write_json(path, self.content(), private=self.IS_PRIVATE)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the document, or None if there is no file. Raises: usage error if the file is damaged or of
        a newer version."""
        try:
            raw: dict[str, Any] = json.loads(read_regular(path))
            version = int(raw.get("version", 1))
            if version > cls.VERSION:
                message = (
                    f"was written by a newer fsdp-tune (version {version}; this one reads up to "
                    f"{cls.VERSION})"
                )
                raise _unreadable(
                    path,
                    message,
                    "continue with the fsdp-tune that wrote it, or start over in another directory",
                )
            return cls.from_dict({name: value for name, value in verified(raw).items() if name != "version"})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reason = str(error).partition("\n")[0]
            remedy = (
                "remove it: each start of the run writes it again"
                if cls.IS_WRITTEN_AGAIN
                else "restore it from a copy of the directory"
            )
            raise _unreadable(path, f"is damaged: {reason}", remedy) from error


class PartialFacts(BaseModel):
    """Base of what a document contains, if some fields do not always apply, or are not in the files of
    earlier versions.

    A field that is absent has its default, and `as_dict` leaves it out.
    """

    model_config = ConfigDict(frozen=True)

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


@functools.cache
def _validator(kind: type[Document]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _unreadable(path: Path, message: str, hint: str) -> FsdpTuneError:
    return usage_error("run-unreadable", message, hint=hint, where=Where(str(path)))


@dataclass(frozen=True, slots=True)
class Environment(Document):
    """environment.json: the machine of the command, at each start."""

    IS_PRIVATE: ClassVar[bool] = True

    versions: dict[str, Any] = field(default_factory=dict[str, Any])
    host: dict[str, Any] = field(default_factory=dict[str, Any])
    devices: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """`kind`, `name` and `memory_bytes` of each visible device."""
    extensions: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """Fields of `recipe.extensions.Extension`."""
    base: str | None = None
    """`run.base_model.identify_weights` of the model that the run starts from; None with random weights."""


class PredictedFigure(NamedTuple):
    """A figure of a plan next to the measured one."""

    name: str
    unit: str
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class Prediction(Document):
    """plan.json: the plan of this recipe for this machine's GPU. Figures that are unknown are None."""

    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    step_seconds: float | None = None
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """All other fields of `planner.predict.predict.Plan`."""

    def compared(self, line: Mapping[str, Any]) -> list[PredictedFigure]:
        """Return each figure that the plan and a training line of metrics.jsonl have."""
        figures = (("peak_allocated_gib", "GiB"), ("peak_reserved_gib", "GiB"), ("step_seconds", "s"))
        found = [(name, unit, getattr(self, name), line.get(name)) for name, unit in figures]
        return [
            PredictedFigure(name, unit, predicted, measured)
            for name, unit, predicted, measured in found
            if predicted is not None and measured
        ]


OneOrAll = str | list[str] | None
"""A value that all of several objects have, or all their values, sorted."""


class UnitState(PartialFacts):
    """An FSDP unit. FSDP1 has names of classes in `modules`, and `strategy`; FSDP2 has the rest."""

    modules: list[str]
    strategy: str | None = None
    parameters: int = 0
    """On this rank."""
    is_trained: bool = False
    reshard_after_forward: bool | int = False
    param_dtype: OneOrAll = None
    reduce_dtype: OneOrAll = None
    output_dtype: OneOrAll = None
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    """Number of units that are gathered ahead."""


class GroupState(PartialFacts):
    """A parameter group of the optimizer."""

    learning_rate: float
    """At its peak."""
    weight_decay: float
    tensors: int
    update: str | None = None
    """Of Muon: muon or adamw."""
    first: str | None = None
    """Name of a tensor in it."""


class ChosenKernel(PartialFacts):
    value: str
    reason: str


class Fp8State(PartialFacts):
    linears: int = 0
    """Of this rank's model, that compute in fp8."""
    scales: list[str] = Field(default_factory=list[str])
    emulated: list[bool] = Field(default_factory=list[bool])
    gathered: int = 0
    """Weights that are gathered in fp8."""


class QuantisedTrainingState(PartialFacts):
    weights: dict[str, int] = Field(default_factory=dict[str, int])
    """Linear layers of this rank's model that train with emulated quantisation, by the values of their
    weights: dtype and group."""
    inputs: dict[str, int] = Field(default_factory=dict[str, int])
    """Those whose inputs are rounded too, by dtype and the values that share a scale."""


class PluginState(PartialFacts):
    """Fields of Accelerate's plugin, as text."""

    fsdp_version: int
    reshard_after_forward: str
    state_dict_type: str
    cpu_offload: bool


class LiveState(PartialFacts):
    """What a rank reads from its live objects before step 1. Sizes are those of this rank; fields without a
    comment mean what the recipe's keys of the same name mean, or what FSDP's classes do."""

    wrapper: str = ""
    """fsdp2, fsdp1, ddp, or the class of another wrapper."""
    world_size: int = 0
    mesh: list[int] = Field(default_factory=list[int])
    sequence_group: int = 0
    """Number of ranks that share a row."""
    expert_group: int | list[str] = 1
    """Number of ranks that divide the experts of a layer and exchange tokens."""
    exchanging_ranks: dict[str, list[int]] = Field(default_factory=dict[str, list[int]])
    """Of modules whose experts are divided: the ranks among which the live forward exchanges tokens, by name
    of the module."""
    own_experts: dict[str, list[int]] = Field(default_factory=dict[str, list[int]])
    """Of divided experts: the first and the end of those that this rank holds, by name of the parameter."""
    offload_params: bool = False
    global_batch_size: int = 0
    gradient_accumulation_steps: int = 0
    micro_batch: int = 0
    attention: str | dict[str, str] = ""
    experts: list[str] = Field(default_factory=list[str])
    """The kernels of stacked experts; empty if no class of experts lets one choose."""
    parameters: int = 0
    trained_parameters: int = 0
    """Of the whole model."""
    model_bytes: int = 0
    """Likewise."""
    largest_tensor_bytes: int = 0
    """Of the largest parameter, which a rank may receive in one piece before it keeps its part."""
    local_bytes: int = 0
    peak_growth_bytes: int = 0
    """Growth of the peak resident memory while loading."""
    trained: dict[str, int] = Field(default_factory=dict[str, int])
    """Number of trained tensors by dtype."""
    parameter_dtype: OneOrAll = None
    """Of trained parameters, without those that the model's class keeps in fp32."""
    kept_in_fp32: dict[str, int] = Field(default_factory=dict[str, int])
    """Number of parameters and buffers that the model's class keeps in fp32, by their dtype in the run."""
    cast_although_kept: list[str] = Field(default_factory=list[str])
    """First modules of the units of such parameters that are gathered in another dtype."""
    frozen_dtypes: list[str] = Field(default_factory=list[str])
    tokens_per_step_at_most: int = 0
    data_order_digest: str = ""
    optimizer: str | None = None
    parameter_groups: list[GroupState] = Field(default_factory=list[GroupState])
    plugin: PluginState | None = None
    activation_checkpointing: OneOrAll = None
    recomputed_layers: int = 0
    frozen_by_its_code: list[str] = Field(default_factory=list[str])
    tied: bool = False
    kernels: dict[str, ChosenKernel] = Field(default_factory=dict[str, ChosenKernel])
    """By recipe key."""
    loss_kernel: str = ""
    liger_modules: int = 0
    mlp_slice_tokens: list[int] = Field(default_factory=list[int])
    compiled_layers: int = 0
    fp8: Fp8State = Field(default_factory=Fp8State)
    quantised_training: QuantisedTrainingState = Field(default_factory=QuantisedTrainingState)
    weights_loaded_by: str = ""
    process_groups: int = 0
    collective_limits_seconds: list[float] = Field(default_factory=list[float])
    placements: list[str] = Field(default_factory=list[str])
    """Of each mesh dimension."""
    reshard_after_forward: bool | int | list[str] | None = None
    """Of layers; None where nothing is freed between forward and backward."""
    reshard_after_backward: bool | list[str] | None = None
    """Of all micro-batches of a step but the last; None but for FSDP2."""
    compute_dtype: OneOrAll = None
    reduce_dtype: OneOrAll = None
    output_dtype: OneOrAll = None
    units: list[UnitState] = Field(default_factory=list[UnitState])
    sharded: int = 0
    """Number of sharded tensors, of FSDP1 units."""
    sharded_inside: list[str] | None = None
    """Stacks of experts that are sharded inside of each expert; None but for FSDP2, as the fields below."""
    not_sharded: list[str] = Field(default_factory=list[str])
    forward_prefetch: int | None = None
    backward_prefetch: int | str | None = None
    prefetching_units: int | None = None
    prefetching_units_of_backward: int | None = None


@dataclass(frozen=True, slots=True)
class ReadBack(Document):
    """readback.json: the live state of the ranks and how it differs from the recipe. Rank 0 writes it, and
    completes it in step 1."""

    ranks: list[dict[str, int]]
    """Bytes of the shard, and growth of the peak resident memory while loading, by rank."""
    differences: list[str]
    warnings: list[str]
    causality_deviation: float | None = None
    """Largest change of an output when later tokens change; None if it could not be measured."""
    packing_deviation: float | None = None
    """Largest change of an output when other examples of a packed row change, likewise."""
    ran_in: dict[str, object] | None = None
    """Dtypes of the first micro-batch."""
    optimizer_state_bytes: dict[str, int] | None = None
    witness: dict[str, object] | None = None
    facts: LiveState = field(default_factory=LiveState)
    """All other fields of the file, of rank 0."""

    @classmethod
    def complete(cls, path: Path, *, warnings: Sequence[str] = (), **values: object) -> None:
        """Set further fields of the file and add `warnings`, if it exists."""
        if (found := cls.read(path)) is not None:
            replace(found, warnings=[*found.warnings, *warnings], **values).write(path)
