"""Facts of the machine, on Linux and elsewhere."""

from __future__ import annotations

import resource
import sys
from types import SimpleNamespace

import pytest

from fsdp_tune.core.host import peak_resident_bytes


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_is_in_the_unit_of_the_system(
    system: str, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=3 << 20))
    assert peak_resident_bytes() == (3 << 20) * unit
