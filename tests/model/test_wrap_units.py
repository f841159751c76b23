"""FSDP2 units that are not a decoder layer's: parameters that a class keeps in fp32, and parameters of
bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from fsdp_tune.model.shard import wrap
from tests.model.test_kept_precision import ROUTER, recipe
from tests.ranks import Ranks


def kept_unit() -> tuple[dict[str, torch.dtype], float, list[str]]:
    """On a rank: the dtypes in which weights are gathered for a forward in bf16, the difference of the
    logits from those of the bare model, relative to the largest, and the modules that are units."""
    from fsdp_tune.model.loading.assemble import wrap_whole
    from fsdp_tune.model.loading.construct import build_full
    from fsdp_tune.model.shard.process_groups import make_mesh

    own = recipe("bf16", precision={"mixed_precision": "bf16"}, fsdp={"version": 2})
    torch.manual_seed(1)
    model, ids = build_full(own).eval(), torch.arange(12)[None] + 5 * dist.get_rank()
    with torch.no_grad():
        bare = model(input_ids=ids).logits.float()
    wrapped: Any = wrap_whole(own, model, make_mesh(own, "cpu"), torch.device("cpu")).wrapped
    gathered: dict[str, torch.dtype] = {}

    def note(name: str) -> Any:
        return lambda module, *_: gathered.update({name: module.weight.dtype})

    for name in (ROUTER[0].removesuffix(".weight"), "model.layers.1.self_attn.o_proj", "model.norm"):
        wrapped.get_submodule(name).register_forward_pre_hook(note(name))
    with torch.no_grad():
        difference = float((wrapped(input_ids=ids).logits.float() - bare).abs().max())
    units = [name for name, module in wrapped.named_modules() if isinstance(module, FSDPModule)]
    return gathered, difference / float(bare.abs().max()), units


@pytest.mark.ranks
def test_parameter_that_a_class_keeps_in_fp32_is_gathered_in_fp32_around_layers_in_bf16(
    on_ranks: Ranks,
) -> None:
    for gathered, difference, units in on_ranks.run(2, kept_unit):
        assert gathered == {
            "model.layers.1.mlp.gate": torch.float32,
            "model.layers.1.self_attn.o_proj": torch.bfloat16,
            "model.norm": torch.bfloat16,
        }
        assert difference < 1e-2
        assert {"", "model", "model.layers.0", "model.layers.1"} <= {*units}


def test_bytes_have_no_gradient_and_are_not_gathered_in_the_compute_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch before 2.13 makes each parameter one with a gradient, which bytes cannot have."""

    class FSDPParam:
        def __init__(self, dtype: torch.dtype) -> None:
            self.orig_dtype, self.param_dtype = dtype, None

        def init_dtype_attrs(self, policy: MixedPrecisionPolicy) -> None:
            self.param_dtype = policy.param_dtype

    module: Any = SimpleNamespace(nn=nn, FSDPParam=FSDPParam)
    monkeypatch.setattr(wrap.internals, "FSDP_PARAM", SimpleNamespace(get=lambda: module))
    original = FSDPParam.init_dtype_attrs
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    wrap.allow_integer_parameters.__wrapped__()
    assert (module.nn, FSDPParam.init_dtype_attrs) == (nn, original), "it needs nothing"
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    wrap.allow_integer_parameters.__wrapped__()
    assert module.nn.Module is nn.Module
    codes, weight = torch.zeros(2, dtype=torch.uint8), torch.zeros(2)
    made = [
        module.nn.Parameter(codes),
        module.nn.Parameter(weight),
        module.nn.Parameter(weight, requires_grad=False),
    ]
    assert [each.requires_grad for each in made] == [False, True, False]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for dtype, gathered in ((torch.uint8, None), (torch.float32, torch.bfloat16)):
        parameter = FSDPParam(dtype)
        parameter.init_dtype_attrs(policy)
        assert parameter.param_dtype == gathered
