"""Choose the tests of a change: `scripts/test --changed [COMMIT]` runs what this prints.

A change is what differs from a commit, HEAD unless given. In this order, until they would take longer than a
minute: changed tests and those that use a changed helper; tests that find the bugs planted in a changed
module (`tests/faults/plants.py`); those named after it; those that import it; those that import what imports
it. The costs of files are those of `tests/times.py`. What does not fit is reported with its command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import grimp

from tests.times import UNKNOWN_SECONDS, read_costs

ROOT = Path(__file__).resolve().parents[1]
CPU_SECONDS = 70.0
"""Of two processes in less than a minute, with half of it for collection."""
USERS_AWAY = 2
"""Modules between a changed one and the tests that are chosen for it."""
DOCS_TESTS = "tests/structure/test_docs.py"
OTHER_FILES = {
    "docs/": DOCS_TESTS,
    "README": DOCS_TESTS,
    "configs/": "tests/recipe/test_catalogue.py",
    "pyproject.toml": "tests/structure/test_packaging.py",
}
"""Start of a path outside the package and the tests → its tests."""


def changed_files(commit: str) -> list[str]:
    def lines(*command: str) -> list[str]:
        return subprocess.run(
            ["git", *command], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()

    return sorted(
        {*lines("diff", "--name-only", commit), *lines("ls-files", "--others", "--exclude-standard")}
    )


def chosen(changed: Iterable[str], graph: grimp.ImportGraph) -> Iterator[tuple[str, str]]:
    """Yield (file or test, why), most telling first; some more than once."""
    modules = {module_of(path) for path in changed} & graph.modules
    yield from ((path, "changed") for path in changed if is_test(path) and (ROOT / path).exists())
    yield from (
        (test, "tests this file")
        for path in changed
        for start, test in OTHER_FILES.items()
        if path.startswith(start)
    )
    helpers = {module for module in modules if module.startswith("tests.")}
    yield from ((path, "uses a changed helper") for path in tests_that_import(helpers, graph))
    package = modules - helpers
    yield from ((test, "finds a planted bug") for test in tests_of_plants(package))
    yield from ((path, "is named after it") for module in sorted(package) for path in named_after(module))
    yield from ((path, "imports it") for path in tests_that_import(package, graph))
    seen = users = set(package)
    for _ in range(USERS_AWAY):
        users = {user for module in users for user in graph.find_modules_that_directly_import(module)}
        users = {user for user in users if user.startswith("fsdp_tune.")} - seen
        seen = seen | users
        yield from ((path, "imports what imports it") for path in tests_that_import(users, graph))


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_test(path: str) -> bool:
    return path.startswith("tests/") and Path(path).name.startswith("test_")


def tests_that_import(modules: Iterable[str], graph: grimp.ImportGraph) -> list[str]:
    users = {user for module in modules for user in graph.find_modules_that_directly_import(module)}
    return sorted(path for user in users if is_test(path := f"{user.replace('.', '/')}.py"))


def named_after(module: str) -> list[str]:
    """Return the test files of a module of the package: `test_NAME.py` and `test_NAME_….py` in the folders of
    its room."""
    parts = module.split(".")
    if len(parts) < 3:  # `fsdp_tune` itself, and its `__main__`
        return []
    candidates = (ROOT / "tests" / parts[1]).rglob("test_*.py")
    return sorted(
        str(path.relative_to(ROOT)) for path in candidates if f"{path.stem}_".startswith(f"test_{parts[-1]}_")
    )


def tests_of_plants(modules: Iterable[str]) -> list[str]:
    """Return tests that find the bugs planted in some modules, the quickest ones where a plant names them."""
    from tests.faults.plants import PLANTS
    from tests.faults.table import ROWS

    paths = {f"{module.removeprefix('fsdp_tune.').replace('.', '/')}.py" for module in modules}
    tests = {row.id: row.tests for row in ROWS}
    planted = [plant for plant in PLANTS if plant.path in paths]
    return list(
        dict.fromkeys(
            test
            for plant in planted
            for test in plant.by or [test for row in plant.rows for test in tests[row]]
        )
    )


def fitting(
    tests: Iterable[tuple[str, str]], costs: Mapping[str, float], limit: float
) -> tuple[dict[str, str], list[str]]:
    """Return what fits into `limit` CPU seconds, with the reasons, and what does not. A test counts as its
    share of a file."""
    taken: dict[str, str] = {}
    left: dict[str, None] = {}
    spent = 0.0
    for test, why in tests:
        file, _, function = test.partition("::")
        if file in taken or test in taken:
            continue
        cost = costs.get(file, UNKNOWN_SECONDS) * (0.3 if function else 1.0)
        if spent + cost > limit and taken:
            left[test] = None
        else:
            spent += cost
            taken[test] = why
    return taken, [test for test in left if test not in taken]


def main() -> int:
    commit = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    changed = changed_files(commit)
    graph = grimp.build_graph("fsdp_tune", "tests", cache_dir=str(ROOT / ".import_linter_cache"))
    costs = {name: cost.cpu for name, cost in read_costs().items()}
    taken, left = fitting(chosen(changed, graph), costs, CPU_SECONDS)
    for test, why in taken.items():
        print(f"{test}: {why}", file=sys.stderr)
    if left:
        files = sorted({test.partition("::")[0] for test in left})
        print(
            f"{len(left)} more would take longer than a minute: scripts/test; or: pytest {' '.join(files)}",
            file=sys.stderr,
        )
    print("\n".join(taken))
    return 0 if taken else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
