"""Common mistakes in a recipe, through `validate`: the line to change, and what to type."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsdp_tune.cli.app import app
from tests.recipe.loading import MINIMAL, load, load_with, one_problem, problems, problems_with

HEAD = "model: {name_or_path: gpt2}\n"
JARGON = re.compile(
    r"token|scanning|mapping values|block end|alphabetic|hexadecimal|scalar|simple key|document start",
    re.IGNORECASE,
)


def told(tmp_path: Path, text: str, *overrides: str) -> list[tuple[str, str, str]]:
    """(place, message, hint) of every error."""
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    done = CliRunner().invoke(
        app, ["prepare", str(path), *(word for each in overrides for word in ("--set", each))]
    )
    assert done.exit_code == 2, done.stdout
    found = re.findall(
        r"^error: (.*?): (.*)\n(?:hint: (.*)\n)?", done.stderr.replace(f"{path}:", ""), re.MULTILINE
    )
    return [(place, message, hint) for place, message, hint in found]


@pytest.mark.parametrize(
    ("text", "place", "message", "hint"),
    [
        (
            MINIMAL + "training:\n  max_steps:32\n  seed: 1\n",
            "4:3",
            "no space after the colon",
            "`max_steps: 32`",
        ),
        (
            MINIMAL + "training:\n  seed: 1\n  max_steps:32\n",
            "5:3",
            "no space after the colon",
            "`max_steps: 32`",
        ),
        (HEAD + "data: {train: [{path:x}]}\n", "2:17", "no space after the colon", "`path: x`"),
        (HEAD + "data:\n  train:\n    - path:x\n", "4:7", "takes a mapping", "`path: x`"),
        (
            "model:\n  name_or_path:gpt2\ndata: {train: [{path: x}]}\n",
            "2:3",
            "takes a mapping",
            "`name_or_path: gpt2`",
        ),
        (MINIMAL + "training:\n  max_steps:\u00a03\n  seed: 1\n", "4:13", "no-break space", "ordinary space"),
        (MINIMAL + "training:\n\u00a0\u00a0max_steps: 3\n", "4:1", "no-break space", "ordinary space"),
        (
            MINIMAL + "training:\n  max_steps = 3\n  seed: 1\n",
            "4:3",
            "`=` where a colon belongs",
            "`max_steps: 3`",
        ),
        (
            MINIMAL + "training:\n  seed: 1\n  max_steps=3\n",
            "5:3",
            "`=` where a colon belongs",
            "`max_steps: 3`",
        ),
        (
            MINIMAL + "training:\n  seed: 1\n  max_steps\n",
            "5:3",
            "no colon and no value",
            "`max_steps: VALUE`",
        ),
        (
            MINIMAL + "training:\n  max_steps\n  seed: 1\n",
            "4:3",
            "no colon and no value",
            "`max_steps: VALUE`",
        ),
        (HEAD + "data:\n  train:\n    - path: *.jsonl\n", "4:13", "not in quotes", '`"*.jsonl"`'),
        (HEAD + "data: {train: [{path: */x.jsonl}]}\n", "2:23", "not in quotes", '`"*/x.jsonl"`'),
        (MINIMAL + 'output_dir: "runs\\x"\n', "3:18", "escape sequence", r"`'runs\x'`"),
        (MINIMAL + 'output_dir: "C:\\runs"\n', "3:1", "control character", "single quotes"),
        (
            HEAD + 'data: {train: [{path: x}], cache_dir: "C:\\runs"}\n',
            "2:28",
            "control character",
            "single quotes",
        ),
        (
            'model: {name_or_path: gpt2, revision: "a\\0"}\ndata: {train: [{path: x}]}\n',
            "1:29",
            "character `\\x00`",
            "single quotes",
        ),
        (
            MINIMAL + 'checkpoint: {mirror: "s3://bucket/\\0"}\n',
            "3:14",
            "contains the character `\\x00`",
            "single quotes",
        ),
        (MINIMAL + 'launch: {env: {NCCL_DEBUG: "IN\\0FO"}}\n', "3:16", r"`\x00`", "single quotes"),
        (MINIMAL + 'output_dir: "D:\\data\\Users"\n', "3:16", "escape sequence", r"`'D:\data\Users'`"),
        (MINIMAL + "training:\n  seed: 1\t# fixed\n", "4:10", "a tab before the comment", "a space"),
        (MINIMAL + "launch: {env: {A: false}}\n", "3:19", "takes text", '"false" in quotes'),
        (HEAD + "data: {train: {path: x}}\n", "2:15", "takes a list", "`train: [{path: x}]`"),
        (HEAD + "data: {train: [{path: x}], eval: {path: y}}\n", "2:34", "a list", "`eval: [{path: y}]`"),
        (MINIMAL + "dataset_name: x\n", "3:1", "unknown key", "`data.train`"),
        (MINIMAL + "launch: {num_gpus: 4}\n", "3:10", "unknown key", "`launch.num_processes`"),
        (MINIMAL + "launch: {nnodes: 4}\n", "3:10", "unknown key", "`launch.num_machines`"),
        (
            MINIMAL + "quantization: {train: fp8-int4}\n",
            "3:23",
            "rounds the gradients of its fp8 emulation",
            "`int8-int4`",
        ),
        (MINIMAL + "quantization: {train: nvfp4}\n", "3:23", "does not emulate NVFP4", "`int4`"),
        (MINIMAL + "training: {optim: adamw}\n", "3:19", "one of", "`adamw_torch_fused`"),
        (MINIMAL + "training: {max_grad_norm: null}\n", "3:27", "takes a number", "write `0`"),
        (MINIMAL + "launch: {main_process_port: '29500'}\n", "3:29", "a port", "without quotes"),
        (MINIMAL + "output_dir: {name}\n", "3:13", "takes text", '"{name}" in quotes'),
        (MINIMAL + "output_dir: {name}/x\n", "3:13", "not in quotes", '`output_dir: "{name}/x"`'),
        (MINIMAL + "training: {report_to: all}\n", "3:12", "`all`", "`[tensorboard, wandb]`"),
        (MINIMAL + "training: {max_grad_norm: .inf}\n", "3:27", "not a number", "finite"),
        (
            MINIMAL + "training: {max_grad_norm: !!python/name:os.system x}\n",
            "3:27",
            "YAML tag",
            "leave it out",
        ),
        (HEAD + "data: {train: !!python/object/apply:os.system [x]}\n", "2:15", "YAML tag", "leave it out"),
        (
            "model: {name_or_path: a, attn_implementation: flash_attention2}\ndata: {train: [{path: "
            "x}]}\nlaunch: {device: cpu}\n",
            *("1:26", "not a kernel", "`flash_attention_2`"),
        ),
        (MINIMAL + "output_dir: $SCRATCH/x\n", "3:1", "variables of the shell", "write the path out"),
    ],
)
def test_mistake_is_reported_once_at_its_line_with_what_to_type(
    tmp_path: Path, text: str, place: str, message: str, hint: str
) -> None:
    ((found_place, found_message, found_hint),) = told(tmp_path, text)
    assert found_place == place
    assert message in found_message
    assert hint in found_hint
    assert not JARGON.search(found_message)


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("training.report_to=wandb,tensorboard", "`wandb,tensorboard`", "`[wandb, tensorboard]`"),
        ("data.train[0].path=x", "leads into a list", "`--set data.train=[{path: x}]`"),
        ("data.train.0.path=x", "leads into a list", "`--set data.train=[…]`"),
        ("training.seed:1", "not `KEY=VALUE`", "`--set training.seed=1`"),
        ("model.freeze=a,b", "takes a list", "`[a, b]`"),
    ],
)
def test_mistake_in_an_override_is_reported_with_what_to_type(
    tmp_path: Path, override: str, message: str, hint: str
) -> None:
    ((place, found_message, found_hint),) = told(tmp_path, MINIMAL, override)
    assert place == "--set #1"
    assert message in found_message
    assert hint in found_hint


def test_section_that_an_override_replaces_is_reported() -> None:
    (notice,) = load_with("training: {max_steps: 5}", "training={seed: 1}").notices
    assert notice.code == "section-replaced"
    assert "`max_steps`" in notice.message
    assert load_with("training: {max_steps: 5}", "training={max_steps: 6}").notices == ()


def test_url_and_time_are_not_keys_without_a_space() -> None:
    loaded = load_with(
        "launch: {max_runtime: 11h30m, main_process_ip: http://host}\noutput_dir: runs/12:30\n"
    )
    assert loaded.recipe.output_dir == "runs/12:30"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("micro_batch_size", "training.per_device_train_batch_size"),
        ("lora_target", "lora: {target_modules: all-linear}"),
        ("lora_rank", "lora.r"),
        ("load_in_4bit", "quantization: {load: nf4}"),
        ("double_quantization", "quantization: {load: nf4, scales: bf16}"),
        ("num_epochs", "training.num_train_epochs"),
        ("sequence_len", "data.max_length"),
        ("sample_packing", "data.packing"),
        ("val_set_size", "data.eval"),
        ("train_on_inputs", "data.loss_on"),
        ("completion_only_loss", "data.loss_on"),
        ("assistant_only_loss", "data.loss_on"),
        ("dataset_num_proc", "data.num_proc"),
        ("cutoff_len", "data.max_length"),
    ],
)
@pytest.mark.parametrize("section", ["", "training", "data"])
def test_name_of_another_trainer_is_translated_in_any_section(section: str, name: str, key: str) -> None:
    text = f"{section}: {{{name}: 1}}" if section == "training" else f"{name}: 1"
    assert f"`{key}`" in (one_problem(problems_with(text)).hint or "")


def test_adapter_at_the_top_is_that_of_axolotl() -> None:
    """`lora:` and `merge:` have keys of this name."""
    assert (
        one_problem(problems_with("adapter: lora")).hint
        == "`adapter` of axolotl is `lora` here: write `lora: {r: 16}`"
    )
    assert (
        one_problem(problems_with("training: {adapter: both}")).hint
        == "belongs under `lora:` or under `merge:`"
    )


def test_near_match_comes_from_the_same_section_alone() -> None:
    hint = one_problem(problems_with("launch: {num_prok: 1}")).hint or ""
    assert "data.num_proc" not in hint


@pytest.mark.parametrize(
    ("section", "hint"),
    [
        ("launch: {device: gpu}", "write `cuda`"),
        ("training: {num_train_epochs: three}", "write `3`"),
        ("training: {num_train_epochs: 3 epochs}", "write `3`"),
        ("training: {max_steps: '1,000'}", "write `1000`"),
        ("training: {max_steps: 10k}", "write `10000`"),
        ("lora: {r: eight}", "write `8`"),
        ("data: {train: [{path: x}], max_length: 4k}", "write `4000`"),
        ("training: {num_train_epochs: many}", "write a number, such as `3.0`"),
        ("training: {max_steps: many}", "write a whole number, such as `100`"),
    ],
)
def test_hint_about_a_word_in_place_of_a_value_can_be_typed(tmp_path: Path, section: str, hint: str) -> None:
    text = f"{HEAD}{section}\n" if section.startswith("data:") else f"{MINIMAL}{section}\n"
    (found,) = told(tmp_path, text)
    assert found[2] == hint
    if "such as" not in hint:  # the hint is followed
        wrong = section.rstrip("}").rpartition(": ")[2]
        load(text.replace(f": {wrong}", f": {hint.split('`')[1]}"))


@pytest.mark.parametrize(
    ("section", "refused"),
    [
        ("training: {optim: 5}", "in quotes"),
        ("training: {gradient_accumulation_steps: zero}", "`0`"),
        ("training: {gradient_accumulation_steps: -3 steps}", "`-3`"),
        ("training: {num_train_epochs: zero}", "`0`"),
        ("training: {num_train_epochs: '0,5'}", "`5`"),
        ("training: {num_train_epochs: '1,5'}", "`15`"),
    ],
)
def test_hint_is_no_value_that_is_refused_too(section: str, refused: str) -> None:
    assert refused not in (one_problem(problems_with(section)).hint or "")


def test_text_among_the_values_of_a_key_is_not_any_text() -> None:
    text = MINIMAL.replace("data: {", "data: {special_tokens_in_content: 5, ")
    assert "in quotes" not in (one_problem(problems(text)).hint or "")
