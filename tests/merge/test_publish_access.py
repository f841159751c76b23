"""Before a push: whether the hub knows the account, and which licence the card gets from its base."""

from __future__ import annotations

from pathlib import Path
from signal import SIGTERM
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.merge.publish import HubTarget, _add_licence, check_access


@pytest.mark.parametrize(
    ("repository", "error", "words"),
    [
        (
            "me/mine",
            ConnectionError("no route to the hub\nsee the log"),
            "`me/mine` at the end: no route to the hub",
        ),
        ("me/mine", ValueError("Invalid user token."), "`me/mine` at the end: Invalid user token."),
    ],
)
def test_account_that_cannot_push_is_refused_before_training(
    repository: str, error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def whoami(_api: Any) -> None:
        asked.append("whoami")
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", whoami)
    with pytest.raises(FsdpTuneError) as caught:
        check_access(HubTarget(repository))
    problem = caught.value.problems[0]
    assert (problem.code, problem.where.key, caught.value.exit_code) == (
        "push-no-access",
        "training.push_to_hub",
        2,
    )
    assert words in problem.message
    assert "\n" not in problem.message
    assert "`hf auth login`" in str(problem.hint)
    assert asked == ["whoami"]


def test_name_that_is_none_is_refused_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", lambda _api: pytest.fail("the hub is asked"))
    with pytest.raises(FsdpTuneError) as caught:
        check_access(HubTarget("me//mine"))
    (problem,) = caught.value.problems
    assert (problem.code, problem.where.key) == ("push-name", "training.hub_model_id")


def test_known_account_may_push_and_a_stop_signal_is_no_lack_of_access(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", lambda _api: {"name": "me"})
    check_access(HubTarget("me/mine"))
    stopped = StoppedBySignal(SIGTERM)

    def whoami(_api: Any) -> None:
        raise stopped

    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", whoami)
    with pytest.raises(StoppedBySignal):
        check_access(HubTarget("me/mine"))


class Hub:
    """In place of the hub's client: the metadata of the base's card, or an error."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def model_info(self, name: str) -> Any:
        assert name == "org/base"
        if isinstance(self._found, BaseException):
            raise self._found
        return SimpleNamespace(card_data=self._found)


def licence_of(folder: Path, found: Any, front: str = "base_model: org/base\n") -> tuple[Any, list[Any]]:
    """Return the metadata of a card after the push, and the notices."""
    path = folder / "README.md"
    path.write_text(f"---\n{front}library_name: transformers\n---\n# mine\n\nText of the owner.\n")
    notices = _add_licence(Hub(found), folder)
    assert "Text of the owner." in path.read_text()
    return ModelCard.load(path).data, notices


def test_licence_of_the_base_is_taken_with_its_name_and_link(tmp_path: Path) -> None:
    found = huggingface_hub.ModelCardData(
        license="other", license_name="acme", license_link="https://acme.example"
    )
    data, notices = licence_of(tmp_path, found)
    assert (data.license, data.license_name, data.license_link) == ("other", "acme", "https://acme.example")
    assert notices == []


def test_licence_of_the_owner_stays(tmp_path: Path) -> None:
    front = "base_model: org/base\nlicense: mit\n"
    data, notices = licence_of(tmp_path, AssertionError("the hub is not asked"), front)
    assert (data.license, notices) == ("mit", [])


@pytest.mark.parametrize(
    ("found", "front", "words"),
    [
        (ConnectionError(), "base_model: org/base\n", "the licence of the base `org/base` is unknown"),
        (None, "base_model: org/base\n", "the licence of the base `org/base` is unknown"),
        (huggingface_hub.ModelCardData(), "base_model: org/base\n", "is unknown, so the card names none"),
        (None, "", "the card names no base on the hub"),
        (None, "base_model: [org/base, org/other]\n", "the card names no base on the hub"),
    ],
)
def test_card_without_a_known_licence_is_a_notice(found: Any, front: str, words: str, tmp_path: Path) -> None:
    data, [notice] = licence_of(tmp_path, found, front)
    assert data.license is None
    assert (notice.code, notice.where.source) == ("licence-unknown", str(tmp_path / "README.md"))
    assert words in notice.message


def test_stop_signal_while_the_licence_is_read_ends_the_push(tmp_path: Path) -> None:
    with pytest.raises(StoppedBySignal):
        licence_of(tmp_path, StoppedBySignal(SIGTERM))
