"""A byte of any file of a finished run flips: each later command refuses the file by its name, or answers as
before."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from fsdp_tune.core.errors import FsdpTuneError, failed_error
from fsdp_tune.jobs.generate import AnsweringModel
from fsdp_tune.run.directory import RunDir
from tests.cli.in_process import invoke, settings
from tests.session import made_once

KEYS = (
    "training.max_steps=4",
    "training.warmup_steps=0",
    "training.save_steps=2",
    "training.logging_steps=2",
    "launch.device=cpu",
)
UNCHECKED = re.compile(
    r"metrics\.jsonl|logs/.*|tensorboard/.*|merged/README\.md|recipe\.yaml|accelerate\.yaml|run\.lock"
)
"""Files that grow line by line, text for people, and files that each start writes anew: no command computes
with their bytes."""


@pytest.fixture(scope="module")
def finished() -> Path:
    def make(folder: Path) -> None:
        words = settings(*KEYS, f"output_dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}")
        done = invoke("train", "gpt2_smoke", *words)
        assert done.exit_code == 0, done.output

    return made_once("finished-run", make)


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A copy in the place of the run, whose files name that place; what answers and what uploads are
    replaced."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(AnsweringModel, "start", _asked)
    monkeypatch.setattr(huggingface_hub, "HfApi", _Hub)
    shutil.copytree(finished / "run", tmp_path / "kept")
    return RunDir(finished / "run")


def _reached(*answer: object) -> FsdpTuneError:
    """Return the error with which a command ends where it would answer; its message has what it would answer
    from."""
    return failed_error("reached", repr(answer))


@contextmanager
def _asked(request: Any, names: Any, _observer: Any) -> Iterator[Any]:
    files = [
        path
        for model in request.models
        for path in sorted(Path(model.adapter or model.weights).rglob("*"))
        if path.is_file()
    ]
    raise _reached(
        request.as_json(),
        [hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.name != "README.md"],
    )
    yield


class _Hub:
    def __init__(self, **_: Any) -> None:
        pass

    def create_repo(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=name)

    def model_info(self, _name: str) -> Any:
        return SimpleNamespace(private=True, card_data=None)

    def upload_folder(self, *, folder_path: Path, **_: Any) -> Any:
        files = sorted(
            path for path in Path(folder_path).rglob("*") if path.is_file() and path.name != "README.md"
        )
        raise _reached([(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files])


COMMANDS: dict[str, tuple[str, ...]] = {
    "merge": ("merge-checkpoint", "RUN", "--output", "OUT", "--json"),
    "generate": ("generate", "RUN", "--prompts", "PROMPTS"),
    "push": ("push", "RUN", "--to", "me/model"),
    "status": ("status", "RUN", "--json"),
    "resume": (
        "train",
        "gpt2_smoke",
        *settings(*KEYS[1:], "output_dir=RUN", "training.max_steps=6"),
        *("--resume", "auto", "--dry-run", "--json"),
    ),
}


def outcome(command: str, run: RunDir, out: Path) -> tuple[int, str, str]:
    """Return the exit code, the answer without times, and all that was printed."""
    prompts = out.with_name("prompts.jsonl")
    prompts.write_text('{"prompt": "1 + 1 ="}\n')
    paths = {"RUN": str(run.path), "OUT": str(out), "PROMPTS": str(prompts)}
    words = [
        paths.get(word, word.replace("output_dir=RUN", f"output_dir={run.path}"))
        for word in COMMANDS[command]
    ]
    shutil.rmtree(out, ignore_errors=True)
    done = invoke(*words)
    printed = done.output + repr(done.exception)
    if command == "merge" and done.exit_code == 0:
        made = [path for path in sorted(out.rglob("*")) if path.name not in ("README.md", "merge.json")]
        return 0, repr([(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in made]), printed
    return done.exit_code, re.sub(r"\d+\.\d+|\b\d+ (s|min|h)\b", "N", printed), printed


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def flip(path: Path) -> None:
    """Flip a bit of a digit or letter near the middle of a file, so that JSON stays JSON; of other files, of
    the middle byte."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    at = (
        next((at for at in range(middle, len(data)) if chr(data[at]).isalnum()), middle)
        if path.suffix in (".json", ".jinja")
        else middle
    )
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("command", COMMANDS)
def test_command_refuses_a_flipped_file_or_does_not_use_it(command: str, run: RunDir, tmp_path: Path) -> None:
    before = outcome(command, run, tmp_path / "out")
    assert before[0] in (0, 1)
    wrong: list[str] = []
    for name in files_of(run.path):
        if UNCHECKED.fullmatch(name) or (command in ("status", "resume") and name.startswith("checkpoint-")):
            continue  # neither reads the bytes of checkpoints
        flip(run.path / name)
        code, answer, printed = outcome(command, run, tmp_path / "out")
        shutil.copy2(tmp_path / "kept" / name, run.path / name)
        (run.path / name).parent.joinpath("damage.json").unlink(missing_ok=True)
        is_named = code != 0 and str(run.path / name) in printed
        # Without the manifest of the newest checkpoint an older one is used, which is reported.
        is_named = is_named or f"{Path(name).parent.name} is not used" in printed
        if not is_named and (code, answer) != before[:2]:
            wrong.append(f"{name}: exit {code}: {answer[:300]}")
    assert wrong == []
