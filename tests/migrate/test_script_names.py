"""Names of Python scripts: a value is known only where one plain assignment is on every path to its use."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.migrate.read.script_names import UNKNOWN, ScriptNames
from tests.migrate.imports import from_text, row, values

QUESTION = object()


def value_of_use(text: str) -> Any:
    """Return the value of the argument of the call `use(…)` in a script."""
    module = ast.parse(text)
    (call,) = [
        node for node in ast.walk(module) if isinstance(node, ast.Call) and ast.unparse(node.func) == "use"
    ]
    return ScriptNames(module, frozenset({"use"}), has_lines=True).value(call.args[0])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x = 1\nuse(x)", 1),
        ("x: float = 2e-4\nuse(-x * 2)", -4e-4),
        ("a = 8\nb = a // 2\nuse([a, b])", [8, 4]),
        ("x = 1\nwith f():\n    use(x)", 1),
        ("def f():\n    x = 1\n    use(x)\ndef g():\n    x = 2", 1),
        ("def f():\n    use(x)\nx = 1", 1),
        ("if a:\n    x = 1\n    use(x)", 1),
        ("names = ['a']\nprint(names)\nuse(names)", ["a"]),
        ("from a import *\nx = 1\nuse(x)", 1),
        # not bound, bound twice, or by anything but a plain assignment
        ("use(x)", UNKNOWN),
        ("x = 1\nx = 2\nuse(x)", UNKNOWN),
        ("x = 1\nuse(x)\nx = 2", UNKNOWN),
        ("x = 1\nx *= 2\nuse(x)", UNKNOWN),
        ("x, y = 1, 2\nuse(x)", UNKNOWN),
        ("for x in [1]:\n    use(x)", UNKNOWN),
        ("x = 1\nfor x in [2]:\n    pass\nuse(x)", UNKNOWN),
        ("if (x := 1):\n    use(x)", UNKNOWN),
        ("with open() as x:\n    use(x)", UNKNOWN),
        ("x = 1\nimport x\nuse(x)", UNKNOWN),
        ("x = 1\ndel x\nuse(x)", UNKNOWN),
        # parameters and other scopes
        ("x = 1\ndef f(x):\n    use(x)", UNKNOWN),
        ("x = 1\ndef f(x=2):\n    use(x)", UNKNOWN),
        ("x = 1\nuse([x for x in y])", UNKNOWN),
        ("x = 1\ndef f():\n    global x\n    x = 2\nuse(x)", UNKNOWN),
        ("x = 1\nf = lambda x: use(x)", UNKNOWN),
        ("class A:\n    x = 1\nuse(x)", UNKNOWN),
        ("class A:\n    x = 1\n    def f(self):\n        use(x)", UNKNOWN),
        # not on every path
        ("if a:\n    x = 1\nuse(x)", UNKNOWN),
        ("if a:\n    x = 1\nelse:\n    x = 2\nuse(x)", UNKNOWN),
        ("if a:\n    x = 1\nelse:\n    use(x)", UNKNOWN),
        ("while a:\n    x = 1\nuse(x)", UNKNOWN),
        ("try:\n    x = 1\nexcept E:\n    pass\nuse(x)", UNKNOWN),
        ("use(x)\nx = 1", UNKNOWN),
        # bound or changed by what the script does not write
        ("x = 1\nfrom a import *\nuse(x)", UNKNOWN),
        ("x = 1\nexec(open('a').read())\nuse(x)", UNKNOWN),
        ("x = 1\nglobals()['x'] = 2\nuse(x)", UNKNOWN),
        ("x = [1]\nx.append(2)\nuse(x)", UNKNOWN),
        ("x = {'a': 1}\nx['a'] = 2\nuse(x)", UNKNOWN),
        ("x = ['a']\ny = x\ny.append('b')\nuse(x)", UNKNOWN),
        ("x = ['a']\nchange(x)\nuse(x)", UNKNOWN),
        ("x = y\ny = x\nuse(x)", UNKNOWN),
        ("x = x + 1\nuse(x)", UNKNOWN),
        ("use(1 // 0)", UNKNOWN),
    ],
)
def test_value_of_a_name(text: str, value: Any) -> None:
    found = value_of_use(text)
    assert found is value if value is UNKNOWN else found == value


SCRIPT = """\
from unsloth import FastLanguageModel
from trl import SFTTrainer, SFTConfig
from datasets import load_dataset
{before}
model, tok = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B", max_seq_length=1024, load_in_4bit=False)
model = FastLanguageModel.get_peft_model({adapter})
args = SFTConfig({arguments}, max_steps=10)
{after}
trainer = SFTTrainer(model=model, train_dataset=load_dataset("json", data_files="x.jsonl", split="train"), args=args)
"""  # noqa: E501


def script(
    before: str = "", adapter: str = "model, r=16", arguments: str = "learning_rate=1e-4", after: str = ""
) -> str:
    return SCRIPT.format(before=before, adapter=adapter, arguments=arguments, after=after)


@pytest.mark.parametrize(
    ("text", "key", "target", "words"),
    [
        (
            script("lr = 2e-4\nlr *= 0.1", arguments="learning_rate=lr"),
            "SFTConfig.learning_rate",
            "training.learning_rate",
            "`lr` is bound more than once (lines 4 and 5)",
        ),
        (script("r = 8\nr = 64", "model, r"), "get_peft_model.r", "lora.r", "bound more than once"),
        (
            script(arguments="**given"),
            "SFTConfig.**given",
            "training.learning_rate",
            "the script computes it",
        ),
        (
            script(after="args.learning_rate = 5e-5"),
            "SFTConfig.learning_rate",
            "training.learning_rate",
            "assigned after the call",
        ),
        (
            script(arguments="seed=1", after="args.learning_rate = 5e-5"),
            "SFTConfig.learning_rate",
            "training.learning_rate",
            "assigned",
        ),
    ],
)
def test_computed_argument_is_a_question_that_names_its_key_and_no_default(
    tmp_path: Path, text: str, key: str, target: str, words: str
) -> None:
    found = from_text(tmp_path, text, "train.py")
    fate, reason = row(found, key)
    assert (fate, words in reason) == ("question", True), reason
    (asked,) = [each for each in found.rows if each.key == key]
    assert target in [".".join(map(str, each)) for each in asked.targets]
    assert f"{target.rpartition('.')[2]}: " not in [
        line.strip()[: len(target)] for line in found.text.splitlines()
    ]
    assert not any(
        line.strip().startswith(f"{target.rpartition('.')[2]}:") for line in found.text.splitlines()
    ), found.text


def test_parameter_hides_a_name_of_the_module(tmp_path: Path) -> None:
    text = "rank = 8\ndef run(rank=64):\n" + "".join(
        f"    {line}\n" for line in script(adapter="model, r=rank").splitlines()
    )
    found = from_text(tmp_path, text, "train.py")
    assert row(found, "get_peft_model.r") == (
        "question",
        "`rank` is a parameter of a function: write its value",
    )


def test_known_mapping_of_arguments_and_positional_ones_are_read(tmp_path: Path) -> None:
    given = "given = dict(a=1)\nmore = {'learning_rate': 3e-4, 'seed': 5}"
    found = values(
        from_text(tmp_path, script(given, "model, 32, ['q_proj'], 64", "'out', **more"), "train.py")
    )
    assert (found["training.learning_rate"], found["training.seed"], found["output_dir"]) == (3e-4, 5, "out")
    assert (found["lora.r"], found["lora.lora_alpha"], found["lora.target_modules"]) == (32, 64.0, ["q_proj"])


def test_call_in_a_branch_and_second_trainer_are_decisions(tmp_path: Path) -> None:
    lines = script().splitlines()
    at = next(number for number, line in enumerate(lines) if "get_peft_model" in line)
    lines[at] = f"if use_lora:\n    {lines[at]}"
    found = dict.fromkeys(
        words for _, words in from_text(tmp_path, "\n".join([*lines, lines[-1]]), "train.py").decisions
    )
    assert "`get_peft_model` is called only under `if use_lora`: written as if it always were" in found
    assert "`SFTTrainer` is called more than once: the first call is read" in found


def test_magic_of_a_notebook_may_bind_names(tmp_path: Path) -> None:
    cells = ["lr = 1e-5", "%run settings.ipynb", script(arguments="learning_rate=lr")]
    text = json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]})
    assert row(from_text(tmp_path, text, "a.ipynb"), "SFTConfig.learning_rate")[0] == "question"
