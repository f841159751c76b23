"""The documents of packed rows, for everything in a model that looks across tokens: masks are made for them,
and mixers are called by them.

Whether position ids restart is known on the host. transformers checks it on the device, in each forward and
flash layer, and each check waits until the device has finished all queued work. Several classes also make
their masks without position ids (gpt-oss, OPT). So the masks of packed rows are made here, in the mask
function of the model's kernel, for every class alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from fsdp_tune.model.internals.transformers_internals import FIND_PACKED, IS_PACKED


class Span(NamedTuple):
    """The tokens of one example in a batch."""

    row: int
    start: int
    tokens: int


Pattern = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A mask function of transformers' `masking_utils`: indices of row, head, query and key → whether the query
attends to the key."""


@dataclass(frozen=True)
class Documents:
    """The examples of a micro-batch of packed rows. The padding at the end of a row is one too."""

    position_ids: torch.Tensor
    """[rows, tokens], counting from 0 in each example."""

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Of each example, in order. The first access waits for the device."""
        tokens = self.position_ids.shape[1]
        # also at the first token of a row
        restarts = self.position_ids.diff(dim=1, prepend=self.position_ids[:, :1] - 2) != 1
        starts: list[list[int]] = restarts.nonzero().tolist()
        ends = [
            start if row == of else tokens
            for (of, _), (row, start) in zip(starts, [*starts[1:], [-1, 0]], strict=True)
        ]
        return tuple(Span(row, start, end - start) for (row, start), end in zip(starts, ends, strict=True))

    @cached_property
    def lengths(self) -> dict[str, torch.Tensor | int]:
        """The arguments of kernels for the batch as one row: where its documents end, and the index of each
        token's document."""
        lengths = torch.tensor([span.tokens for span in self.spans])
        ends = (
            torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32).to(self.position_ids.device)
        )
        index = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths)[None].to(
            self.position_ids.device
        )
        longest = int(lengths.max())
        return {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
            "seq_idx": index,
        }


_documents: Documents | None = None
"""The documents of the current forward and backward. A global: CUDA's backward, which recomputes layers, runs
in another thread."""


def known_documents() -> Documents | None:
    """Return the documents of the current forward; None if its rows are not packed, or a sequence group
    shares them."""
    return _documents


@contextlib.contextmanager
def packing_known(position_ids: torch.Tensor | None, kernel: str) -> Iterator[None]:
    """Within the context, models with the attention `kernel` compute packed rows with these position ids
    [rows, tokens].

    None: each row of the batch is one example. The context must hold the backward too.
    """
    global _documents
    if position_ids is None:
        with FIND_PACKED.replaced(_none), IS_PACKED.replaced(_no):
            yield
        return
    before, _documents = _documents, Documents(position_ids)
    try:
        if FIND_PACKED.exists():
            with FIND_PACKED.replaced(_none), masks_of_documents(kernel, position_ids, position_ids.shape[1]):
                yield
        else:
            yield  # transformers looks for packed rows itself, under another name
    finally:
        _documents = before


@contextlib.contextmanager
def masks_of_documents(kernel: str, position_ids: torch.Tensor | None, tokens: int) -> Iterator[None]:
    """Within the context, masks for the attention `kernel` are those of complete rows of `tokens`, with these
    position ids if packed.

    transformers passes the mask function of a kernel the number of tokens that it sees (in a sequence group,
    this rank's), and the pattern (causal, a window) as a function of indices. The entry of the object hides
    that of the class, and the name stays.
    """
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS.get(kernel)
    if make_mask is None:
        yield
        return
    examples = None if position_ids is None else example_numbers(position_ids)

    def mask(*, mask_function: Pattern, allow_is_causal_skip: bool = True, **kwargs: object) -> object:
        if position_ids is not None and examples is not None:
            mask_function = _of_packed_examples(mask_function, position_ids, examples)
            allow_is_causal_skip = False
        kwargs["q_length"] = kwargs["kv_length"] = tokens
        return make_mask(mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, **kwargs)

    ALL_MASK_ATTENTION_FUNCTIONS[kernel] = mask
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[kernel]


def _of_packed_examples(pattern: Pattern, position_ids: torch.Tensor, examples: torch.Tensor) -> Pattern:
    """Return a pattern that keeps examples apart and applies `pattern` to positions in the example, as
    `create_causal_mask` of transformers combines the two."""

    def packed_pattern(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        is_same_example = examples[row, query] == examples[row, key]
        return is_same_example & pattern(row, head, position_ids[row, query], position_ids[row, key])

    return packed_pattern


def example_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """Return, for `position_ids` [batch, tokens], the index of each token's example in its row, from 0, in
    the same shape."""
    before_first = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=before_first, dim=-1) != 1).cumsum(-1)


def _none(_position_ids: torch.Tensor) -> None:
    return None


def _no(*_: object, **__: object) -> bool:
    return False
