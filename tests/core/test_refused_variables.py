"""Environment variables that a library refuses when it is imported are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.processes import describe_failure
from fsdp_tune.core.refused_variables import find_refusal, refuse_odd_booleans

TORCH = "import torch, torch.distributed"


def stderr_of(code: str, **variables: str) -> tuple[str, dict[str, str]]:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 1, done.stderr
    return done.stderr, environment


@pytest.mark.parametrize(
    ("code", "name", "value", "library"),
    [
        ("import huggingface_hub.constants", "HF_HUB_DOWNLOAD_TIMEOUT", "abc", "huggingface_hub"),
        *(
            pytest.param(code, name, value, library, marks=pytest.mark.slow)
            for code, name, value, library in (
                (TORCH, "TORCH_LOGS", "garbage", "torch"),
                (TORCH, "TORCH_LOGS_FORMAT", "%q", "torch"),
                (TORCH, "TORCH_DISTRIBUTED_DEBUG", "garbage", "torch"),
                (TORCH, "PYTORCH_JIT", "abc", "torch"),
                ("import torch.distributed.run", "LOGLEVEL", "abc", "torch"),
                ("import torch._inductor.config", "TORCHINDUCTOR_COMPILE_THREADS", "abc", "torch"),
                ("import datasets.config", "HF_DATASETS_IN_MEMORY_MAX_SIZE", "abc", "datasets"),
                ("import typer.rich_utils", "TERMINAL_WIDTH", "abc", "typer"),
            )
        ),
    ],
)
def test_installed_library_that_refuses_a_variable(code: str, name: str, value: str, library: str) -> None:
    text, environment = stderr_of(code, **{name: value})
    problem = find_refusal(f"W0101 a line of a log\n{text}\nanother", environment)
    assert problem is not None
    assert problem.message.startswith(f"{library} does not accept the environment variable {name}={value}: ")
    assert problem.hint == f"correct it, or remove it: `unset {name}`"


READS = {
    "by_statement": 'import os\nLIMIT = (\n    int(\n        os.environ.get("SOME_LIMIT", "1")\n    )\n)\n',
    "by_helper": 'import os\ndef number(text):\n    return int(text)\nOTHER = number("1")\nLIMIT = '
    'number(os.environ["SOME_LIMIT"])\n',
    "by_name": 'import os\ndef check():\n    raise RuntimeError("SOME_LIMIT must be a number")\ncheck()\n',
    "by_value": (
        'import os\nNAME = "SOME_" + "LIMIT"\ndef check(text):\n    raise ValueError(f"unknown: '
        '{text.upper()}")\ncheck(os.environ[NAME])\n'
    ),
}


@pytest.mark.parametrize("module", READS)
def test_way_in_which_a_library_reads_a_variable(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, environment = imported(
        tmp_path, module, READS[module], {"SOME_LIMIT": "ten-ish", "OTHER_LIMIT": "2"}
    )
    problem = find_refusal(text, environment)
    assert problem is not None
    assert "somelib does not accept the environment variable SOME_LIMIT=ten-ish" in problem.message
    monkeypatch.setenv("SOME_LIMIT", "ten-ish")
    with pytest.raises(FsdpTuneError, match="SOME_LIMIT=ten-ish") as caught:
        describe_failure(1, text)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "source",
    [
        'raise ImportError("libx.so: cannot open shared object file; set SOME_LIMIT")\n',
        'raise ValueError("something else")\n',
        'def f(): raise MemoryError("SOME_LIMIT")\nf()\n',
    ],
)
def test_import_that_fails_for_another_reason(source: str, tmp_path: Path) -> None:
    assert find_refusal(*imported(tmp_path, "other", source, {"SOME_LIMIT": "ten-ish"})) is None


def test_error_outside_an_import_is_not_a_refusal() -> None:
    """CUDA's out-of-memory message names PYTORCH_CUDA_ALLOC_CONF, which the user may have set rightly."""
    text = (
        'Traceback (most recent call last):\n  File "/x/site-packages/torch/nn/modules/linear.py", '
        "line 1, in forward\n"
        "torch.OutOfMemoryError: CUDA out of memory. Try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
    )
    assert find_refusal(text, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) is None


def test_program_that_runs_as_a_module_is_not_imported() -> None:
    """Else every error of a launcher, and of a child in a wheel, would be the fault of a variable whose value
    is in its message."""
    frame = '  File "/venv/lib/python3.11/site-packages/{}", line 1, in {}\n'
    start = "Traceback (most recent call last):\n"
    started = f'{start}  File "<frozen runpy>", line 88, in _run_code\n'
    child = (
        started
        + frame.format("fsdp_tune/answer/score.py", "<module>")
        + frame.format("torch/nn/linear.py", "forward")
    )
    assert find_refusal(f"{child}RuntimeError: found cuda and cpu\n", {"ACCELERATOR": "cuda"}) is None
    launcher = (
        started
        + frame.format("accelerate/commands/launch.py", "<module>")
        + frame.format("torch/launcher/api.py", "launch_agent")
    )
    ended = (
        f"{launcher}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n  time: "
        "2026-11-29_06:16:01\n"
    )
    assert find_refusal(ended, {"OMP_NUM_THREADS": "16"}) is None
    package = (
        start
        + '  File "<frozen runpy>", line 112, in _get_module_details\n'
        + frame.format("accelerate/__init__.py", "<module>")
    )
    found = find_refusal(f"{package}ValueError: unknown: abc\n", {"ACCELERATE_X": "abc"})
    assert found is not None
    assert found.message.startswith("accelerate does not accept")


def test_secret_is_not_repeated(tmp_path: Path) -> None:
    source = 'import os\nVALUE = int(os.environ["SOME_API_KEY"])\n'
    problem = find_refusal(*imported(tmp_path, "keyed", source, {"SOME_API_KEY": "hunter2-hunter2"}))
    assert problem is not None
    assert "hunter2" not in problem.message


def imported(
    tmp_path: Path, module: str, source: str, variables: dict[str, str]
) -> tuple[str, dict[str, str]]:
    """The traceback of an import of `somelib.MODULE`, and the environment."""
    library = tmp_path / "site-packages" / "somelib"
    library.mkdir(parents=True)
    (library / "__init__.py").touch()
    (library / f"{module}.py").write_text(source)
    environment = {**os.environ, **variables}
    code = f"import sys\nsys.path.insert(0, {str(library.parent)!r})\nimport somelib.{module}\n"
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    return done.stderr, environment


@pytest.mark.parametrize(
    ("value", "is_refused"),
    [("1", False), ("on", False), ("True", False), ("no", False), ("", False), ("maybe", True)],
)
def test_switch_is_on_or_off(value: str, is_refused: bool) -> None:
    if not is_refused:
        refuse_odd_booleans({"HF_HUB_OFFLINE": value})
        return
    with pytest.raises(FsdpTuneError, match="HF_HUB_OFFLINE=maybe is neither on nor off"):
        refuse_odd_booleans({"HF_HUB_OFFLINE": value})


@pytest.mark.parametrize(
    ("module", "source", "hidden", "reason"),
    [
        ("yaml.py", "", "the installed `yaml`", "AttributeError: module 'yaml' has no attribute 'safe_load'"),
        ("yaml/__init__.py", "raise RuntimeError('no')", "the installed `yaml`", "RuntimeError: no"),
        (
            "json.py",
            "",
            "Python's own module `json`",
            "AttributeError: module 'json' has no attribute 'loads'",
        ),
    ],
)
def test_module_of_python_path_that_hides_another_is_named(
    module: str, source: str, hidden: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / module
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    name = module.removesuffix("/__init__.py").removesuffix(".py")
    code = f"import {name}\n{name}.{'safe_load' if name == 'yaml' else 'loads'}('1')"
    text, environment = stderr_of(code, PYTHONPATH=f"{tmp_path}:/other")
    problem = find_refusal(f"a line\n{text}", environment)
    assert problem is not None
    assert problem.message == f"PYTHONPATH leads to {path}, which hides {hidden}: {reason}"
    assert problem.hint == f"rename {path}, or leave {tmp_path} out of PYTHONPATH"


@pytest.mark.parametrize(
    ("files", "code"),
    [
        (("mine.py",), "import mine; mine.nothing"),  # hides nothing
        (("yaml.py",), "import os; os.nothing"),  # is not imported
        (("yaml.py",), "raise ValueError(\"module 'yaml'\")"),
        (("yaml/data.txt",), "import yaml; yaml.nothing"),  # a directory without a module
    ],
)
def test_error_that_no_hidden_module_explains(files: tuple[str, ...], code: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_refusal(*stderr_of(code, PYTHONPATH=str(tmp_path))) is None
