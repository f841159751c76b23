"""`train` reads the inspection of an unchanged model from the cache, and inspects whatever may have changed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.jobs import inspection
from fsdp_tune.jobs import kept_inspection as kept
from fsdp_tune.recipe.paths import default_cache_directory
from fsdp_tune.recipe.schema import Recipe
from tests.recipe.loading import load

FACTS: dict[str, Any] = {"embedding_rows": 384, "ratio": 0.1, "units": [["a"]]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory; each inspection appends a line to the file `count` next to it and prints the document `answer.json`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    answer(tmp_path)
    script = "import sys; sys.stdin.read(); open(sys.argv[1] + '/count', 'a').write('x'); print(open(sys.argv[1] + '/answer.json').read())"
    monkeypatch.setattr(inspection, "INSPECT", (sys.executable, "-c", script, str(tmp_path)))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "gpt2"}')
    return model


def answer(place: Path, **changed: Any) -> None:
    (place / "answer.json").write_text(json.dumps(FACTS | {"problems": [], "notices": []} | changed))


def recipe_of(folder: Path, more: str = "") -> Recipe:
    return load(
        f"model: {{name_or_path: {folder}, tokenizer: 'builtin:arithmetic'{more}}}\ndata: {{train: [{{path: 'builtin:arithmetic'}}]}}\n"
    ).recipe


def digest_of(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([document["model"], document["notices"]]).encode()).hexdigest()


def inspections(folder: Path, recipe: Recipe) -> int:
    """Inspect, and return how often the model was inspected so far."""
    kept.inspect_model_once(recipe)
    return len((folder.parent / "count").read_text())


def test_unchanged_model_is_inspected_once(folder: Path) -> None:
    recipe = recipe_of(folder)
    first, second = kept.inspect_model_once(recipe), kept.inspect_model_once(recipe)
    assert first == second
    assert second.model == FACTS
    assert inspections(folder, recipe.model_copy(update={"output_dir": "elsewhere"})) == 1


def test_change_of_file_recipe_variable_or_cache_inspects_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(folder)
    assert inspections(folder, recipe) == 1
    (folder / "config.json").write_text('{"model_type": "gpt3"}')
    assert inspections(folder, recipe) == 2, "same size"
    (folder / "model.safetensors").write_bytes(b"")
    assert inspections(folder, recipe) == 3
    other = recipe_of(folder, ", dtype: bfloat16")
    assert inspections(folder, other) == 4
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert inspections(folder, other) == 5
    for file in (default_cache_directory() / kept.FOLDER).iterdir():
        file.write_text(file.read_text().replace("384", "385"))
    assert inspections(folder, other) == 6, "a damaged file is not used"


FOUND = {"code": "c", "file": None, "line": None, "column": None, "key": None, "message": "m", "hint": "h"}


def test_kept_inspection_repeats_notices(folder: Path) -> None:
    answer(folder.parent, notices=[FOUND])
    recipe = recipe_of(folder)
    first, second = kept.inspect_model_once(recipe), kept.inspect_model_once(recipe)
    assert first == second
    assert [(each.code, each.message, each.hint) for each in second.notices] == [("c", "m", "h")]
    assert inspections(folder, recipe) == 1


def test_inspection_with_problem_is_repeated(folder: Path) -> None:
    answer(folder.parent, problems=[FOUND])
    recipe = recipe_of(folder)
    assert [inspections(folder, recipe), inspections(folder, recipe)] == [1, 2]


def test_what_no_version_identifies_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(folder)
    assert kept.inspection_key(recipe) is not None
    assert kept.inspection_key(recipe_of(folder, ", trust_remote_code: true")) is None
    assert kept.inspection_key(recipe_of(Path("some/hub-model"))) is None
    monkeypatch.setattr(kept, "LIBRARIES", ("fsdp_tune",))  # from a repository, as an editable installation is
    assert kept.inspection_key(recipe) is None
    monkeypatch.setattr(kept, "LIBRARIES", ("pytest",))
    assert kept.inspection_key(recipe) is not None
    (folder / "missing").symlink_to(folder / "nothing")
    assert kept.inspection_key(recipe) is None, "a link without a target"
    (folder / "missing").unlink()
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    assert kept.inspection_key(recipe) is None


def test_oldest_inspections_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "KEPT_FILES", 2)
    for length in (16, 17, 18):
        (folder / "config.json").write_text(str(length))
        kept.inspect_model_once(recipe_of(folder))
    assert len(list((default_cache_directory() / kept.FOLDER).iterdir())) == 2


@pytest.mark.e2e
def test_second_start_of_a_recipe_writes_the_same_run_without_inspecting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def start(output: str) -> dict[str, bytes]:
        command = [sys.executable, "-m", "fsdp_tune", "train", "--config", "gpt2_smoke", "--no-start", "--set", f"output_dir={output}"]
        subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
        return {path.name: path.read_bytes() for path in (tmp_path / output / "model").iterdir()}

    first = start("one")
    (file,) = (tmp_path / "cache" / "fsdp-tune" / kept.FOLDER).iterdir()
    assert start("two") == first
    # Changed with its digest, the file decides: the second start did not inspect.
    document = json.loads(file.read_text())
    document["model"]["config"]["n_inner"] = 77
    document["digest"] = digest_of(document)
    file.write_text(json.dumps(document))
    assert json.loads(start("three")["config.json"])["n_inner"] == 77
