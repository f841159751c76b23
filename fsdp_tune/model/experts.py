"""The load-balancing loss of a mixture of experts, computed for each example separately.

The loss of Switch Transformers (arXiv:2101.03961, equations 4 to 6) multiplies two means over the tokens of a
batch: the share of tokens that an expert receives, and the probability that the router assigns to it. It is
therefore not a sum over tokens: computed for a micro-batch, it depends on which rows are batched together, on
padding and on packing. Here each example has its own loss, as in DeepSeek-V3's sequence-wise balance loss
(arXiv:2412.19437, section 2.1.2), and a step's loss is their mean, weighted by tokens: the same for every
batching and any number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from fsdp_tune.core.errors import usage_error
from fsdp_tune.model.internals.torch_internals import DISABLE_MODES
from fsdp_tune.model.internals.transformers_internals import GROUPED_PRODUCT_TAKES
from fsdp_tune.model.sequence_parallel import shared_rows
from fsdp_tune.model.shard.local import bare_class, bare_model

FUNCTION = "load_balancing_loss_func"
"""Name of transformers' function in the module of each such model: (router logits of all layers, experts,
top-k, attention mask)."""


def summed_balance(
    router_logits: Sequence[torch.Tensor],
    experts: int,
    chosen: int,
    example_ids: torch.Tensor,
    example_lengths: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the sum over examples of (number of tokens × load-balancing loss of the example), an fp32
    scalar.

    `router_logits`: [tokens, experts] of each layer. `example_ids` [tokens]: index of each token's example,
    the number of examples for padding. `example_lengths` [examples]: tokens of each. As in transformers, the
    two means are over tokens and layers. With a `group`, whose ranks have different tokens of the examples,
    the result is this rank's part of the sum. Collective.
    """
    examples, layers = example_lengths.shape[0], len(router_logits)
    probabilities = [torch.softmax(logits.float(), dim=-1) for logits in router_logits]
    with torch.no_grad():
        counts = torch.zeros((examples + 1) * experts, dtype=torch.float32, device=example_ids.device)
        for each in probabilities:
            indices = example_ids.unsqueeze(1) * experts + torch.topk(each, chosen, dim=-1).indices
            counts.scatter_add_(
                0, indices.reshape(-1), torch.ones_like(indices, dtype=torch.float32).reshape(-1)
            )
        if group is not None:
            dist.all_reduce(counts, group=group)
        # Only probabilities have a gradient, so those of each token are weighted with the shares of its
        # example.
        weights = experts / layers**2 * counts.view(examples + 1, experts)[:-1] / example_lengths.unsqueeze(1)
        of_token = torch.cat([weights, weights.new_zeros(1, experts)])[example_ids]
    return torch.stack([(of_token * each).sum() for each in probabilities]).sum()


@contextlib.contextmanager
def examples_alone(wrapped: nn.Module, batch: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within the context, the model's `aux_loss` is `summed_balance` of the batch, provided that the batch
    has `example_ids`."""
    if "example_ids" not in batch:
        yield
        return
    module = sys.modules[bare_class(bare_model(wrapped)).__module__]
    ids, lengths, rows = batch["example_ids"], batch["example_lengths"], shared_rows()
    ids = (ids if rows is None else rows.own_tokens(ids)).reshape(-1)
    group = None if rows is None else rows.group

    def balance(
        gate_logits: tuple[torch.Tensor, ...], num_experts: int, top_k: int, *_mask: object
    ) -> torch.Tensor:
        return summed_balance(gate_logits, num_experts, top_k, ids.to(gate_logits[0].device), lengths, group)

    original = getattr(module, FUNCTION)
    setattr(module, FUNCTION, balance)
    try:
        yield
    finally:
        setattr(module, FUNCTION, original)


def require_known_balance(model: PreTrainedModel) -> None:
    """Check the load-balancing loss. Raises: usage error if the configuration enables one that the model
    lacks or defines differently."""
    if not getattr(model.config, "output_router_logits", False):
        return
    function = getattr(sys.modules[bare_class(model).__module__], FUNCTION, None)
    if function is None or not _is_standard(function):
        what = (
            "computes no load-balancing loss"
            if function is None
            else "defines its load-balancing loss differently"
        )
        raise usage_error(
            "balance-unknown",
            "`output_router_logits: true` enables a load-balancing loss, and "
            f"{bare_class(model).__name__} {what}",
            hint="--set model.config_overrides.output_router_logits=false",
        )


def _is_standard(function: Callable[..., object]) -> bool:
    """Return whether the model's function equals `summed_balance` for a batch of one example, on random
    logits."""
    # The planner builds the model under a mode in which tensors have no values.
    with DISABLE_MODES.get()(), torch.device("cpu"), torch.no_grad():
        logits = tuple(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
        ids, lengths = torch.zeros(5, dtype=torch.int64), torch.tensor([5.0])
        try:
            theirs = torch.as_tensor(function(logits, 4, 2), dtype=torch.float32)
        except (
            TypeError,
            ValueError,
            IndexError,
            RuntimeError,
            AttributeError,
        ):  # other arguments, another use of them, or a result that is not a number
            return False
        ours = summed_balance(logits, 4, 2, ids, lengths)
        return theirs.numel() == 1 and torch.allclose(theirs * 5, ours, rtol=1e-5)


GROUPED_ROW_BYTES = 16
"""torch's grouped product takes rows of a multiple of this, on the CPU as on CUDA ("strides should be
multiple of 16 bytes")."""


def allow_any_width() -> None:
    """Let transformers multiply experts one by one if torch's grouped product would refuse their width, in
    forward or backward."""
    takes = GROUPED_PRODUCT_TAKES.get()
    if takes is None or getattr(takes, "allows_any_width", False):
        return

    @functools.wraps(takes)
    def takes_rows(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
        # The backward multiplies by the gradient of the result, whose rows are as wide as the weight's other
        # dimension.
        is_aligned = all(
            width * weight.element_size() % GROUPED_ROW_BYTES == 0 for width in weight.shape[-2:]
        )
        return is_aligned and bool(takes(rows, weight, offs))

    takes_rows.allows_any_width = True  # type: ignore[attr-defined]
    GROUPED_PRODUCT_TAKES.set(takes_rows)
