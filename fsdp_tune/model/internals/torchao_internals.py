"""Private names of torchao. Each entry: what it is for and what needs it."""

from __future__ import annotations

from fsdp_tune.model.internals.internal import Attribute, Name

READ_IN = ("0.18",)
_FP8 = "`precision.mixed_precision: fp8`"

NEW_BUFFER = Name("torchao.optim.adam:_AdamBase._new_buffer", "`training.optim: adamw_torch_8bit`", READ_IN)
"""Overridden in `model/optim/adamw_in_blocks.py`: makes a moment of a parameter."""
OPERAND = Attribute("torchao.float8.float8_training_tensor:Float8TrainingTensor._data", _FP8, READ_IN)
"""The fp8 values of a matrix operand, whose own dtype is bf16."""
SHARD = Attribute("torchao.float8.fsdp_utils:WeightWithDynamicFloat8CastTensor._tensor", _FP8, READ_IN)
"""The shard of a weight that is gathered in fp8."""
GATHERED_DTYPE = Attribute(
    "torchao.float8.fsdp_utils:WeightWithDynamicFloat8CastTensor._dtype", _FP8, READ_IN
)
SCALE = Attribute(
    "torchao.float8.fsdp_utils:WeightWithDynamicFloat8CastTensor._precomputed_scale", _FP8, READ_IN
)
"""The dtype in which it is gathered, and the scale of the full weight."""
