"""Find a model that cannot keep packed examples apart before a rank starts, on its small form with random
weights.

A model may take position ids and still ignore where examples end: a layer reads across the border with a mask
of its own, or positions continue over it. No field of a configuration says so. The ranks measure the live
model too (`worker.readback.isolation`), which also covers kernels that need a GPU, and models of which no
small form can be built here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fsdp_tune.core.errors import Problem, Where
from fsdp_tune.core.families import limits_within
from fsdp_tune.core.small_config import scale_down_config
from fsdp_tune.model.internals.transformers_internals import attention_of, plain_functions
from fsdp_tune.model.kernels.attention import has_variable_lengths, live_attention
from fsdp_tune.model.packed_documents import packing_known
from fsdp_tune.model.packed_mixers import packs, separate_documents
from fsdp_tune.model.query_scale import scale_queries_by_position
from fsdp_tune.model.sequence_parallel import attention_disabled
from fsdp_tune.recipe.schema.recipe import Recipe

EXAMPLE_TOKENS = 12
SMALL_LIMIT = 4
"""Of windows and other limits, in tokens or blocks: below an example, and more than one of them in it."""
MOST_PARAMETERS = 80_000_000
"""A vocabulary of 256 Ki tokens, its head, and some layers. The small form of an unknown architecture may be
larger."""
ALLOWED_DEVIATION = 1e-4
"""Of the norm of a token's logits, in fp32. Same shapes, same kernels: it is zero, but for experts whose
groups change in size."""


@dataclass(frozen=True, slots=True)
class PackedDeviations:
    """Relative L2 distances of the logits of a packed example, the largest of its tokens."""

    others: float
    """By how much they move when the other example of the row changes."""
    alone: float
    """How far they are from those of the example in a row of its own."""


def packing_problem(recipe: Recipe, model: PreTrainedModel) -> Problem | None:
    """Return the problem of a recipe with packing whose model lets examples see each other, or computes them
    differently than alone.

    None without one, or where it is not known.
    """
    if not packs(recipe):
        return None
    key = "data.packing" if recipe.data.packing else "data.eval_packing"
    name, kernel = type(model).__name__, live_attention(recipe, model).value
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    found = small_deviations(
        model.config, kernel, recipe.data.max_length, trusts_code=recipe.model.trust_remote_code
    )
    if found is not None and found.others > ALLOWED_DEVIATION:
        return leak_problem(found.others, name, kernel, key)
    if found is not None and not found.alone > ALLOWED_DEVIATION:
        return None
    if takes_positions and found is None:
        return None
    why = "" if takes_positions else f"{name} takes no position ids, so "
    message = f"{why}positions of packed examples would continue from one to the next"
    if found is not None:
        what = "a packed example differs" if why else f"a packed example of {name} differs"
        message = f"{why}{what} from the example alone: its logits are {found.alone:.2%} off"
    return Problem("packing-not-isolated", message, Where(key=key), hint=f"--set {key}=false")


def leak_problem(deviation: float, model_name: str, kernel: str, key: str = "data.packing") -> Problem:
    """Return the problem of a model whose logits of one example move by `deviation`, of their norm, when
    another example changes."""
    return Problem(
        "packing-not-isolated",
        f"{model_name} with attention `{kernel}` lets packed examples see each other: logits of an example "
        f"move by {deviation:.2%} when another one changes",
        Where(key=key),
        hint=f"--set {key}=false",
    )


def small_deviations(
    config: PreTrainedConfig, kernel: str, longest_row: int = EXAMPLE_TOKENS, *, trusts_code: bool = False
) -> PackedDeviations | None:
    """Return the deviations of the second example of a packed row in the small form of a model; None if they
    cannot be measured.

    A kernel with variable lengths keeps examples apart by itself, so the layers besides attention are
    measured. Windows, blocks and other limits that rows of `longest_row` tokens reach are lowered, so that
    the measured examples reach them too.
    """
    text = config.get_text_config()  # of a model of several modalities, whose rows are text
    measure = functools.partial(_measured, text, kernel, trusts_code=trusts_code)
    found = measure(longest_row)
    return found if found is not None else measure(0)  # a class may not take lower limits


def _measured(
    text: PreTrainedConfig, kernel: str, longest_row: int, *, trusts_code: bool
) -> PackedDeviations | None:
    separates = has_variable_lengths(kernel)
    mask_kernel = None if separates or kernel in ("auto", "flex_attention") else kernel
    try:
        with torch.random.fork_rng(devices=[]), _silent():
            small = _small_model(text, mask_kernel, longest_row, trusts_code=trusts_code)
            if small is None:
                return None
            with plain_functions(small), attention_disabled(small) if separates else contextlib.nullcontext():
                separate_documents(small)
                scale_queries_by_position(small)
                found = _deviations(small)
            return found if math.isfinite(found.others + found.alone) else None
    except Exception:  # noqa: BLE001  any code of any model; the ranks measure the real one
        return None


def _small_model(
    text: PreTrainedConfig, kernel: str | None, longest_row: int, *, trusts_code: bool
) -> PreTrainedModel | None:
    fields = scale_down_config(text.to_dict())
    small = type(text).from_dict(fields | dict.fromkeys(limits_within(fields, longest_row), SMALL_LIMIT))
    options: dict[str, object] = {
        "dtype": torch.float32,
        "attn_implementation": kernel,
        "trust_remote_code": trusts_code,
    }
    with torch.device("meta"):
        parameters = sum(
            each.numel()
            for each in AutoModelForCausalLM.from_config(copy.deepcopy(small), **options).parameters()
        )
    if parameters > MOST_PARAMETERS:
        return None
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(small, **options)
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # one that starts at zero, such as a gate, hides what it multiplies
            if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
                parameter += 0.02 * torch.randn_like(parameter)
    return model.eval()


@torch.no_grad()
def _deviations(model: PreTrainedModel) -> PackedDeviations:
    ids = torch.arange(2 * EXAMPLE_TOKENS)[None] + 3
    positions = torch.arange(EXAMPLE_TOKENS).repeat(2)[None]
    changed = torch.where(torch.arange(2 * EXAMPLE_TOKENS) < EXAMPLE_TOKENS, ids.flip(1), ids)
    second = slice(EXAMPLE_TOKENS, None)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with packing_known(positions, attention_of(model.config)):
            return model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0, second]

    def moved(other: torch.Tensor) -> float:
        return float(((one - other).norm(dim=-1) / one.norm(dim=-1)).max())

    one, alone = logits(ids), model(input_ids=ids[:, second], use_cache=False).logits[0]
    return PackedDeviations(moved(logits(changed)), moved(alone))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """No warnings of models that lack a kernel's package: they are about the small form."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
