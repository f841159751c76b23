"""The public Python API: its frozen signatures, a cheap import, and a training from a plain script."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fsdp_tune


def signature(function: Callable[..., Any]) -> str:
    """Defaults that are objects are written as their type, and types without their options of the command
    line."""
    plain = inspect.signature(function)
    short = [
        each.replace(
            annotation=bare(each.annotation),
            default=type(each.default)
            if type(each.default).__module__.startswith("fsdp_tune.")
            else each.default,
        )
        for each in plain.parameters.values()
    ]
    return str(plain.replace(parameters=short))


def bare(annotation: Any) -> Any:
    """`Annotated[int, Option(…)]` → `int`; annotations are texts."""
    match ast.parse(annotation, mode="eval").body if isinstance(annotation, str) else None:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, *_])):
            return ast.unparse(kind)
    return annotation


def signatures() -> str:
    lines: list[str] = []
    for name in fsdp_tune.__all__:
        value = getattr(fsdp_tune, name)
        assert value.__doc__, name
        lines.append(f"{name}{signature(value)}")
        if inspect.isclass(value):
            methods = [
                each for each in vars(value) if not each.startswith("_") and callable(getattr(value, each))
            ]
            lines += [f"    {each}{signature(getattr(value, each))}" for each in sorted(methods)]
    return "\n".join(lines) + "\n"


def test_public_signatures_match_golden_file(repository: Path, update_golden: bool) -> None:
    golden = repository / "tests" / "golden" / "surface_api.txt"
    if update_golden:
        golden.write_text(signatures(), encoding="utf-8")
    assert signatures() == golden.read_text(encoding="utf-8")


def test_importing_package_loads_no_third_party_library() -> None:
    program = (
        "import sys, fsdp_tune\n"
        "assert not {'pydantic', 'numpy', 'torch', 'typer'} & set(sys.modules)\n"
        "fsdp_tune.Observer\n"
        "assert not {'numpy', 'torch', 'typer'} & set(sys.modules)\n"
        "try: fsdp_tune.nothing\n"
        "except AttributeError: pass\n"
        "else: raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_train_outside_the_main_thread_is_refused() -> None:
    errors: list[fsdp_tune.FsdpTuneError] = []

    def start() -> None:
        with pytest.raises(fsdp_tune.FsdpTuneError) as caught:
            fsdp_tune.train(fsdp_tune.load_recipe("gpt2_smoke"))
        errors.append(caught.value)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert [problem.code for problem in errors[0].problems] == ["not-main-thread"]


def test_job_errors_have_line_of_their_key(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model:\n  name_or_path: gpt2\n  trust_remote_code: true\ndata: {train: [{path: "
        "builtin:arithmetic}]}\n"
    )
    with pytest.raises(fsdp_tune.FsdpTuneError) as caught:
        fsdp_tune.validate(fsdp_tune.load_recipe(path))
    (problem,) = caught.value.problems
    assert (problem.code, problem.where.source, problem.where.line) == (
        "remote-code-not-trusted",
        str(path),
        3,
    )


SCRIPT = """
import json
import signal
import fsdp_tune

class Recorder(fsdp_tune.Observer):
    def __init__(self):
        self.losses, self.stages = [], []
    def metrics(self, line):
        if "loss" in line:
            self.losses.append(line["loss"])
    def inputs_checked(self, inputs):
        self.stages.append("checked")
    def run_opened(self, run, log):
        self.stages.append("opened")

if __name__ == "__main__":
    keys = {"training.max_steps": 2, "training.logging_steps": 1, "merge.at_end": "false", "launch.num_processes": 1, "output_dir": "run"}
    recipe = fsdp_tune.load_recipe("gpt2_smoke", [f"{key}={value}" for key, value in keys.items()])
    recorder, other = Recorder(), Recorder()
    result = fsdp_tune.train(recipe, observer=recorder)
    second = fsdp_tune.load_recipe("gpt2_smoke", [f"{key}={value}" for key, value in (keys | {"output_dir": "second"}).items()])
    fsdp_tune.train(second, observer=other)
    merged = fsdp_tune.merge_checkpoint(result.run.path, fsdp_tune.MergeOptions(dtype="bf16"))
    again = fsdp_tune.train(recipe, fsdp_tune.TrainOptions(resume="auto"))
    try:
        fsdp_tune.train(recipe)
    except fsdp_tune.FsdpTuneError as error:
        refused = [problem.code for problem in error.problems]
    print(json.dumps({
        "result": result.as_dict(), "losses": recorder.losses, "stages": recorder.stages, "merged": merged.as_dict(),
        "second": other.losses, "default": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "lines": len(result.metrics.read_text().splitlines()), "had_finished": again.had_finished, "refused": refused,
    }))
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.ranks
def test_script_trains_twice_merges_and_resumes_through_the_api(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # the job itself prints nothing
    assert (found["result"]["exit_reason"], found["result"]["steps"]) == ("finished", 2)
    assert (len(found["losses"]), found["stages"], found["lines"] > 2) == (2, ["checked", "opened"], True)
    assert (tmp_path / "run" / "merged" / "model.safetensors").exists()
    assert found["merged"]["dtype"] in ("bfloat16", "bf16")
    assert (found["second"], found["default"]) == (found["losses"], True)
    assert found["had_finished"]
    assert found["refused"] == ["run-directory-used"]
