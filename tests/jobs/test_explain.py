from __future__ import annotations

import json

import pytest

from fsdp_tune.cli.explain import explain as command
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.jobs.answers import CodeExplanation, CodeMessage, KeyExplanation
from fsdp_tune.jobs.explain import error_codes, explain
from fsdp_tune.recipe.schema.reference import described_names
from tests.cli.conftest import refuse_undeclared


def test_every_key_and_code_is_explained() -> None:
    for name in described_names():
        found = explain(name)
        assert isinstance(found, KeyExplanation)
        assert found.takes
        assert found.keys or found.meaning or found.key.count(".") == 0, name
    for code, explanation in error_codes().items():
        assert explain(code) == explanation
        assert explanation.code == code
        assert explanation.text or explanation.messages
        assert not explanation.text.startswith("_")
        assert "](" not in explanation.text


def test_code_has_the_messages_and_hints_of_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    expected = CodeMessage("`lora:` needs PEFT, which is not installed", "pip install peft")
    assert explain("lora-needs-peft") == CodeExplanation("lora-needs-peft", "", [expected])
    command(word="lora-needs-peft", json_output=False)
    assert (
        capsys.readouterr().out
        == f"lora-needs-peft\n\nmessage: {expected.message}\nhint:    {expected.hint}\n"
    )
    command(word="contradiction", json_output=False)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("message: ") for line in lines) == 10
    assert lines[-1].startswith("and ")


def test_key_has_default_values_and_effects() -> None:
    found = explain("per_device_train_batch_size")
    assert isinstance(found, KeyExplanation)
    assert (found.key, found.on_resume) == ("training.per_device_train_batch_size", "free")
    assert "memory" in found.affects
    assert explain("data.train[0].path") == explain("data.train.path")
    packing = explain("data.packing")
    assert isinstance(packing, KeyExplanation)
    assert (packing.default, packing.takes, packing.is_required) == (False, "true or false", False)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("learning_rat", "did you mean `training.learning_rate`?"),
        ("training.optm", "did you mean `training.optim`?"),
        ("trainng.max_steps", "did you mean `training.max_steps`?"),
        ("data-chnged", "did you mean `data-changed`?"),
        ("max_seq_length", "it is `data.max_length` here"),
        ("path", "give one of `data.train.path`, `data.eval.path` or `evaluation.sets.path`"),
    ],
)
def test_unknown_word_gets_the_closest_one(word: str, hint: str) -> None:
    with pytest.raises(FsdpTuneError) as caught:
        explain(word)
    assert caught.value.problems[0].hint == hint


@pytest.mark.parametrize("word", ["training.optim", "data", "data-changed"])
def test_command_prints_lines_or_a_document(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    command(word=word, json_output=False)
    assert capsys.readouterr().out.startswith(f"{word}\n")
    command(word=word, json_output=True)
    document = capsys.readouterr().out
    refuse_undeclared(["explain"], document)
    assert word in json.loads(document).values()
