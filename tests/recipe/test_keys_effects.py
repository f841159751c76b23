from __future__ import annotations

from typing import get_args

from fsdp_tune.recipe.schema.key_effects import UNDECLARED
from fsdp_tune.recipe.schema.keys import Key, all_keys, effect_of
from fsdp_tune.recipe.schema.recipe import Training
from fsdp_tune.recipe.schema.training_fields import PASSED_EFFECTS, TRAINING_FIELDS, owned_names
from fsdp_tune.recipe.schema.value_kinds import Section


def is_only_a_section(key: Key) -> bool:
    annotation = key.field.annotation
    return isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, Section)


def test_every_key_declares_what_it_affects() -> None:
    undeclared = [key.name for key in all_keys() if key.effect is None and not is_only_a_section(key)]
    assert undeclared == [], "add `Annotated[…, Effect(…)]` to the field in recipe/schema*.py"


def test_every_passed_training_field_declares_what_it_affects() -> None:
    assert set(PASSED_EFFECTS) == set(TRAINING_FIELDS.fields) - owned_names() - set(Training.model_fields)


def test_unknown_key_affects_everything_and_cannot_change_on_resume() -> None:
    assert effect_of("training.a_field_of_the_next_release") == UNDECLARED
    assert effect_of("a_new_section.key") == UNDECLARED


def test_keys_inside_a_mapping_have_its_effect() -> None:
    assert effect_of("launch.env.NCCL_DEBUG") == effect_of("launch.env")
    assert effect_of("model.from_config.hidden_size") == effect_of("model.from_config") != UNDECLARED
