"""The facts of a recipe's model, which a child process with torch finds on the meta device and the command reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from fsdp_tune.core.errors import Notice, Problem
from fsdp_tune.model.kernels.kernel_choice import KernelChoice
from fsdp_tune.run.base_model import BaseLayout
from fsdp_tune.run.records import PartialFacts


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    modules: dict[str, int]
    """Adapted modules by the last part of their names."""
    trained_parameters: int
    share: float
    """Of the trained parameters in those of the base."""
    trained_bytes: int


class ModelFacts(PartialFacts):
    """What can be known of a recipe's model without its weights.

    `as_dict` has only the fields that were set: those of an adapter for `lora:`, and kernels unless a problem was found before them.
    """

    packaged: bool
    """Whether the configuration is that in this package, since the hub cannot be reached."""
    model_type: str
    architecture: str
    config: dict[str, Any]
    base_folder: str | None
    config_changes: dict[str, Any]
    """Fields of the base's config.json that the run changes."""
    exported_config: dict[str, Any]
    generation_config: dict[str, Any]
    base_layout: BaseLayout
    parameters: int
    trained_parameters: int
    embedding_rows: int
    tied_embeddings: bool
    is_embedding_trained: bool
    trains_new_tokens: bool
    max_positions: int | None
    attention: str
    adapter: AdapterFacts | None = None
    adapter_config: dict[str, Any] | None = None
    nf4_weights: tuple[str, ...] = ()
    quantization: str | None = None
    layer_classes: tuple[str, ...] = ()
    layers: int = 0
    layer_parameters: int = 0
    units: tuple[tuple[str, ...], ...] = ()
    kernels: dict[str, KernelChoice] = Field(default_factory=dict[str, KernelChoice])


@dataclass(frozen=True, slots=True)
class ModelInspection:
    """What `model.loading.inspect` found, and the document that it prints."""

    facts: ModelFacts | None
    """None if the model could not be built."""
    problems: tuple[Problem, ...] = ()
    notices: tuple[Notice, ...] = ()

    def to_json(self) -> str:
        facts = self.facts.as_dict() if self.facts is not None else {}
        problems, notices = ([each.as_dict() for each in group] for group in (self.problems, self.notices))
        return json.dumps({**facts, "problems": problems, "notices": notices})

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelInspection:
        """Parse a document. Raises: ValueError if it is damaged."""
        try:
            raw: dict[str, Any] = json.loads(text)
            problems, notices = (tuple(map(Problem.from_dict, raw.pop(name))) for name in ("problems", "notices"))
            facts = ModelFacts.model_validate(raw) if raw else None
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not an inspection: {error!r}") from error
        return cls(facts, problems, tuple(Notice(each.code, each.message, each.where, each.hint) for each in notices))
