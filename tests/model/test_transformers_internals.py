"""What a run does where transformers does not have a private name; models and configurations have the listed
attributes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils, modeling_flash_attention_utils

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model import packed_documents
from fsdp_tune.model.internals import transformers_internals as internals
from fsdp_tune.model.internals.internal import Attribute, Name, NoFallback
from fsdp_tune.model.internals.transformers_internals import require_trainer_hooks
from fsdp_tune.model.kernels.attention import choose_attention
from fsdp_tune.model.loading.construct import build_empty
from fsdp_tune.model.loading.model_config import config_or_facts
from fsdp_tune.model.shard.fsdp_units import decoder_layer_classes
from tests.model.recipes import recipe_of
from tests.structure.internals import entries

ENTRIES = {
    name.partition(".")[2]: entry
    for name, entry in entries().items()
    if name.startswith("transformers_internals.")
}
FALLBACKS = {
    "SUPPORTS_SDPA": False,
    "SUPPORTS_FLASH": False,
    "SUPPORTS_INTERFACE": False,
    "OWN_FLASH_KERNELS": None,
    "LAYER_CLASSES": None,
    "MAY_BE_MISSING": None,
    "FIND_PACKED": None,
    "IS_PACKED": None,
    "GROUPED_PRODUCT_TAKES": None,
    "SONICMOE_NEEDS": None,
}


def test_fallbacks_are_the_documented_ones() -> None:
    found: dict[str, Any] = {}
    for name, entry in ENTRIES.items():
        if isinstance(entry, Name | Attribute) and entry.fallback is not NoFallback.REFUSED:
            found[name] = entry.of(SimpleNamespace()) if isinstance(entry, Attribute) else entry.fallback
    assert found == FALLBACKS


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if isinstance(entry, Attribute)])
def test_models_of_the_installed_version_have_the_attribute(name: str) -> None:
    entry: Any = ENTRIES[name]
    assert entry.exists(
        LlamaConfig() if entry in (internals.ATTENTION, internals.EXPERTS) else LlamaForCausalLM
    )


def test_layers_are_found_without_a_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of("llama")
    model = build_empty(recipe, config_or_facts(recipe)[0])
    monkeypatch.setattr(Attribute, "exists", lambda entry, owner: entry is not internals.LAYER_CLASSES)
    assert decoder_layer_classes(model) == ("LlamaDecoderLayer",)


def test_kernel_is_eager_where_support_is_not_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of("llama")
    assert choose_attention(recipe, LlamaConfig()).value == "sdpa"
    exists = Attribute.exists
    monkeypatch.setattr(
        Attribute,
        "exists",
        lambda entry, owner: entry is not internals.SUPPORTS_SDPA and exists(entry, owner),
    )
    assert choose_attention(recipe, LlamaConfig()).value == "eager"


def test_packed_rows_are_checked_by_transformers_where_its_checks_have_other_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    own = masking_utils.find_packed_sequence_indices(positions)
    for module, name in (
        (masking_utils, "find_packed_sequence_indices"),
        (modeling_flash_attention_utils, "_is_packed_sequence"),
    ):
        monkeypatch.setattr(module, f"renamed{name}", getattr(module, name), raising=False)
        monkeypatch.delattr(module, name)
    with packed_documents.packing_known(None, "sdpa"):
        assert torch.equal(masking_utils.renamedfind_packed_sequence_indices(positions), own)
    assert not hasattr(masking_utils, "find_packed_sequence_indices")
    with pytest.raises(FsdpTuneError, match="sp_size` needs"):
        internals.FIND_PACKED_IN_PART.get()


def test_trainer_without_a_hook_is_refused_before_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Trainer

    require_trainer_hooks()
    for name in internals.TRAINER_HOOKS:
        with monkeypatch.context() as patch:
            patch.delattr(Trainer, name)
            with pytest.raises(FsdpTuneError, match=f"`fsdp-tune train` needs `transformers.Trainer.{name}`"):
                require_trainer_hooks()
