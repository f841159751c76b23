"""Traces of recipes, from a cache or from a child process that imports torch: the surface never does.

A trace depends on what the key holds and on nothing else: the recipe without the keys that no allocation sees, the model's
configuration, the versions of torch, transformers and this package's own sources.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import fsdp_tune
from fsdp_tune.errors import FsdpTuneError, Problem
from fsdp_tune.launch import children
from fsdp_tune.plan.kept import state_of
from fsdp_tune.plan.trace_format import Trace
from fsdp_tune.recipe.schema import Recipe

COMMAND = (sys.executable, "-P", "-m", "fsdp_tune.trace.many")
_UNSEEN = ("name", "output_dir", "checkpoint", "merge", "recipe_version")
"""Sections and keys that change nothing on the device."""
_SEEN_OF_DATA = ("max_length", "packing", "pad_to_multiple_of")
_SEEN_OF_LAUNCH = ("num_processes", "num_machines", "device")
_SEEN_OF_TRAINING = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "optim",
    "optim_args",
    "max_grad_norm",
    "label_smoothing_factor",
    "weight_decay",
)


class Tracing:
    """Traces on demand. The child is started by the first recipe that the cache lacks, and lives until `close`: torch is imported once.

    `exact`: at full depth. `vocabulary`: of the tokenizer, where it may grow the embedding. `traced` is called as each comes in.
    """

    def __init__(
        self,
        cache: Path,
        *,
        exact: bool = False,
        vocabulary: int | None = None,
        offline: bool = False,
        traced: Callable[[], None] = lambda: None,
    ) -> None:
        self.cache, self.exact, self.vocabulary, self.offline, self.traced = cache, exact, vocabulary, offline, traced
        self._found: dict[str, Trace | FsdpTuneError] = {}
        self._asked: list[str] = []
        """Keys, by the number of their job."""
        self._child: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None

    def __enter__(self) -> Tracing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the child, whatever it is at."""
        if self._child is not None:
            children.end(self._child)
            for pipe in (self._child.stdin, self._child.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # pyright: ignore[reportOptionalMemberAccess]  both were asked for
        if self._log is not None:
            self._log.close()
        self._child = self._log = None

    def ask(self, recipes: Sequence[Recipe]) -> list[str]:
        """Has resolved recipes traced in the background; returns the keys for `result`."""
        keys = [trace_key(recipe, exact=self.exact, vocabulary=self.vocabulary) for recipe in recipes]
        for key, recipe in zip(keys, recipes, strict=True):
            if key in self._found or key in self._asked:
                continue
            cached = _cached(self._file(key))
            if cached is not None:
                self._found[key] = cached
                continue
            self._send({"job": len(self._asked), "recipe": recipe.model_dump(mode="json", by_alias=True), "output": str(self._file(key))})
            self._asked.append(key)
        return keys

    def result(self, key: str) -> Trace | FsdpTuneError:
        """The trace, or the reason why there is none; waits for it."""
        while key not in self._found:
            self._receive()
        return self._found[key]

    def __call__(self, recipes: Sequence[Recipe]) -> list[Trace | FsdpTuneError]:
        return [self.result(key) for key in self.ask(recipes)]

    def _file(self, key: str) -> Path:
        return self.cache / f"{key}.npz"

    def _send(self, job: dict[str, Any]) -> None:
        if self._child is None:
            self.cache.mkdir(parents=True, exist_ok=True)
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
            environment |= {"HF_HUB_OFFLINE": "1"} if self.offline else {}
            self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the child
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
            self._child = children.start(COMMAND, environment, **pipes)
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a child that died says why when its answer is missed
            self._child.stdin.write(json.dumps(job | {"exact": self.exact, "vocabulary": self.vocabulary}) + "\n")
            self._child.stdin.flush()

    def _receive(self) -> None:
        """One answer; where none will come any more, the child's last words are the answer to all that is open."""
        assert self._child is not None
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            lost = self._last_words(self._child.wait())
            self._found |= {key: lost for key in self._asked if key not in self._found}
            return
        answer = json.loads(line)
        key = self._asked[answer["job"]]
        self._found[key] = _result(self._file(key), answer["problems"])
        self.traced()

    def _last_words(self, code: int) -> FsdpTuneError:
        assert self._log is not None
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        last = lines[-1] if lines else f"it ended with exit code {code}"
        return FsdpTuneError(
            Problem("trace-failed", f"the step could not be traced: {last}", hint="`fsdp-tune env` shows the installation")
        )


def trace_key(recipe: Recipe, *, exact: bool, vocabulary: int | None) -> str:
    """Names a trace by everything that it depends on."""
    data: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True)
    for name in _UNSEEN:
        data.pop(name)
    for section, seen in (("data", _SEEN_OF_DATA), ("launch", _SEEN_OF_LAUNCH), ("training", _SEEN_OF_TRAINING)):
        data[section] = {key: value for key, value in data[section].items() if key in seen}
    parts = [json.dumps(data, sort_keys=True), str(exact), str(vocabulary), _configuration(recipe), _sources(), *_versions()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _configuration(recipe: Recipe) -> str:
    """The config.json of a local model: two of them may have one path."""
    for path in (recipe.model.name_or_path, recipe.model.from_config):
        file = Path(path) if isinstance(path, str) else None
        config = file / "config.json" if file is not None and file.is_dir() else file
        if config is not None and config.is_file():
            return hashlib.sha256(config.read_bytes()).hexdigest()
    return ""


def _sources() -> str:
    """The package's own code that a trace runs, by size and time of change."""
    root = Path(fsdp_tune.__file__).parent
    states = "".join(state_of(root / part) for part in ("trace", "model", "recipe"))
    return hashlib.sha256(states.encode()).hexdigest()


def _versions() -> list[str]:
    return [f"{name} {metadata.version(name)}" for name in ("torch", "transformers")]


def _cached(path: Path) -> Trace | None:
    """A file that is no trace any more is made anew."""
    try:
        return Trace.load(path)
    except (OSError, ValueError, KeyError):
        return None


def _result(path: Path, problems: list[dict[str, Any]]) -> Trace | FsdpTuneError:
    if not problems:
        trace = _cached(path)
        if trace is not None:
            return trace
        return FsdpTuneError(Problem("trace-failed", f"{path} was written and cannot be read"))
    return FsdpTuneError(*map(Problem.from_dict, problems))
