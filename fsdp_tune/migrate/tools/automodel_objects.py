"""Python objects that sections of Automodel's recipes name."""

from __future__ import annotations

TARGET = "_target_"


def class_named(component: object) -> str:
    return str(component or "").rpartition(".")[2]
