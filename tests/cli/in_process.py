"""Commands in the process of the test, which costs milliseconds where a process of their own takes a second
to import."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from typer.testing import CliRunner, Result

from fsdp_tune.cli.app import app
from tests.cli.conftest import refuse_undeclared


def invoke(*words: object, typed: str = "") -> Result:
    """Run `fsdp-tune WORDS`. A document of `--json` must be one of the command's declared answers."""
    done = CliRunner().invoke(app, [str(word) for word in words], input=typed)
    if "--json" in words and words[:2] != ("recipes", "schema"):
        refuse_undeclared([str(word) for word in words], done.stdout)
    return done


def answer(*words: object, code: int = 0, typed: str = "") -> dict[str, Any]:
    """Return the document of a command that ends with `code`."""
    done = invoke(*words, "--json", typed=typed)
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def errors(*words: object, code: int = 2) -> list[dict[str, Any]]:
    """Return the errors of a command that is refused."""
    return answer(*words, code=code)["errors"]


def settings(*pairs: str) -> list[str]:
    """Return `--set KEY=VALUE` for each pair."""
    return [word for pair in pairs for word in ("--set", pair)]


def settings_of(values: Mapping[str, object]) -> list[str]:
    return settings(*(f"{key}={value}" for key, value in values.items()))
