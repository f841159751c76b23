"""Python objects that sections of a file name: `_component_` of torchtune's recipes, `_target_` of
Automodel's."""

from __future__ import annotations

COMPONENT = "_component_"
TARGET = "_target_"


def class_named(component: object) -> str:
    return str(component or "").rpartition(".")[2]
