"""The table of model families names what the installed transformers has."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from fsdp_tune.core import expert_names, families
from fsdp_tune.core.families import (
    Fields,
    heads_by_layer,
    mean_heads,
    widest_head,
)
from fsdp_tune.core.model_parts import tie_setting, tied_candidates
from fsdp_tune.migrate.tools import llama_factory_templates, swift_templates

MODELS = Path(transformers.__file__).parent / "models"
GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def configurations() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(MODELS.glob("*/configuration_*.py")))


def test_every_name_of_a_number_is_a_field_of_some_configuration(configurations: str) -> None:
    tables = {name: value for name, value in vars(families).items() if isinstance(value, Fields)}
    fields = set(re.findall(r"^    (\w+)\s*[:=]", configurations, re.MULTILINE)) | set(
        re.findall(r"\"(\w+)\"", configurations)
    )
    assert len(tables) > 10
    assert {name: unknown for name, table in tables.items() if (unknown := set(table.names) - fields)} == {}


def test_every_family_with_a_quirk_is_a_model_type() -> None:
    assert families._FAMILIES.keys() - CONFIG_MAPPING_NAMES.keys() == set()


MEAN_SOMETHING_ELSE = {
    "cli/step_view.py": {"opt"},  # the optimizer
    # chat templates, whose names users write
    "data/format/templates.py": {
        "qwen3",
        "mistral",
        "gemma3",
        "phi3",
    },
    "merge/read/reader.py": {"opt"},  # an entry of a checkpoint's header: the optimizer
    "migrate/general.py": {"gemma3"},
    # its templates
    "migrate/tools/llama_factory_templates.py": {
        *(llama_factory_templates.LINE_ENDS & CONFIG_MAPPING_NAMES.keys())
    },
    "migrate/tools/swift_templates.py": {*(swift_templates.LINE_ENDS & CONFIG_MAPPING_NAMES.keys())},
    "migrate/tools/torchtune_rows.py": {"phi3", "qwen2"},  # its modules
    "planner/trace/recorder.py": {"clip"},  # a phase of a step: clipping
    "planner/trace/traced_step.py": {"clip"},
    "planner/trace_format.py": {"clip"},
}
"""Module → texts that are also model types."""


@pytest.fixture(scope="module")
def literals(repository: Path) -> dict[str, set[str]]:
    """Return the texts in the code of each other module of the package."""
    package, found = repository / "fsdp_tune", dict[str, set[str]]()
    for path in package.rglob("*.py"):
        if path not in (Path(families.__file__), Path(expert_names.__file__)):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            texts = {
                node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            found[str(path.relative_to(package))] = texts
    return found


@pytest.mark.source
def test_no_other_module_names_a_model_type(literals: dict[str, set[str]]) -> None:
    found = {name: texts & CONFIG_MAPPING_NAMES.keys() for name, texts in literals.items()}
    assert {name: types for name, types in found.items() if types} == MEAN_SOMETHING_ELSE


@pytest.mark.source
def test_no_other_module_names_the_modules_of_experts(literals: dict[str, set[str]]) -> None:
    parts = (".experts.", ".router.", "mscale", "s_aux")
    found = {
        (Path(name).name, text)
        for name, texts in literals.items()
        for text in texts
        if any(part in text for part in parts) and " " not in text
    }
    assert found - {("sections.py", "mscale"), ("sections.py", "mscale_all_dim")} == set(), (
        "these two are keys of a recipe (YaRN)"
    )


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("layers.0.mlp.experts.12.w1.weight", (True, 12, False, False)),
        ("layers.0.mlp.experts.gate_up_proj", (True, None, False, False)),
        ("layers.0.self_attention.experts.router.layer.weight", (True, None, True, False)),
        ("layers.0.mlp.shared_experts.up_proj.weight", (False, None, False, True)),
        ("layers.0.mlp.input_linear.weight", (False, None, False, False)),
    ],
)
def test_names_of_experts(name: str, facts: tuple[bool, int | None, bool, bool]) -> None:
    found = (
        expert_names.is_in_experts(name),
        expert_names.number_of_expert(name),
        expert_names.is_router_in_experts(name),
        expert_names.is_shared_expert(name),
    )
    assert found == facts
    assert expert_names.stack_of(name) == ("layers.0.mlp.experts" if facts[1] is not None else None)


def test_number_is_read_from_a_file_and_from_an_object_under_the_names_of_the_family() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=3, n_embd=48, n_head=6)
    for source in (config, config.to_dict()):
        assert [table.of(source) for table in (families.LAYERS, families.HIDDEN_SIZE, families.HEADS)] == [
            3,
            48,
            6,
        ]
        assert families.EXPERTS.of(source) is None


def test_experts_are_counted_by_the_first_name_and_dense_models_have_one() -> None:
    assert (
        families.expert_count({})
        == families.expert_count({"num_experts": None})
        == families.expert_count({"num_experts": 0})
        == 1
    )
    assert families.expert_count({"n_routed_experts": 8, "num_experts": None}) == 8
    assert families.expert_count({"num_experts": 4, "n_routed_experts": 8}) == 4
    assert expert_names.is_router({"num_experts": 8}, 8)
    assert expert_names.is_router({"n_routed_experts": 8, "zero_expert_num": 4}, 12), "LongCat"
    assert not expert_names.is_router({"n_routed_experts": 8, "zero_expert_num": 4}, 8)
    assert not expert_names.is_router({}, 1), (
        "a dense model has no router, but may have a Linear with one output"
    )


def families_with_experts() -> list[str]:
    """Model types with a field or an alias for the number of experts, of those that are made without other
    configurations."""
    names = re.compile("|".join(rf"\b{name}\b" for name in families.EXPERTS.names))
    files = [
        path for path in MODELS.glob("*/configuration_*.py") if names.search(path.read_text(encoding="utf-8"))
    ]
    return sorted(path.parent.name for path in files if path.parent.name in CONFIG_MAPPING_NAMES)


def test_names_for_the_number_of_experts_agree_in_every_family() -> None:
    """transformers keeps the number once, and other names are aliases: `expert_count` needs no rule for a
    family."""
    found: dict[str, int] = {}
    for family in families_with_experts():
        config = AutoConfig.for_model(family).get_text_config()
        given = {
            value
            for name in families.EXPERTS.names
            for value in (getattr(config, name, None), config.to_dict().get(name))
            if value
        }
        assert len(given) <= 1, family
        found[family] = families.expert_count(config)
        assert found[family] == families.expert_count(config.to_dict()) == max(given, default=1), family
    assert len(found) > 30
    assert {
        name: found[name]
        for name in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "ernie4_5_moe")
    } == {
        "mixtral": 8,
        "qwen2_moe": 60,
        "qwen3_moe": 128,
        "deepseek_v3": 256,
        "gpt_oss": 128,
        "ernie4_5_moe": 64,
    }


@pytest.mark.parametrize(
    ("fields", "widest", "mean"),
    # five layers of 256, one of 512
    [
        ({}, 512, (4, 299)),
        ({"head_dim": 16, "global_head_dim": 16}, 16, (4, 16)),
    ],
    ids=["published", "narrow"],
)
def test_heads_of_layers_that_differ(fields: dict[str, Any], widest: int, mean: tuple[int, int]) -> None:
    config = AutoConfig.for_model(**GEMMA4, **fields)
    assert len(heads_by_layer(config)) == 6
    assert (widest_head(config), mean_heads(config)) == (widest, mean)


def test_unknown_family_has_no_quirk() -> None:
    assert families.family_of("no-such-family") == families.family_of(None) == families.Family()


def test_tie_setting_falls_back_to_text_config():
    assert tie_setting({"text_config": {"tie_word_embeddings": False}}) is False
    assert tie_setting({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}) is True
    assert tie_setting({}) is None


def tied_names_of_transformers() -> dict[str, dict[str, str]]:
    """{class: `_tied_weights_keys`} of the causal language models, read from the source that is installed."""
    found: dict[str, dict[str, str]] = {}
    for path in MODELS.glob("*/modeling_*.py"):
        for text in path.read_text(encoding="utf-8").split("\nclass ")[1:]:
            name = text.partition("(")[0]
            keys = re.search(r"\n    _tied_weights_keys = (\{[^}]*\})", text)
            if name.endswith(("ForCausalLM", "LMHeadModel")) and keys is not None:
                found[name] = ast.literal_eval(keys[1])
    return found


def test_heads_and_embeddings_of_all_causal_models_are_known():
    classes = tied_names_of_transformers()
    assert len(classes) > 100
    unknown = set()
    for name, pairs in classes.items():
        for head, embedding in pairs.items():
            if head.endswith(".weight") and tied_candidates(dict.fromkeys((head, embedding), (100, 8))) != {
                head: embedding
            }:
                unknown.add(name)
    # ProphetNet ties two embeddings and Blt an embedding to the head: both copies are written, which loads as
    # well.
    assert unknown <= {"ProphetNetForCausalLM", "BltForCausalLM"}


def test_similarly_named_layers_are_not_paired():
    names = [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
    ]
    assert tied_candidates(dict.fromkeys(names, (8, 8))) == {"lm_head.weight": "model.embed_tokens.weight"}
