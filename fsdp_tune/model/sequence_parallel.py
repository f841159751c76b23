"""Sequence parallelism by all-to-all over attention heads (Ulysses, arXiv:2309.14509): several ranks share
each row.

Each rank of a sequence group has T / size neighbouring tokens of every row. Only attention looks across
tokens, so only attention is changed: queries, keys and values go from (all heads, own tokens) to (own heads,
all tokens) in one all-to-all, the model's kernel runs unchanged, and its output returns in another. Masks are
made for complete rows. The kernel and the mask function are replaced under their own names and only inside
`rows_known`, so forwards outside of it (generation) compute complete rows on each rank.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.core.families import SINKS, dropout_fields, heads_by_layer
from fsdp_tune.model.internals.transformers_internals import (
    FIND_PACKED_IN_PART,
    SUPPORTS_INTERFACE,
    attention_of,
)
from fsdp_tune.model.packed_documents import masks_of_documents, packing_known
from fsdp_tune.model.packed_mixers import find_mixers, find_selectors
from fsdp_tune.model.shard.exchange import exchange
from fsdp_tune.model.shard.local import ModuleView, bare_class, bare_model
from fsdp_tune.model.shard.process_groups import groups_of
from fsdp_tune.recipe.schema.recipe import Recipe


@dataclass(frozen=True, slots=True)
class SharedRows:
    """The rows of a micro-batch that a sequence group shares, as attention needs them."""

    group: dist.ProcessGroup
    position_ids: torch.Tensor
    """[rows, tokens], of complete rows."""

    def own_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor [rows, tokens]."""
        parts, rest = divmod(tensor.shape[1], self.group.size())
        assert rest == 0, "rows are padded to a multiple of `sp_size`"
        return tensor.narrow(1, self.group.rank() * parts, parts).contiguous()

    def all_tokens(self, own: torch.Tensor) -> torch.Tensor:
        """Return [rows, tokens, ...] from this rank's part, without gradients. Collective."""
        parts = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        return torch.cat(parts, 1)


_shared: SharedRows | None = None
"""The rows of the current forward and backward. A global: CUDA's backward, which recomputes layers, runs in
another thread."""


def shared_rows() -> SharedRows | None:
    """Return the rows of the current forward if a sequence group shares them."""
    return _shared


def sequence_group_of(wrapped: nn.Module) -> dist.ProcessGroup | None:
    """Return the group of ranks that share rows, of a (wrapped) model; None if each rank has its own."""
    return groups_of(wrapped).get("sequence")


@contextlib.contextmanager
def rows_known(wrapped: nn.Module, batch: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within the context, which must hold the backward too, `wrapped` computes the rows of `batch`; a
    sequence group shares them."""
    group, positions = sequence_group_of(wrapped), batch.get("position_ids")
    if group is None:
        with packing_known(positions, attention_of(bare_model(wrapped).config)):
            yield
        return
    ids = batch["input_ids"]
    complete = (
        torch.arange(ids.shape[1], device=ids.device).expand_as(ids) if positions is None else positions
    )
    kernel = attention_of(bare_model(wrapped).config)
    FIND_PACKED_IN_PART.get()
    # transformers must not look for packed examples itself: it would see this rank's tokens only.
    with (
        packing_known(None, kernel),
        masks_of_documents(kernel, positions, ids.shape[1]),
        _sharing(SharedRows(group, complete), kernel),
    ):
        yield


@contextlib.contextmanager
def _sharing(rows: SharedRows, kernel: str) -> Iterator[None]:
    global _shared
    # FlashAttention looks up its code by the name in the configuration, so names stay. Entries of the object
    # hide those of the class.
    ALL_ATTENTION_FUNCTIONS[kernel], _shared = _over_ranks(ALL_ATTENTION_FUNCTIONS.get(kernel), rows), rows
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[kernel]
        _shared = None


def to_heads(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Exchange each [rows, heads, own tokens, width] for [rows, own heads, tokens, width], all of them at
    once."""
    # [rank, own tokens, rows, own heads × width]
    parts = [tensor.unflatten(1, (group.size(), -1)).permute(1, 3, 0, 2, 4).flatten(3) for tensor in tensors]
    received = exchange(torch.cat(parts, -1), group).flatten(0, 1)  # ranks have neighbouring tokens
    found = received.split([part.shape[-1] for part in parts], -1)
    return [
        part.unflatten(-1, (-1, tensor.shape[-1])).permute(1, 2, 0, 3)
        for part, tensor in zip(found, tensors, strict=True)
    ]


def to_tokens(output: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange the output of a kernel, [rows, tokens, own heads, width], for [rows, own tokens, heads,
    width]."""
    # [rank, own tokens, rows, own heads, width]
    parts = output.unflatten(1, (group.size(), -1)).permute(1, 2, 0, 3, 4)
    return exchange(parts, group).permute(2, 1, 0, 3, 4).flatten(2, 3).contiguous()


Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""transformers' attention function: (module, query, key, value, mask, **options) → output [rows, tokens,
heads, width] and weights."""


def _over_ranks(kernel: Attention | None, rows: SharedRows) -> Attention:
    """Return the kernel for queries, keys and values of this rank's tokens. None stands for `eager`, which
    each model defines itself."""
    group, size = rows.group, rows.group.size()

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        inner = kernel or sys.modules[bare_class(module).__module__].eager_attention_forward
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads % size:
            raise _heads_do_not_divide(heads, size)
        copies = size // math.gcd(size, kv_heads)  # of each kv head, so that the ranks divide their number
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        replaced: dict[str, object] = {"num_key_value_groups": heads // (kv_heads * copies)}
        argument, attribute = SINKS
        if isinstance(sinks := kwargs.get(argument), torch.Tensor):
            kwargs[argument] = replaced[attribute] = sinks.chunk(size)[group.rank()]
        kwargs["position_ids"] = rows.position_ids
        query, key, value = to_heads([query, key, value], group)
        output, _ = inner(ModuleView(module, **replaced), query, key, value, attention_mask, **kwargs)
        return to_tokens(output, group), None

    return attention


@contextlib.contextmanager
def attention_disabled(wrapped: nn.Module) -> Iterator[None]:
    """Within the context each token sees only itself in attention, so that a token that still sees others
    sees them elsewhere."""

    def own_value(
        _module: object, query: torch.Tensor, _key: object, value: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, None]:
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None

    kernel = attention_of(bare_model(wrapped).config)
    ALL_ATTENTION_FUNCTIONS[kernel] = own_value
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[kernel]


def require_shareable_rows(recipe: Recipe, model: PreTrainedModel) -> None:
    """Check what the configuration shows before weights are loaded; `worker.readback.isolation` compares
    logits. Raises: usage error."""
    size = recipe.topology.sequence
    if size == 1:
        return
    if not SUPPORTS_INTERFACE.of(model):
        raise _not_shareable(
            f"{type(model).__name__} does not use transformers' attention interface in every layer"
        )
    if (own := next(filter(_has_own_table, map(bare_class, model.modules())), None)) is not None:
        raise _not_shareable(
            f"{own.__name__} takes its attention kernel from a table of its own, which no "
            "exchange of tokens reaches"
        )
    if across := find_mixers(model) | find_selectors(model):
        name, module = next(iter(across.items()))
        raise _not_shareable(
            f"`{name}` ({bare_class(module).__name__}) reads earlier tokens itself, and would get "
            "those of one rank alone"
        )
    if indivisible := next((heads for heads, _ in heads_by_layer(model.config) if heads % size), None):
        raise _heads_do_not_divide(indivisible, size)
    if dropout := dropout_fields(model.config.get_text_config().to_dict()):
        hint = " ".join(f"--set model.config_overrides.{name}=0" for name in dropout)
        raise _not_shareable(
            f"it has dropout ({', '.join(dropout)}), and a token's mask would depend on the rank "
            "that holds the token",
            hint,
        )


_TABLE = "ALL_ATTENTION_FUNCTIONS"


@functools.cache
def _has_own_table(module_class: type[nn.Module]) -> bool:
    """Return whether a class takes its attention kernel from another table than transformers', as Doge does:
    it would get masks of complete rows with the tokens of one rank."""
    methods = (
        inspect.unwrap(value)
        for each in module_class.__mro__
        for value in vars(each).values()
        if inspect.isfunction(value)
    )
    return any(
        _TABLE in method.__code__.co_names and method.__globals__.get(_TABLE) is not ALL_ATTENTION_FUNCTIONS
        for method in methods
    )


def _heads_do_not_divide(heads: int, size: int) -> FsdpTuneError:
    divisors = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
    return _not_shareable(
        f"its {heads} attention heads do not divide by {size}", f"write a divisor of {heads}: {divisors}"
    )


def _not_shareable(reason: str, hint: str | None = None) -> FsdpTuneError:
    return usage_error(
        "rows-not-shareable", f"`parallelism.sp_size` does not support this model: {reason}", hint=hint
    )
