"""Untrusted input: answers of the hub, and chat templates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.conftest import REPOSITORY

SECRET = "hf_" + "s3cret" * 6
NOT_FOUND = {
    "tokenizer": "tokenizer-not-found",
    "template": "no-such-template",
    "model": "model-not-found",
    "base": "merge-base",
}
"""Each way by which the package asks the hub, and its code for a repository that is not there."""
ANSWERS = {
    "missing": None,
    "unversioned": None,
    "gated": "gated",
    "unauthorised": "hub-refused",
    "forbidden": "hub-refused",
    "busy": "hub-busy",
    "down": "hub-busy",
    "cut": "hub-busy",
}


def test_hub_errors_are_distinguished_and_never_contain_the_token(tmp_path: Path) -> None:
    """A local server whose answer depends on the repository name; every way to query it must give the same
    message."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": SECRET,
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": str(REPOSITORY),
    }
    for proxy in ("http_proxy", "https_proxy", "all_proxy"):
        environment.pop(proxy, None)
        environment.pop(proxy.upper(), None)
    command = [sys.executable, "-m", "tests.faults.stub_hub", *ANSWERS]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    for door, missing in NOT_FOUND.items():
        problems = told["told"][door]
        assert {name: problem["code"] for name, problem in problems.items()} == {
            name: code or missing for name, code in ANSWERS.items()
        }, door
        assert "the hub responds with 429" in problems["busy"]["message"], door
        assert (
            "neither on this disk nor accessible to your account on the hub" in problems["missing"]["message"]
        ), door
        assert "no such revision" in problems["unversioned"]["message"], door
        assert "/org/gated" in problems["gated"]["hint"], f"{door}: the page on which one asks for access"
    assert told["authorised_requests"] > 0, "the token was sent, and to this server alone"
    assert SECRET not in done.stdout + done.stderr
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% for x in range(10**10) %}{% endfor %}", "Range too big"),
    ],
)
def test_template_is_rendered_in_sandbox(template: str, words: str) -> None:
    encoder = load_encoder(Recipe.model_validate({"model": {"tokenizer": "builtin:arithmetic"}}))
    with pytest.raises(Exception, match=words):
        encoder.render([{"role": "user", "content": "a"}], template, tools=None, generation_prompt=False)
