"""Any file content and any `--set` gives a recipe or errors with a message."""

from __future__ import annotations

import os
import string
import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.recipe.read.loader import load_recipe
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.keys import all_keys
from fsdp_tune.recipe.schema.recipe import Recipe

MACHINE = Machine("cuda", 8, 16, None)
KEYS = [
    *(key.name for key in all_keys()),
    "training.max_steps",
    "training.bf16",
    "fsdp.cpu_offload",
    "training.fsdp",
    "fsdp_config",
    "zzz",
]
VALUES = st.sampled_from(
    [
        *(
            "null",
            "true",
            "no",
            "0",
            "-1",
            "3",
            "1e-5",
            "0123",
            "1_0",
            ".nan",
            "x",
            "auto",
            "FULL_SHARD",
            "2",
            "[]",
            "{}",
            "[a]",
            "{a: 1}",
        ),
        *(
            "{rows: 3}",
            "30m",
            "5GB",
            "~",
            '"8"',
            "[{path: a}]",
            "[[1]]",
            "{a: {b: [1]}}",
            "offload full_shard",
            "cpu",
            '"\\e[31m"',
        ),
    ]
)
YAMLISH = st.text(
    alphabet=string.ascii_lowercase + " \n:-[]{},&*!|>'\"%@`#?~=<\t\\0123.é\u2028\x00", max_size=80
)


def check(error: FsdpTuneError) -> FsdpTuneError:
    assert error.exit_code == 2
    assert all(problem.message and problem.code for problem in error.problems)
    assert all(problem.message.isprintable() for problem in error.problems)
    return error


def outcome(raw: bytes, overrides: list[str]) -> Recipe | FsdpTuneError:
    path = Path(tempfile.gettempdir(), f"fsdp-tune-fuzz-{os.getpid()}.yaml")
    path.write_bytes(raw)
    try:
        loaded = load_recipe(str(path), overrides)
        resolution = resolve(loaded.recipe, MACHINE, cwd=Path("/tmp"), positions=loaded.positions)
    except FsdpTuneError as error:
        return check(error)
    finally:
        path.unlink()
    assert Recipe.model_validate_json(resolution.recipe.model_dump_json(by_alias=True)) == resolution.recipe
    return resolution.recipe


@settings(max_examples=150, deadline=None)
@given(YAMLISH)
@example("a: &a [*a]")
@example("<<: 1")
@example("<: 1")
@example("model: {<a>: 1}")
@example("<rows>: 1\ndata: {<rows>: 1, eval: {<rows>: 1}}")
@example("? ")
@example("model: {<<: {name_or_path: a}}")
@example("!")
def test_any_text_loads_or_is_reported(text: str) -> None:
    outcome(text.encode(), [])


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=60))
@example(b"\xff\xfea\x00")
@example(b"a: \xed\xa0\x80")
def test_any_bytes_load_or_are_reported(raw: bytes) -> None:
    outcome(raw, [])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=6))
def test_any_values_of_known_keys_load_or_are_reported(pairs: list[tuple[str, str]]) -> None:
    outcome(
        b"model: {name_or_path: a}\ndata: {train: [{path: b}]}\n", [f"{key}={value}" for key, value in pairs]
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(st.text(max_size=20), max_size=3))
@example(["training.seed=\\"])
@example(["=", "a=&b", "a=*b", 'a="\\UFFFFFFFF"'])
def test_any_override_loads_or_is_reported(overrides: list[str]) -> None:
    outcome(b"model: {name_or_path: a}\ndata: {train: [{path: b}]}\n", overrides)
