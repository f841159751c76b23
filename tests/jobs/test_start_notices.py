"""What is reported before ranks start: settings that are not used, and secrets that are not written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.secrets import MASK
from fsdp_tune.jobs.start_notices import changed_extensions, launch_notices
from fsdp_tune.launch.command.resume import Start
from fsdp_tune.recipe.extensions import Extension
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import Environment
from tests.launch.recipes import BASE, plan


def found(tmp_path: Path, text: str = BASE, **inherited: str) -> dict[str, str]:
    """The notices of a launch, by code."""
    loaded = parse_recipe(text, tmp_path / "mine.yaml")
    launch = plan(tmp_path, inherited=inherited)
    return {notice.code: notice.message for notice in launch_notices(loaded, launch)}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_plain_launch_has_none(tmp_path: Path) -> None:
    assert found(tmp_path, PATH="/bin") == {}


def test_configuration_of_accelerate_is_named_as_unused(tmp_path: Path, home: Path) -> None:
    file = home / "accelerate" / "default_config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("mixed_precision: fp16\n")
    assert found(tmp_path) == {"accelerate-config-ignored": f"{file} is not used: the recipe decides"}


def test_variables_of_another_job_are_named(tmp_path: Path) -> None:
    assert found(tmp_path, RANK="3", WORLD_SIZE="8", PATH="/bin") == {
        "stale-environment": "variables of another job are kept from the ranks: RANK, WORLD_SIZE"
    }


def test_variable_that_looks_like_a_secret_is_named_and_not_shown(tmp_path: Path) -> None:
    message = found(tmp_path, HF_TOKEN="hf_abcdefghijklmnopqrstuvwxyz")["secret-not-written"]
    assert message == "launch.json lists HF_TOKEN without values, which look like secrets"


def test_secret_in_a_comment_of_the_recipe_is_masked_in_the_run(tmp_path: Path) -> None:
    secret = "hf_" + "a1B2" * 9
    message = found(tmp_path, f"# token: {secret}\n{BASE}")["secret-not-written"]
    assert message == (
        f"{tmp_path}/mine.yaml has a comment with what looks like a secret; the run's recipe.yaml gets "
        f"`{MASK}` instead"
    )


METRIC = Extension("metrics", "rouge", "package.module:metric", "my-metrics", "1.0")


@pytest.mark.parametrize(
    ("now", "codes"),
    [
        ([METRIC], []),
        ([replace(METRIC, version="2.0")], ["extension-changed"]),
        ([replace(METRIC, kind="callbacks", version="2.0")], []),
        ([replace(METRIC, name="bleu")], []),
    ],
    ids=["same", "other version", "other kind", "new"],
)
def test_extension_that_changed_since_the_earlier_steps_is_named(
    tmp_path: Path, now: list[Extension], codes: list[str]
) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    checkpoint: Any = SimpleNamespace(path=run.checkpoint(10), step=10)
    start = Start(checkpoint, is_new=False)
    assert changed_extensions(now, start) == [], "a run without a record"
    Environment(extensions=[METRIC.as_dict()]).write(run.environment_json)
    notices = changed_extensions(now, start)
    assert [notice.code for notice in notices] == codes
    for notice in notices:
        assert notice.message == (
            "the steps so far used `rouge` of my-metrics 1.0; from step 10 on `rouge` of my-metrics 2.0"
        )
    assert changed_extensions(now, Start()) == []
