"""Token mixers, such as linear attention, state spaces and short convolutions, on packed rows: each example
by itself.

A mixer reads the tokens before it from a state of its own, which no mask interrupts. So its forward is called
for the documents of a row in place of the row: the states start from nothing at each, whatever the mixer
computes and with any kernel. Where all of its kernels take the lengths of the documents, they get those, and
the mixer is called once.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fsdp_tune.core.errors import Notice, Where, usage_error
from fsdp_tune.core.families import CACHE_ARGUMENTS, EXAMPLE_LENGTHS
from fsdp_tune.model.internals.transformers_internals import kernel_with_fallback
from fsdp_tune.model.model_files import KernelChoice
from fsdp_tune.model.nested_tensors import tensors_in
from fsdp_tune.model.packed_documents import Documents, Span, known_documents
from fsdp_tune.model.shard.fsdp_units import plan_units
from fsdp_tune.model.shard.local import bare_class
from fsdp_tune.recipe.rules.limits import computes_in_fp8
from fsdp_tune.recipe.schema.recipe import Recipe

MOST_PADDING = 0.25
"""Documents that are computed together are padded to the longest of them, by this share of their tokens at
most."""
_ATTENTION = frozenset(
    {"ALL_ATTENTION_FUNCTIONS", "eager_attention_forward", "scaled_dot_product_attention", "softmax", "topk"}
)
"""Names in the code of attention, and of what chooses its keys, which separate examples by a mask or by their
lengths."""


def find_mixers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the mixers of a model by name: the outermost modules inside a layer that need earlier tokens and
    hold no attention.

    A module that needs earlier tokens takes the cache, from which it reads them when it generates. Attention
    is a mixer too if it holds a module that pools or chooses keys without the mask, which alone would tell it
    the examples.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found) or not _takes_cache(module):
            continue
        if not any(
            _is_layer(inner) or _is_attention(inner) for inner in module.modules()
        ) or _reads_without_mask(module):
            found[name] = module
    return found


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, GradientCheckpointingLayer | PreTrainedModel)


def _takes_cache(module: nn.Module) -> bool:
    return not CACHE_ARGUMENTS.isdisjoint(inspect.signature(bare_class(module).forward).parameters)


def _takes_mask(module: nn.Module) -> bool:
    return "attention_mask" in inspect.signature(bare_class(module).forward).parameters


def _reads_without_mask(module: nn.Module) -> bool:
    """Return whether a module is attention whose keys are pooled (DeepSeek V4) or chosen (MiniMax M3) by a
    module that takes no mask."""
    if _is_layer(module) or not (_is_attention(module) and _takes_mask(module)):
        return False
    inside = [
        inner
        for inner in module.modules()
        if inner is not module and _takes_cache(inner) and _is_attention(inner)
    ]
    return any(not _takes_mask(inner) for inner in inside)


def find_selectors(model: nn.Module) -> dict[str, nn.Module]:
    """Return by name the modules inside attention that read earlier tokens themselves: they choose or pool
    its keys."""
    readers = {
        name: module
        for name, module in model.named_modules()
        if _takes_cache(module) and not _is_layer(module)
    }
    attention = [name for name, module in readers.items() if _is_attention(module)]
    return {
        name: module
        for name, module in readers.items()
        if any(name.startswith(f"{outer}.") for outer in attention)
    }


@functools.cache
def _names_in_code(module_class: type[nn.Module]) -> frozenset[str]:
    """Return the names that the methods of a class use, without those of `nn.Module`."""
    return frozenset(name for code in _codes_of(module_class) for name in code.co_names)


@functools.cache
def _arguments_in_code(module_class: type[nn.Module]) -> frozenset[str]:
    """Return the arguments that the methods of a class may read: their parameters, and the texts in their
    code, as of `kwargs.get`."""
    codes = list(_codes_of(module_class))
    texts = (each for code in codes for each in code.co_consts if isinstance(each, str))
    return frozenset([*(name for code in codes for name in code.co_varnames), *texts])


def _codes_of(module_class: type[nn.Module]) -> Iterator[CodeType]:
    """Yield the code of each method of a class and of those that it extends, without those of torch."""
    own = (
        each
        for each in module_class.__mro__
        if issubclass(each, nn.Module) and not each.__module__.startswith("torch.")
    )
    yield from (
        inspect.unwrap(value).__code__
        for each in own
        for value in vars(each).values()
        if inspect.isfunction(value)
    )


def _is_attention(module: nn.Module) -> bool:
    return not _ATTENTION.isdisjoint(_names_in_code(bare_class(module)))


def takes_lengths(mixer: nn.Module) -> bool:
    """Return whether the kernels of a mixer are those of packages that take the lengths of documents, which
    its code passes on.

    A call with `**kwargs` passes on what the kernel names alike, `seq_idx`. The code must pass
    `cu_seq_lens_q` as `cu_seqlens`, which Kimi Linear does not.
    """
    parameters = inspect.signature(bare_class(mixer).forward).parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        return False
    used = _names_in_code(bare_class(mixer))
    functions = [
        value for name, value in vars(sys.modules[bare_class(mixer).__module__]).items() if name in used
    ]
    kernels = [
        kernel
        for function in functions
        if (kernel := kernel_with_fallback(function)) is not None and kernel.trains
    ]
    read = _arguments_in_code(bare_class(mixer))
    return bool(kernels) and all(
        "seq_idx" in kernel.lengths or (kernel.lengths and "cu_seq_lens_q" in read) for kernel in kernels
    )


def packs(recipe: Recipe) -> bool:
    """Return whether rows of training or of an evaluation hold several examples."""
    return recipe.data.packing or bool(recipe.data.eval_packing)


def choose_packing(recipe: Recipe, model: nn.Module) -> dict[str, KernelChoice]:
    """Return how the mixers of a model keep packed examples apart, by recipe key; empty if it has none, or
    rows are not packed.

    Raises: usage error with `kernels.compile`, which would compile another graph for every set of lengths.
    """
    mixers = find_mixers(model) if packs(recipe) else {}
    if not mixers:
        return {}
    kinds = sorted({bare_class(mixer).__name__ for mixer in mixers.values()})
    if recipe.kernels.compile:
        message = (
            f"`kernels.compile` with packed rows: {' and '.join(kinds)} would need another graph for "
            "every set of lengths of examples"
        )
        raise usage_error(
            "packing-not-compiled",
            message,
            where=Where(key="kernels.compile"),
            hint="--set kernels.compile=false",
        )
    if all(takes_lengths(mixer) for mixer in mixers.values()):
        return {
            "data.packing": KernelChoice(
                "by lengths", f"the kernels of {', '.join(kinds)} take the lengths of examples"
            )
        }
    _refuse_units_inside(recipe, model, mixers)
    price = f"one call for examples of similar length, with at most {MOST_PADDING:.0%} more tokens"
    return {
        "data.packing": KernelChoice(
            "by example",
            f"{', '.join(kinds)} compute{'s' if len(kinds) == 1 else ''} each example alone: {price}",
        )
    }


def _refuse_units_inside(recipe: Recipe, model: nn.Module, mixers: Iterable[str]) -> None:
    """Refuse FSDP units inside mixers that are called for groups of examples: ranks have different rows, and
    would gather them in different numbers, so that they wait for each other or take another unit's
    parameters."""
    if not recipe.is_sharded or recipe.world_size == 1:
        return
    inside = tuple(f"{name}." for name in mixers)
    groups = plan_units(recipe, cast(PreTrainedModel, model)).groups
    if (
        unit := next((name for group in groups for name in group if name.startswith(inside)), None)
    ) is not None:
        raise usage_error(
            "contradiction",
            "`data.packing` calls a mixer once for each group of examples, and `fsdp.auto_wrap_policy: "
            f"{recipe.fsdp.auto_wrap_policy}` makes a unit of `{unit}` inside, which ranks would gather in "
            "different numbers",
            where=Where(key="fsdp.auto_wrap_policy"),
            hint="--set fsdp.auto_wrap_policy=TRANSFORMER_BASED_WRAP",
        )


def packing_notices(choice: KernelChoice | None) -> list[Notice]:
    """Return a notice of what packing costs a model whose mixers are called by example. `choice`: that of
    `choose_packing`."""
    if choice is None or choice.value != "by example":
        return []
    return [Notice("packing-by-example", choice.reason, where=Where(key="data.packing"))]


def separate_packed(recipe: Recipe, model: nn.Module) -> None:
    """Make the mixers of a model compute the examples of packed rows, if the recipe packs rows."""
    if packs(recipe):
        separate_documents(model, recipe.data.pad_to_multiple_of if computes_in_fp8(recipe) else 1)


def separate_documents(model: nn.Module, multiple_of: int = 1) -> dict[str, nn.Module]:
    """Make the mixers of a model compute the documents of packed rows, padded to a multiple of tokens. Return
    them by name."""
    mixers = find_mixers(model)
    for mixer in mixers.values():
        call_by_documents(mixer, multiple_of)
    return mixers


def call_by_documents(mixer: nn.Module, multiple_of: int = 1) -> None:
    """Make a mixer compute the documents of packed rows, while they are known
    (`packed_documents.packing_known`), in place of the rows."""
    forward = mixer.forward
    call = (
        _at_once
        if takes_lengths(mixer)
        else functools.partial(_in_groups, multiple_of, _reads_without_mask(mixer))
    )

    @functools.wraps(forward)
    def by_documents(*args: object, **kwargs: object) -> object:
        documents = known_documents()
        return forward(*args, **kwargs) if documents is None else call(forward, documents, args, kwargs)

    mixer.forward = by_documents  # type: ignore[method-assign]


def _at_once(
    forward: Callable[..., object], documents: Documents, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Call the forward for all rows as one, and pass on where its documents end."""
    rows, tokens = documents.position_ids.shape

    def flat(value: object) -> object:
        if (
            isinstance(value, torch.Tensor)
            and value.ndim > 1
            and value.shape[1] == tokens
            and value.shape[0] in (1, rows)
        ):
            return value.expand(rows, *value.shape[1:]).flatten(0, 1)[None]
        return value

    args, kwargs = _mapped(flat, (args, _without_lengths(kwargs)))
    found = forward(*args, **kwargs, **documents.lengths)
    return _mapped(
        lambda value: value[0].unflatten(0, (rows, tokens)) if isinstance(value, torch.Tensor) else value,
        found,
    )


def _in_groups(
    multiple_of: int,
    keeps_mask: bool,  # noqa: FBT001  bound by `functools.partial`
    forward: Callable[..., object],
    documents: Documents,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Call the forward once for each group of documents of similar length, padded on the right, which a
    causal mixer does not read.

    Of the mask of attention it gets the part of each document if it `keeps_mask`, else none.
    """
    spans, given = documents.spans, (args, _without_lengths(kwargs))
    groups = groups_of_lengths([span.tokens for span in spans])
    shape = documents.position_ids.shape
    cut = functools.partial(_cut, shape, keeps_mask)
    outputs = [
        _called(forward, given, [spans[index] for index in group], cut, multiple_of) for group in groups
    ]
    return _joined([found for found, _ in outputs], outputs[0][1], groups, documents)


def _called(
    forward: Callable[..., object],
    given: tuple[tuple[object, ...], dict[str, object]],
    spans: Sequence[Span],
    cut: Callable[[Sequence[Span], int, object], object],
    multiple_of: int,
) -> tuple[object, int]:
    """Return the output for the documents of `spans`, and the number of tokens to which they were padded.

    Dimension 1 or 2 of an output has the tokens. If both are as long, the one that has heads or features does
    not grow with more padding, so the call is repeated with some. An output that is square at two lengths has
    the tokens in both dimensions, as scores of attention do.
    """
    longest = -(-max(span.tokens for span in spans) // multiple_of) * multiple_of
    square: set[int] = set()
    while True:
        args, kwargs = _mapped(functools.partial(cut, spans, longest), given)
        found = forward(*args, **kwargs)
        now = {at for at, each in enumerate(tensors_in(found)) if each.shape[1:3] == (longest, longest)}
        if now <= square:
            return found, longest
        square |= now
        longest += multiple_of


def _without_lengths(kwargs: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in kwargs.items() if name not in EXAMPLE_LENGTHS}


def _cut(shape: torch.Size, keeps_mask: bool, spans: Sequence[Span], longest: int, value: object) -> object:  # noqa: FBT001
    """Return [documents, longest, ...] of a tensor [rows or 1, tokens, ...]; anything else is the same for
    all documents.

    The mask of attention, [rows, heads, tokens, tokens], which some layers pass to each of their modules, is
    left out unless `keeps_mask`.
    """
    if not isinstance(value, torch.Tensor):
        return value
    rows, tokens = shape
    if value.ndim == 4 and value.shape[-2:] == (tokens, tokens):
        if not keeps_mask:
            return None
        parts = [
            (value[span.row % value.shape[0]], slice(span.start, span.start + span.tokens)) for span in spans
        ]
        return torch.stack([_padded_mask(mask[:, part, part], longest) for mask, part in parts])
    if value.ndim < 2 or value.shape[1] != tokens or value.shape[0] not in (1, rows):
        return value
    documents = [value[span.row % value.shape[0], span.start : span.start + span.tokens] for span in spans]
    return torch.stack([_padded(document, longest) for document in documents])


def _padded(document: torch.Tensor, longest: int) -> torch.Tensor:
    """Return a document with its last token repeated, without gradients: no value is unusual, so that no
    gradient is NaN times zero."""
    missing = longest - len(document)
    return (
        torch.cat([document, document[-1:].detach().expand(missing, *document.shape[1:])])
        if missing
        else document
    )


def _padded_mask(mask: torch.Tensor, longest: int) -> torch.Tensor:
    """Return a mask [heads, tokens, tokens], boolean or added to scores, with padding that no token attends
    to, and that attends as the last token."""
    missing = longest - mask.shape[-1]
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    keys = torch.cat([mask, mask.new_full((*mask.shape[:-1], missing), hidden)], -1)
    return torch.cat([keys, keys[:, -1:].expand(-1, missing, -1)], 1)


def _joined(
    found: Sequence[Any], longest: int, groups: Sequence[Sequence[int]], documents: Documents
) -> object:
    """Return the output for the rows from those for each group of documents. `longest`: the tokens of the
    first group.

    A tensor has its tokens in dimension 1, or after the heads. One without tokens is a state, which only
    generation reads: None.
    """
    first = found[0]
    if isinstance(first, dict):
        return {name: _joined([each[name] for each in found], longest, groups, documents) for name in first}
    if isinstance(first, tuple | list):
        return tuple(_joined(parts, longest, groups, documents) for parts in zip(*found, strict=True))
    if not isinstance(first, torch.Tensor):
        return first
    dim = next((dim for dim in (1, 2) if first.ndim > dim and first.shape[dim] == longest), None)
    if dim is None:
        return None
    where = {index: (number, at) for number, group in enumerate(groups) for at, index in enumerate(group)}
    pieces: list[torch.Tensor] = []
    for index, (_, _, length) in enumerate(documents.spans):
        number, at = where[index]
        pieces.append(found[number][at].narrow(dim - 1, 0, length))
    if len({(*piece.shape[: dim - 1], *piece.shape[dim:]) for piece in pieces}) > 1:
        return None  # weights of attention, with tokens in another dimension too, which nothing reads
    return torch.cat(pieces, dim - 1).unflatten(dim - 1, documents.position_ids.shape).movedim(dim - 1, 0)


def _mapped(function: Callable[[object], object], value: object) -> Any:
    """Return arguments or outputs with `function` of each value in their tuples, lists and dictionaries."""
    if isinstance(value, dict):
        return {name: _mapped(function, each) for name, each in value.items()}
    return (
        tuple(_mapped(function, each) for each in value)
        if isinstance(value, tuple | list)
        else function(value)
    )


def groups_of_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of documents in groups that waste at most `MOST_PADDING` of their tokens when padded
    to the longest."""
    groups: list[list[int]] = []
    longest = filled = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not groups or longest * (len(groups[-1]) + 1) > (1 + MOST_PADDING) * (filled + lengths[index]):
            groups.append([])
            longest, filled = lengths[index], 0
        groups[-1].append(index)
        filled += lengths[index]
    return groups
