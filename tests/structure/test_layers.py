"""The rules of the source tree: layers, sizes, and what may be imported where."""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp_tune
from tests.structure.sources import ROOT, Source, modules

pytestmark = pytest.mark.source

MODULE_LINES, FUNCTION_LINES, TITLE_LINES = 500, 60, 3


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    linter = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [str(linter), "--no-cache"], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_imports_follow_layers(repository: Path) -> None:
    """scripts/check runs the same; here it shows that the contract fits the tree of a checkout that is only
    tested."""
    done = lint_imports(repository)
    assert done.returncode == 0, done.stdout


FOLDERS_OF_A_ROOM = {
    "fsdp_tune/room/above/folder/one.py": "from fsdp_tune.room.below.two import x",
    "fsdp_tune/room/above/three.py": "x = 1",
    "fsdp_tune/room/below/two.py": "x = 1",
    "fsdp_tune/room/below/four.py": "x = 1",
}


@pytest.mark.parametrize(
    ("changed", "is_kept"),
    [
        ({}, True),
        ({"fsdp_tune/room/below/four.py": "from fsdp_tune.room.above.three import x"}, False),
        ({"fsdp_tune/room/below/four.py": "def f():\n    from fsdp_tune.room.above.three import x"}, False),
        (
            {
                "fsdp_tune/room/above/three.py": "from fsdp_tune.room.above.folder.five import x",
                "fsdp_tune/room/above/folder/five.py": "",
            },
            True,
        ),
        (
            {
                "fsdp_tune/room/above/three.py": "from fsdp_tune.room.above.folder.five import x",
                "fsdp_tune/room/above/folder/five.py": "",
                "fsdp_tune/room/above/folder/one.py": "from fsdp_tune.room.above.three import x",
            },
            False,
        ),
    ],
    ids=["none", "of folders", "in a function", "below", "of a folder and a module"],
)
def test_circle_of_folders_breaks_the_contract(
    repository: Path, tmp_path: Path, changed: dict[str, str], is_kept: bool
) -> None:
    """No module imports itself here, over others or not: only the folders do."""
    settings = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]
    (contract,) = (each for each in settings["contracts"] if each["type"] == "acyclic_siblings")
    lines = [f"{name} = {json.dumps(value)}" for name, value in contract.items()]
    text = "\n".join(
        ['[tool.importlinter]\nroot_package = "fsdp_tune"', "[[tool.importlinter.contracts]]", *lines]
    )
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    for name, source in (FOLDERS_OF_A_ROOM | changed).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        for folder in path.relative_to(tmp_path).parents:
            if folder.parts:
                (tmp_path / folder / "__init__.py").touch()
    done = lint_imports(tmp_path)
    assert (done.returncode == 0) is is_kept, done.stdout + done.stderr


def test_modules_are_short() -> None:
    lengths = {module.name: len(module.text.splitlines()) for module in modules()}
    assert {name: length for name, length in lengths.items() if length > MODULE_LINES} == {}


RULER = re.compile(r"^\s*#\s*[-=]{3,}", re.MULTILINE)


def test_sections_have_no_rulers() -> None:
    """A line such as `# ---- Title` stands for a module that is missing, or for nothing."""
    places = ("fsdp_tune/**/*.py", "tests/**/*.py", "benchmarks/*.py", "scripts/*")
    paths = [path for place in places for path in sorted(ROOT.glob(place)) if path.is_file()]
    assert len(paths) > 1000
    assert RULER.search("def a() -> None: ...\n\n    # ---- Values\n") is not None
    found = [path for path in paths if RULER.search(path.read_text(encoding="utf-8"))]
    assert [str(path.relative_to(ROOT)) for path in found] == []


def test_class_name_occurs_once() -> None:
    names = Counter(
        node.name for module in modules() for node in module.tree.body if isinstance(node, ast.ClassDef)
    )
    assert {name: count for name, count in names.items() if count > 1} == {}


def imports(module: Source) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_have_no_cycles() -> None:
    """Imports inside functions and under TYPE_CHECKING count: a reader of one file of a cycle has to read all
    of them."""
    names = {module.module for module in modules()} - {"fsdp_tune"}  # the front door of scripts
    left = {
        module.module: {*imports(module)} & names - {module.module}
        for module in modules()
        if module.module in names
    }
    while outside := {
        name for name, found in left.items() if not found or name not in set().union(*left.values())
    }:
        left = {name: found - outside for name, found in left.items() if name not in outside}
    assert left == {}


def test_names_are_imported_from_the_module_that_defines_them() -> None:
    """Not from one that imports them itself: who moves or patches a name has one place to look at."""
    borrowed = {
        module.module: {
            alias.asname or alias.name
            for node in module.tree.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fsdp_tune.")
            for alias in node.names
        }
        for module in modules()
        if module.module != "fsdp_tune"  # the front door
    }
    found = [
        f"{module.name}:{node.lineno}: {node.module}.{alias.name}"
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in borrowed.get(node.module or "", ())
    ]
    assert found == []


def test_only_commands_import_the_front_door() -> None:
    """It offers what the jobs do, so any other import of it points upwards; contracts do not see the package
    itself."""
    found = {
        module.name
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        and "fsdp_tune"
        in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert {name for name in found if not name.startswith("fsdp_tune/cli/")} == set()


def test_no_room_has_the_name_of_a_public_function() -> None:
    """The import of `fsdp_tune.plan` as a folder would replace the function `plan` of the package."""
    rooms = {path.parent.name for path in Path(fsdp_tune.__file__).parent.glob("*/__init__.py")}
    assert "planner" in rooms
    assert rooms & {*fsdp_tune.__all__} == set()


WORLD_SIZE_CALLERS = {
    "worker/agreement.py": "values of every rank",
    "worker/checkpoint/exchange.py": "ranks send parts of files to each other",
    "worker/checkpoint/restore.py": "each rank has a file of its own, and verifies its share of all files",
    "worker/checkpoint/state.py": "a message",
    "worker/observe/stragglers.py": "compares all ranks",
    "worker/readback/report.py": "reads the live number of ranks",
    "worker/readback/witness.py": "compares all ranks",
}


def test_world_sizes_come_from_topology() -> None:
    """The number of ranks is not the number of ranks that read different rows: data, losses and plans use
    `core.topology`."""
    found = {
        module.name.removeprefix("fsdp_tune/") for module in modules() if "get_world_size(" in module.text
    }
    assert found == WORLD_SIZE_CALLERS.keys()


def test_functions_are_short() -> None:
    too_long = {
        f"{module.name}:{node.lineno} {node.name}": length
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    }
    assert too_long == {}


def test_every_module_has_a_docstring() -> None:
    silent = [
        module.name
        for module in modules()
        if module.path.name != "__main__.py" and ast.get_docstring(module.tree) is None
    ]
    assert silent == []


def test_docstring_of_a_module_starts_with_one_short_paragraph() -> None:
    """And no other string is at the top level, but for those after a constant: joined modules once kept the
    docstrings of all."""
    glued = [
        module.name
        for module in modules()
        if (text := ast.get_docstring(module.tree)) is not None
        and (
            len(text.partition("\n\n")[0].splitlines()) > TITLE_LINES
            or any(
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and not isinstance(before, ast.Assign | ast.AnnAssign)
                for before, node in itertools.pairwise(module.tree.body)
            )
        )
    ]
    assert glued == []


def test_no_module_is_named_utils() -> None:
    forbidden = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    assert [module.name for module in modules() if module.path.name in forbidden] == []


def test_no_todo_or_stub_is_left() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "X" + "XX", "NotImplemented" + "Error")
    found = [
        f"{module.name}:{number}"
        for module in modules()
        for number, line in enumerate(module.text.splitlines(), 1)
        if any(mark in line for mark in marks)
    ]
    assert found == []


def test_only_cli_prints() -> None:
    """`print` below the surface would break `--json`; ranks say plain lines through the stream that they were
    given."""
    allowed = {
        "fsdp_tune/worker/__main__.py",
        "fsdp_tune/model/loading/inspect.py",
        "fsdp_tune/merge/loaded.py",
    }
    found = {
        module.name
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert found <= allowed
