"""The matrix: every switch alone, and every pair of values of two switches in some case."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from tests.parity.store import GLOBAL_BATCH_SIZE

STEPS, SAVED_STEP = 22, 10
"""Of a run in which rounding has time to show: almost four epochs. A checkpoint is saved at `SAVED_STEP`."""
SHORT, SHORT_SAVED_STEP = 9, 7
"""Of a run of the fast tests: one and a half epochs, saved in the second."""

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD")
_WRAPS: dict[str, dict[str, Any]] = {
    "class": {},
    "size": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 900},
    "names": {"auto_wrap_policy": "MODULE_NAMES_WRAP"},
    "none": {"auto_wrap_policy": "NO_WRAP"},
}
LONGEST = 32
"""`data.max_length` of a case with a token budget: no row is longer."""
_LAYERS = {"gpt2": "transformer.h.*"}


@dataclass(frozen=True)
class Case:
    architecture: str = "llama"
    ranks: int = 2
    strategy: str = "FULL_SHARD"
    recomputation: str = "none"
    offload: bool = False
    accumulation: int = 1
    packed: bool = False
    wrap: str = "class"
    version: int = 2
    resumed: str = "no"
    """same: from a checkpoint of as many ranks; other: of another number of ranks; shared: of as many ranks,
    two of which share each row. All under FULL_SHARD, and `same` and `other` with rows of each rank's own."""
    precision: str = "no"
    """`precision.mixed_precision`, and after it `precision.fp8_recipe`."""
    fsdp: tuple[tuple[str, Any], ...] = ()
    """Further keys of `fsdp:`."""
    kernels: tuple[tuple[str, Any], ...] = ()
    """Keys of `kernels:`."""
    stored: str = "fp32"
    """`model.dtype`."""
    training: tuple[tuple[str, Any], ...] = ()
    """Keys of `training:`."""
    lora: tuple[tuple[str, Any], ...] = ()
    """Keys of `lora:`; the run starts from an adapter whose B is not zero."""
    nf4: str | None = None
    """`quantization.scales`: the base is held in 4 bits."""
    quantised: tuple[str, int] | None = None
    """`quantization.train` and its `group_size`."""
    groups: tuple[tuple[str, float | None, float | None], ...] = ()
    """`training.parameter_groups`: (pattern, learning rate, weight decay)."""
    sequence: int = 1
    """`parallelism.sp_size`."""
    tokens: int | None = None
    """Token slots of a micro-batch, instead of rows: a multiple of `LONGEST`."""
    pad_to: int | None = None
    """`data.pad_to_multiple_of`; the recipe's default unless given."""
    steps: int = STEPS
    """`STEPS` or `SHORT`."""

    def __str__(self) -> str:
        default = Case()
        named = [
            f"{field.name} {getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name not in ("architecture", "ranks", "strategy", "fsdp", "kernels", "training", "lora")
            and getattr(self, field.name) != getattr(default, field.name)
        ]
        named += [f"{key} {value}" for key, value in (*self.fsdp, *self.kernels, *self.training)]
        named += ["lora"] * bool(self.lora) + [f"{key} {value}" for key, value in self.lora]
        return ", ".join([self.architecture, f"{self.ranks} ranks", self.strategy, *named])

    @property
    def saved_step(self) -> int:
        return SAVED_STEP if self.steps == STEPS else SHORT_SAVED_STEP

    @property
    def is_possible(self) -> bool:
        """False for what the recipe's rules refuse, or what is another case by another name."""
        hybrid = self.strategy.startswith("HYBRID")
        if self.strategy == "NO_SHARD" and (self.offload or self.wrap != "class" or self.version == 1):
            return False
        if self.version == 1 and (hybrid or self.offload):
            # FSDP1's offload needs an accelerator; tests/worker/readback/test_report.py has its hybrid
            # strategies
            return False
        if self.version == 2 and self.recomputation == "selective" and self.wrap == "size":
            return False
        return not (hybrid and self.ranks != 4)

    def recipe(self, model: str) -> dict[str, Any]:
        """What the case changes in a recipe; the global batch stays."""
        fsdp = {
            "version": self.version,
            "sharding_strategy": self.strategy,
            "activation_checkpointing": self.recomputation,
            "offload_params": self.offload,
            **_WRAPS[self.wrap],
            **dict(self.fsdp),
        }
        if self.wrap == "names":
            fsdp["modules_to_wrap"] = [_LAYERS.get(self.architecture, "model.layers.*")]
        batch: dict[str, Any] = {
            "per_device_train_batch_size": GLOBAL_BATCH_SIZE
            * self.sequence
            // self.ranks
            // self.accumulation,
            "gradient_accumulation_steps": self.accumulation,
        }
        if self.tokens is not None:
            batch = {"global_batch_size": GLOBAL_BATCH_SIZE, "per_device_train_batch_tokens": self.tokens}
        if self.steps != STEPS:
            batch |= {"max_steps": self.steps, "eval_steps": self.steps, "save_steps": self.saved_step}
        data: dict[str, Any] = {"packing": self.packed}
        if self.pad_to is not None:
            data["pad_to_multiple_of"] = self.pad_to
        if self.tokens is not None:
            data["max_length"] = LONGEST
        if self.groups:
            keys = ("match", "learning_rate", "weight_decay")
            batch["parameter_groups"] = [
                dict(zip(keys, ([pattern], *values), strict=True)) for pattern, *values in self.groups
            ]
        return {
            "model": {"name_or_path": model, "dtype": self.stored},
            "data": data,
            "fsdp": fsdp,
            "kernels": dict(self.kernels),
            "parallelism": {"sp_size": self.sequence},
            "precision": dict(zip(("mixed_precision", "fp8_recipe"), self.precision.split(), strict=False)),
            "training": {**batch, **dict(self.training)},
            "launch": {"num_processes": self.ranks},
        }

    def donor(self) -> Case:
        """The run whose checkpoint a resumed case starts from: another sharding, perhaps other ranks, the
        same trajectory."""
        ranks = {1: 2, 2: 4, 4: 2}[self.ranks] if self.resumed == "other" else self.ranks
        return Case(
            self.architecture,
            ranks,
            packed=self.packed,
            precision=self.precision,
            stored=self.stored,
            training=self.training,
            groups=self.groups,
            lora=self.lora,
            nf4=self.nf4,
            quantised=self.quantised,
            sequence=2 if self.resumed == "shared" else 1,
            steps=self.steps,
        )


_IN_SLICES = (("loss", "chunked"),)
CHUNKED = [
    Case(packed=True, kernels=_IN_SLICES),
    Case("gpt2", kernels=_IN_SLICES),  # its head is its embedding
    Case("gpt2", strategy="NO_SHARD", accumulation=4, kernels=_IN_SLICES),
    Case("gpt2", version=1, kernels=_IN_SLICES),
    Case("gemma", strategy="SHARD_GRAD_OP", kernels=_IN_SLICES),
    Case(version=1, accumulation=4, kernels=_IN_SLICES),
    Case("gpt2", wrap="none", kernels=_IN_SLICES),
    Case("gpt2", wrap="size", offload=True, kernels=_IN_SLICES),
    Case(wrap="size", kernels=_IN_SLICES),
    Case(wrap="names", recomputation="full", kernels=_IN_SLICES),
    Case(
        "qwen3",
        ranks=4,
        strategy="HYBRID_SHARD",
        accumulation=4,
        recomputation="selective",
        kernels=_IN_SLICES,
    ),
    Case("mixtral", resumed="other", packed=True, kernels=_IN_SLICES),
]
"""The loss in slices of a few tokens."""
_COMPILED = (("compile", True),)
COMPILED = [
    Case(packed=True, recomputation="full", kernels=_COMPILED),
    Case("qwen3", packed=True, recomputation="selective", kernels=(*_COMPILED, *_IN_SLICES)),
    Case("gpt2", strategy="NO_SHARD", accumulation=4, kernels=_COMPILED),
    Case("gemma", ranks=4, strategy="HYBRID_SHARD", kernels=_COMPILED),
    Case(recomputation="full", fsdp=(("activation_checkpointing_every", 2),), kernels=_COMPILED),
    Case("mixtral", resumed="same", kernels=_COMPILED),
    Case(wrap="none", offload=True, kernels=_COMPILED),
]
"""Layers traced and differentiated as the compiler does it, and then run operation by operation."""

_SLICED = (("mlp_slice_tokens", 5),)
SLICED = [
    Case(packed=True, recomputation="full", kernels=_SLICED),
    Case("gpt2", strategy="NO_SHARD", accumulation=4, kernels=_SLICED),
    Case("gemma", ranks=4, strategy="HYBRID_SHARD", accumulation=4, kernels=(*_SLICED, *_IN_SLICES)),
    Case(
        "qwen3", strategy="SHARD_GRAD_OP", fsdp=(("sync_each_batch", False),), accumulation=4, kernels=_SLICED
    ),
    Case(offload=True, kernels=_SLICED),
    Case(recomputation="full", fsdp=(("activation_checkpointing_offload", True),), kernels=_SLICED),
    Case(wrap="none", resumed="same", kernels=_SLICED),
]
"""MLPs in slices of five tokens."""

BY_TOKENS = [
    Case(tokens=64, fsdp=(("sync_each_batch", False),)),
    Case("gpt2", ranks=1, tokens=96),
    Case(ranks=4, strategy="HYBRID_SHARD", tokens=32),
    Case(strategy="NO_SHARD", tokens=64),
    Case(version=1, tokens=64, fsdp=(("sync_each_batch", False),)),
    Case(tokens=64, resumed="same", training=(("dataloader_num_workers", 1),)),
    Case(ranks=4, tokens=64, resumed="other"),
]
"""As many micro-batches as the rows of a step need; checkpoints are of runs that count rows."""

ON_ONE_RANK = [
    Case(ranks=1, packed=True, recomputation="selective", kernels=_IN_SLICES),
    Case(ranks=1, recomputation="full", fsdp=(("activation_checkpointing_offload", True),), kernels=_SLICED),
    Case("gpt2", ranks=1, strategy="NO_SHARD", accumulation=4),
    Case("gemma", ranks=1, offload=True),
    Case("mixtral", ranks=1, recomputation="full"),
]
"""With the rows of one rank elsewhere, what one GPU can compare; the matrix of switches is without them."""

SWITCHES: dict[str, tuple[Any, ...]] = {
    "architecture": ("llama", "gpt2", "qwen3", "gemma", "mixtral"),
    "strategy": STRATEGIES,
    "ranks": (2, 4, 1),
    "recomputation": ("none", "selective", "full"),
    "offload": (False, True),
    "accumulation": (1, 4),
    "packed": (False, True),
    "wrap": ("class", "size", "names", "none"),
    "version": (2, 1),
    "resumed": ("no", "same", "other"),
}


_DFT = (("loss", "dft"),)
_KEPT = (("reshard_after_backward", False),)


def singles() -> list[Case]:
    """The base case and, for each value of each switch, the base case with that one value."""
    cases = [Case()]
    for name, values in SWITCHES.items():
        for value in values[1:]:
            change: dict[str, Any] = {name: value}
            if name == "strategy" and str(value).startswith("HYBRID"):
                change["ranks"] = 4
            cases.append(Case(**change))
    cases += [
        Case(ranks=1, accumulation=4),
        Case(ranks=4, accumulation=4),
        Case(strategy="NO_SHARD", accumulation=4),
        Case(strategy="HYBRID_SHARD", ranks=4, accumulation=4),
        Case(version=1, accumulation=4),
        Case(accumulation=4, fsdp=(("sync_each_batch", False),)),
        Case(strategy="HYBRID_SHARD", ranks=4, accumulation=4, fsdp=(("sync_each_batch", False),)),
        Case(accumulation=4, training=_DFT),
        Case("gpt2", strategy="NO_SHARD", accumulation=4, packed=True, kernels=_IN_SLICES, training=_DFT),
        Case(tokens=64, kernels=_IN_SLICES, training=_DFT),
        Case("gpt2", accumulation=4, recomputation="full", fsdp=_KEPT),
        Case(strategy="SHARD_GRAD_OP", accumulation=4, packed=True, fsdp=_KEPT),
        Case(strategy="HYBRID_SHARD", ranks=4, accumulation=4, resumed="other", fsdp=_KEPT),
        Case(tokens=64, kernels=_IN_SLICES, fsdp=_KEPT),
        Case(recomputation="full", fsdp=(("activation_checkpointing_every", 2),)),
        Case(recomputation="full", fsdp=(("activation_checkpointing_offload", True),)),
        Case(fsdp=(("forward_prefetch", 2), ("backward_prefetch", 2))),
        Case(fsdp=(("cpu_ram_efficient_loading", False),)),
        Case(fsdp=(("state_dict_type", "FULL_STATE_DICT"),)),
        Case(ranks=4, fsdp=(("reshard_after_forward", 2),)),
        *CHUNKED,
        *COMPILED,
        *SLICED,
        *BY_TOKENS,
    ]
    return cases


FAST = [
    Case(steps=SHORT),
    Case(ranks=4, strategy="HYBRID_SHARD", accumulation=4, resumed="other", steps=SHORT),
    Case("gpt2", strategy="NO_SHARD", accumulation=4, recomputation="full", steps=SHORT),
    Case(packed=True, offload=True, kernels=_IN_SLICES, steps=SHORT),
    Case(packed=True, version=1, recomputation="selective", steps=SHORT),
    Case(strategy="SHARD_GRAD_OP", tokens=64, fsdp=(("sync_each_batch", False),), steps=SHORT),
    # A compiled graph is traced for 7 s. Rows of one length need two of them, and one rank traces them once.
    Case(ranks=1, recomputation="full", pad_to=32, kernels=_COMPILED, steps=SHORT),
]
"""Rows for every run of the tests: each value in one of them (test_matrix), pairs as far as they fit. The
rest is for scripts/test --suite parity."""


def pairwise(known: list[Case]) -> list[Case]:
    """Cases that, with the known ones, hold every possible pair of values of two switches. Greedy and always
    the same."""
    wanted = {pair for case in _all_possible() for pair in _pairs(case)}
    for case in known:
        wanted -= _pairs(case)
    added: list[Case] = []
    candidates = list(_all_possible())
    while wanted:
        best = max(candidates, key=lambda case: len(_pairs(case) & wanted))
        added.append(best)
        wanted -= _pairs(best)
    return added


def _all_possible() -> list[Case]:
    # Every 61st of the full product is dense enough to hold all pairs, and quick to search.
    product = itertools.product(*SWITCHES.values())
    cases = [
        Case(**dict(zip(SWITCHES, values, strict=True))) for values in itertools.islice(product, 0, None, 61)
    ]
    return [case for case in cases if case.is_possible]


def _pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    values = [(name, getattr(case, name)) for name in SWITCHES]
    return set(itertools.combinations(values, 2))
