"""The rules of keys that have the same meaning in every tool: by a synonym, an old spelling, or the name of a
key of a recipe.

Nothing here is known twice: synonyms are in `synonyms.py`, old spellings in `legacy.py`, and names that
belong to a section in the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from fsdp_tune.core.errors import Problem
from fsdp_tune.core.units import shown
from fsdp_tune.core.values import as_list, is_mapping
from fsdp_tune.migrate.ledger import LedgerView
from fsdp_tune.migrate.rules import AskEach, FileKey, Outcome, Rule, outcome_of
from fsdp_tune.migrate.training_arguments import SHARED
from fsdp_tune.recipe.key_paths import KeyPath, flattened
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Weight, Write
from fsdp_tune.recipe.read.legacy import settle, take_aliases, translate
from fsdp_tune.recipe.read.tool_detection import LLAMA_FACTORY, SWIFT
from fsdp_tune.recipe.read.yaml_source import MappingNode, compose, plain_value
from fsdp_tune.recipe.schema.keys import all_keys
from fsdp_tune.recipe.schema.optimizers import DEFAULT_OPTIMIZER
from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS, owner_of
from fsdp_tune.recipe.schema.value_kinds import is_jinja
from fsdp_tune.recipe.synonyms import SYNONYMS

_SAME_IN_LLAMA_FACTORY = ("chatml", "llama3", "phi4", "gemma3")
"""Its other templates have a system message, spaces or a trained empty thought that those of the models'
authors do not have."""


def named_optimizer(names: Mapping[str, str], decay: str) -> Rule:
    """Return a rule for the class of an optimizer, by the names of classes. `decay`: the key beside it that
    has the weight decay."""

    def rule(key: FileKey) -> Outcome:
        kind = str(key.value).rpartition(".")[2]
        if kind not in names:
            return Ask(f"`{key.value}` is not supported", "training.optim")
        if kind == "Adam" and key.beside(decay):
            return Ask(
                "Adam adds the decay to the gradient; `adamw_torch` decays the weights", "training.optim"
            )
        return Write(
            {"training.optim": names[kind]}, "without decay, Adam is AdamW" if kind == "Adam" else ""
        )

    return rule


def betas(key: FileKey) -> Outcome:
    """Convert the two decay rates of Adam's averages."""
    pair = as_list(key.value)
    if len(pair) == 2:
        return Write({"training.adam_beta1": pair[0], "training.adam_beta2": pair[1]})
    return Ask("two numbers: `training: {adam_beta1: 0.9, adam_beta2: 0.999}`", "training.adam_beta1")


def decays_by_default(ledger: LedgerView, *, of_the_class: bool) -> bool:
    """Return whether an optimizer has AdamW's default decay, 0.01: that of `--set` before the class of the
    file."""
    optim: KeyPath = ("training", "optim")
    return (
        str(ledger.get(*optim) or DEFAULT_OPTIMIZER).startswith("adamw")
        if ledger.has_answer(optim)
        else of_the_class
    )


DFT = (
    "the sum of the weighted losses over the trained tokens of the step, on all ranks; `eval_loss` is "
    "cross-entropy"
)
"""Of dynamic fine-tuning."""


def chat_template(key: FileKey) -> Write | Ask | Drop:
    """Write a chat template, which another tool has in its code, if one of its name is bundled. In a data
    set: for its source."""
    name = str(key.value)
    if name == "tokenizer_default" or (name == "default" and key.tool not in (LLAMA_FACTORY, SWIFT)):
        return Drop("the tokenizer's own is the default here too")
    if name == "jinja" and key.beside(f"{key.name}_jinja"):
        return Drop(f"the template is `{key.name}_jinja`")
    target: KeyPath = (*(key.place or ("data",)), "chat_template")
    if (same_name := _bundled(key.ledger, name)) or name.endswith((".jinja", ".jinja2")) or is_jinja(name):
        is_same = key.name == "chat_template" and same_name in (None, name)
        return Write({target: same_name or name}, fate=Fate.KEPT if is_same else Fate.CONVERTED)
    asked = SYNONYMS["template"].outcome(name)
    return Ask(asked.words, target) if isinstance(asked, Ask) else asked


def _bundled(ledger: LedgerView, name: str) -> str | None:
    """Return the bundled template of a name; other tools write `qwen_25` and `phi_3` for qwen2.5 and phi3."""
    found = {re.sub(r"[^a-z0-9]", "", each): each for each in ledger.templates}.get(
        re.sub(r"[^a-z0-9]", "", name.lower())
    )
    return None if ledger.tool == LLAMA_FACTORY and found not in _SAME_IN_LLAMA_FACTORY else found


def by_name(key: FileKey) -> Outcome:
    """Return what becomes of a key by what its name means in every tool; a name that nothing knows is a
    question."""
    name = key.name
    if name in SHARED:
        return outcome_of(SHARED[name], key)
    if (found := _by_legacy(key)) is not None:
        return found
    home = _home_of(name)
    if name in SYNONYMS and (SYNONYMS[name].tool in (None, key.tool) or not home):
        return SYNONYMS[name].outcome(key.value)
    if (owner := owner_of(name)) is not None:
        return Drop(owner)
    return (
        AskEach() if home is None else Write({f"{home}.{name}" if home else name: key.value}, fate=Fate.KEPT)
    )


def _home_of(name: str) -> str | None:
    """Return the only section of a recipe that has a key of this name; "" for the top; None if none or
    several have it."""
    if name in _VAGUE:
        return None
    if name in TRAINING_FIELDS.fields and owner_of(name) is None:
        return "training"
    found = {
        key.path[:-1]
        for key in all_keys()
        if key.path[-1] == name and (len(key.path) == 2 or name in _OF_THE_TOP)
    }
    return ".".join(found.pop()) if len(found) == 1 else None


_OF_THE_TOP = frozenset({"name", "output_dir"})
_VAGUE = frozenset(
    ("loss", "verify", "probe", "mirror", "adapter", "bias", "base", "freeze", "tokens", "env")
) | frozenset(("version", "format", "roles", "debug", "async", "metrics", "callbacks", "r"))
"""Names that other tools give to something else."""


def _by_legacy(key: FileKey) -> Outcome | None:
    """Return the outcome of a key that the recipe reads as an old spelling, of the top, of `training:` or of
    `fsdp_config:`; else None."""
    name = key.name
    of_fsdp = key.path[-2:-1] == ("fsdp_config",) or name.startswith("fsdp_")
    holders: tuple[tuple[str, ...], ...] = (
        (("fsdp_config",),) if of_fsdp and name != "fsdp_config" else ((), ("training",))
    )
    for holder in holders:
        before: Any = key.value
        for part in reversed((*holder, name)):
            before = {part: before}
        after, words, problem = _translated(before)
        if problem is not None:
            return Drop(problem.message)
        if after == before and holder != ("fsdp_config",):
            continue
        if not after:
            return Drop(words)
        if holder == ("fsdp_config",) and not _is_known(after):
            return Ask(f"`{shown(name)}` of `fsdp_config` is not known here", "fsdp")
        (target, written), *_ = flattened(after)
        kept = holder == ("fsdp_config",) and written == key.value
        # Recomputation has two switches in other tools, and is on where one of them is.
        is_weak = target == ("fsdp", "activation_checkpointing") and written == "none"
        return Write(
            after,
            fate=Fate.KEPT if kept else Fate.CONVERTED,
            weight=Weight.IMPLIED if is_weak else Weight.GIVEN,
        )
    return None


def _is_known(tree: Mapping[str, object]) -> bool:
    names = {key.path for key in all_keys()}
    return all(target in names for target, _ in flattened(tree))


class _Translated(NamedTuple):
    tree: dict[str, object]
    words: str
    """Of the notices about old spellings."""
    problem: Problem | None
    """The first refusal."""


def _translated(tree: Mapping[str, object]) -> _Translated:
    """Return a part of a recipe with its old spellings replaced."""
    root, _ = compose(json.dumps(tree), "")
    assert isinstance(root, MappingNode)
    notices, problems = translate(root)
    more, wrong = settle(root)
    take_aliases(root)
    said = [notice.message.partition(": ")[2] or notice.message for notice in (*notices, *more)]
    after = cast("dict[str, object]", _without_empty(plain_value(root)))
    return _Translated(after, "; ".join(said), next(iter((*problems, *wrong)), None))


def _without_empty(value: object) -> object:
    """Remove sections from which every key was taken."""
    if not is_mapping(value):
        return value
    inner = {name: _without_empty(item) for name, item in value.items()}
    return {name: item for name, item in inner.items() if item != {}}
