"""F001 to F008: any file becomes a tree with positions, or an error with line and column."""

from __future__ import annotations

import os
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.recipe.read.loader import load_recipe
from fsdp_tune.recipe.read.recipe_text import MAX_FILE_BYTES, read_text
from fsdp_tune.recipe.read.yaml_source import MappingNode, compose, plain_value
from tests.recipe.loading import one_problem, problems


def fails(text: str) -> Problem:
    try:
        return compose(text, "r.yaml")[1][-1]
    except FsdpTuneError as error:
        return error.problems[-1]


@pytest.mark.parametrize(
    ("text", "code", "place", "words"),
    [
        ("a:\n\tb: 1\n", "yaml-tab", "r.yaml:2:1", "tab"),
        ("a: {b: 1\nc: 2\n", "yaml-syntax", "r.yaml:2:2", "line 1, column 4"),
        ("a: [1, 2\n", "yaml-syntax", "r.yaml:2:1", "line 1, column 4"),
        ("a: 'x\nb: 1\n", "yaml-syntax", "r.yaml:3:1", "no end"),
        ("a: 1\n---\nb: 2\n", "two-documents", "r.yaml:2:1", "two documents"),
        ("a: b: c\n", "yaml-syntax", "r.yaml:1:5", "no key is allowed"),
        ("a: @x\n", "yaml-syntax", "r.yaml:1:4", "cannot begin"),
        ("{a: 1} x\n", "yaml-syntax", "r.yaml:1:8", "after the end"),
        ("a: *x\n", "yaml-alias", "r.yaml:1:4", "no anchor"),
        ("a: &x [*x]\n", "yaml-alias", "r.yaml:1:8", "inside the value"),
        ("? [1]\n: 2\n", "yaml-key", "r.yaml:1:3", "cannot be a key"),
        ("a:\n  <<: 1\n", "yaml-merge", "r.yaml:2:7", "takes a mapping"),
        ('a: "\\ud800"\n', "recipe-not-text", "r.yaml:1:4", "surrogate"),
        ('a: "\\UFFFFFFFF"\n', "yaml-syntax", "r.yaml:1:1", "not YAML"),
        ("a: .nan\n", "not-a-number", "r.yaml:1:4", "not a number"),
    ],
)
def test_invalid_yaml_is_reported_with_line_and_column(text: str, code: str, place: str, words: str) -> None:
    problem = fails(text)
    assert (problem.code, str(problem.where)) == (code, place)
    assert words in problem.message


@pytest.mark.parametrize(
    ("text", "code"),
    [("", "empty-recipe"), ("# x\n", "empty-recipe"), ("---\n", "empty-recipe"), ("- 1\n", "not-a-mapping")],
)
def test_recipe_that_is_not_a_mapping_is_refused(text: str, code: str) -> None:
    assert one_problem(problems(text)).code == code


def test_duplicate_keys_are_reported_with_both_lines_at_every_depth() -> None:
    _, found = compose("a: 1\nb:\n  c: 1\n  d: {e: 1, e: 2}\n  c: 2\na: 3\n", "r.yaml")
    assert [(p.code, p.where.line) for p in found] == [
        ("duplicate-key", 4),
        ("duplicate-key", 5),
        ("duplicate-key", 6),
    ]
    assert [
        "on line 4" in found[0].message,
        "on line 3" in found[1].message,
        "on line 1" in found[2].message,
    ] == [True] * 3


def test_merge_key_adds_keys_and_never_overrides() -> None:
    tree, found = compose("x: &b {p: 1}\ny:\n  <<: *b\n  q: 2\n", "r.yaml")
    assert tree is not None
    assert found == []
    assert plain_value(tree) == {"x": {"p": 1}, "y": {"p": 1, "q": 2}}
    _, found = compose("x: &b {p: 1}\ny:\n  <<: *b\n  p: 2\n", "r.yaml")
    assert one_problem(found).where.line == 4
    assert "line 1" in found[0].message


def test_alias_is_a_copy() -> None:
    tree, _ = compose("x: &b {p: 1}\ny: *b\n", "r.yaml")
    assert isinstance(tree, MappingNode)
    assert tree.entries["x"].node is not tree.entries["y"].node


def test_alias_bomb_is_refused_within_a_second_and_100_mb() -> None:
    names = "abcdefghi"
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]" for old, new in pairwise(names)]
    tracemalloc.start()
    started = time.process_time()
    problem = fails("\n".join(lines))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert problem.code == "yaml-too-large"
    assert time.process_time() - started < 1.0
    assert peak_bytes < 100e6


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 3000, "a: " + "{b: " * 3000, "\n".join(" " * i + "a:" for i in range(3000))]
)
def test_deep_nesting_is_refused_without_a_recursion_error(text: str) -> None:
    assert fails(text).code == "yaml-too-deep"


def test_nesting_through_aliases_is_limited() -> None:
    chain = ["a0: &a0 [1]"] + [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 60)]
    assert fails("\n".join(chain)).code == "yaml-too-deep"


def test_tags_are_all_reported_and_run_nothing(tmp_path: Path) -> None:
    sentinel = tmp_path / "sentinel"
    text = f"a: !!python/object/apply:os.system ['touch {sentinel}']\nb: !foo 1\nc: !!int 3\n"
    _, found = compose(text, "r.yaml")
    assert [(p.code, p.where.line) for p in found] == [("yaml-tag", 1), ("yaml-tag", 2), ("yaml-tag", 3)]
    assert not sentinel.exists()


@pytest.mark.parametrize(
    ("raw", "code", "position"),
    [
        ("a: ü\n".encode("latin-1"), "recipe-not-text", (1, 4)),
        ("a: 1\n".encode("utf-16"), "recipe-not-text", (None, None)),
        ("a: 1\n".encode("utf-16-le"), "recipe-not-text", (None, None)),
        ("a: 1\n".encode("utf-8-sig"), "recipe-not-text", (None, None)),
        (b"a: 1\nb: x\x00y\n", "recipe-not-text", (2, 5)),
        ("a: 1\r\nb: x\u2028y\r\n".encode(), "recipe-not-text", (2, 5)),
        (b"a" * (MAX_FILE_BYTES + 1), "recipe-too-large", (None, None)),
    ],
)
def test_file_that_is_not_utf8_text_is_refused(
    tmp_path: Path, raw: bytes, code: str, position: tuple[int | None, int | None]
) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(raw)
    with pytest.raises(FsdpTuneError) as caught:
        read_text(path)
    problem = one_problem(caught.value.problems)
    assert (problem.code, (problem.where.line, problem.where.column)) == (code, position)


def test_sparse_50_gib_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    with path.open("wb") as file:
        file.truncate(50 << 30)
    with pytest.raises(FsdpTuneError) as caught:
        read_text(path)
    assert caught.value.problems[0].code == "recipe-too-large"


@pytest.mark.parametrize("kind", ["fifo", "zero", "directory", "dangling", "missing", "loop", "null-byte"])
def test_path_that_is_not_a_regular_file_is_refused_without_blocking(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "r.yaml"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "loop":
        path.symlink_to(path)
    name = {"zero": "/dev/zero", "null-byte": str(tmp_path / "a\0b.yaml")}.get(kind, str(path))
    started = time.monotonic()
    with pytest.raises(FsdpTuneError) as caught:
        load_recipe(name)
    assert caught.value.exit_code == 2
    assert caught.value.problems[0].code in {"recipe-not-readable", "recipe-not-found"}
    assert time.monotonic() - started < 1.0


def test_missing_recipe_suggests_a_similar_file_name(tmp_path: Path) -> None:
    (tmp_path / "llama.yaml").write_text("model: {}")
    for name, hint in (
        ("lama.yaml", f"did you mean `{tmp_path / 'llama.yaml'}`?"),
        ("other.yaml", "recipes copy"),
    ):
        with pytest.raises(FsdpTuneError) as caught:
            read_text(tmp_path / name)
        assert hint in (caught.value.problems[0].hint or "")
