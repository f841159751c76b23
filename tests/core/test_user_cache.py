"""A user id without an entry in /etc/passwd and without HOME, as many containers have."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.user_cache import default_cache_directory, home_directory
from fsdp_tune.launch.command.default_config import accelerate_default_config
from fsdp_tune.recipe.references import output_directory
from tests.recipe.loading import load_with


@pytest.fixture(autouse=True)
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(_: int) -> None:
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)


def test_cache_needs_a_directory_and_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FsdpTuneError, match="there is no place for the cache"):
        default_cache_directory()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_directory() == tmp_path / "fsdp-tune"
    assert home_directory() is None
    assert accelerate_default_config({"XDG_CACHE_HOME": str(tmp_path)}) is None
    assert accelerate_default_config({}) is None
    assert output_directory(load_with("").recipe, tmp_path) == (tmp_path / "runs" / "recipe", [])
