"""`recipes` and `validate` as commands: output, JSON document, exit code."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.jobs import first_rows
from fsdp_tune.jobs import inspection as checks
from fsdp_tune.recipe.read.loader import load_recipe
from tests.cli.conftest import Cli, document
from tests.cli.in_process import invoke
from tests.cli.inspection import FACTS, fake_model, inspector  # noqa: F401  a fixture
from tests.recipe.loading import MINIMAL, load

FIVE_MISTAKES = """\
model: {name_or_path: gpt2}
data:
  train: [{path: some/set}]
  max_lenght: 512
fsdp: {offload_parms: true, sharding_strategy: FULL_SHRAD}
training: {per_device_train_batch_size: "8", offload_params: true}
"""

SMALL = """\
model: {from_config: {model_type: gpt2, vocab_size: 384}, tokenizer: builtin:arithmetic}
data: {train: [{path: builtin:arithmetic}]}
launch: {num_processes: 2}
"""


def run(*arguments: str) -> tuple[int, str, str]:
    done = invoke(*arguments)
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(SMALL)
    return path


def test_five_errors_have_lines_and_suggestions(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(FIVE_MISTAKES)
    code, out, err = run("validate", "--config", str(path))
    assert (code, out) == (
        2,
        "not checked yet: the model and its adapters, which depend on `data.max_lenght`, "
        "`fsdp.offload_parms`, `fsdp.sharding_strategy`\n"
        "not checked yet: tokenizer, chat template and rows, which depend on `data.max_lenght`\n",
    )
    assert err == (
        f"error: {path}:4:3: unknown key `data.max_lenght`\nhint: did you mean `data.max_length`?\n"
        f"error: {path}:5:8: unknown key `fsdp.offload_parms`\nhint: did you mean `fsdp.offload_params`?\n"
        f"error: {path}:5:48: `fsdp.sharding_strategy` is `FULL_SHRAD`; it takes `FULL_SHARD`, "
        "`SHARD_GRAD_OP`, `HYBRID_SHARD`, "
        "`HYBRID_SHARD_ZERO2` or `NO_SHARD`\nhint: did you mean `FULL_SHARD`?\n"
        f'error: {path}:6:41: `training.per_device_train_batch_size` is the text "8"; it takes a '
        "whole number above 0\n"
        "hint: write it without quotes\n"
        f"error: {path}:6:46: unknown key `training.offload_params`\nhint: belongs under `fsdp:`\n"
    )


def test_errors_are_one_json_document_on_stdout(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(FIVE_MISTAKES)
    code, out, _ = run("validate", str(path), "--json")
    errors = json.loads(out)["errors"]
    assert code == 2
    assert [(error["code"], error["line"], error["key"]) for error in errors] == [
        ("unknown-key", 4, "data.max_lenght"),
        ("unknown-key", 5, "fsdp.offload_parms"),
        ("wrong-value", 5, "fsdp.sharding_strategy"),
        ("wrong-value", 6, "training.per_device_train_batch_size"),
        ("unknown-key", 6, "training.offload_params"),
    ]
    assert errors[0] == {
        "code": "unknown-key",
        "file": str(path),
        "line": 4,
        "column": 3,
        "key": "data.max_lenght",
        "message": "unknown key `data.max_lenght`",
        "hint": "did you mean `data.max_length`?",
    }


@pytest.mark.usefixtures("fake_model")
def test_valid_recipe_prints_resolved_values_and_reasons(recipe: Path) -> None:
    code, out, err = run("validate", "--config", str(recipe), "--offline")
    assert (code, err) == (0, "")
    assert (
        "batch: 1 sequence × 2 ranks × 1 accumulation = 2 sequences a step; × 2,048 = 4,096 tokens at most"
        in out
    )
    assert "training.data_seed" in out
    assert "model: 1,000 parameters, 2 layers (Block), 2 FSDP units" in out
    assert (
        "data: train from builtin:arithmetic: prompt_completion, loss on completion; first 200 rows are fine"
        in out
    )
    assert out.endswith(f"{recipe} is valid\n")


@pytest.mark.usefixtures("fake_model")
def test_valid_recipe_is_one_json_document(recipe: Path) -> None:
    code, out, _ = run(
        "validate",
        "--config",
        str(recipe),
        "--json",
        "--offline",
        "--set",
        "training.seed=9",
        "--name",
        "other",
    )
    document = json.loads(out)
    assert code == 0
    assert document["valid"] is True
    assert (document["resolved"]["training"]["seed"], document["resolved"]["name"]) == (9, "other")
    assert document["overrides"] == ["training.seed=9"]
    assert document["reasons"]["training.data_seed"] == "training.seed"
    assert document["model"]["parameters"] == 1000
    assert document["data"][0]["format"] == "prompt_completion"
    assert document["unchecked"] == []


UNTRUSTED = """\
model: {name_or_path: someone/model, trust_remote_code: true}
data: {train: [{path: gone.jsonl}]}
launch: {num_processes: 2, env: {LD_PRELOAD: /x.so}}
"""


@pytest.mark.parametrize("verb", [("validate",), ("train", "--dry-run")])
@pytest.mark.parametrize(
    ("extra", "codes"),
    [((), []), (("--set", "training.foo=1", "--set", "nokey=2"), ["unknown-key", "unknown-key"])],
)
def test_mistakes_come_with_code_that_is_not_allowed_and_missing_files(
    tmp_path: Path, verb: tuple[str, ...], extra: tuple[str, ...], codes: list[str]
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(UNTRUSTED)
    code, out, _ = run(*verb, str(path), *extra, "--json")
    errors = json.loads(out)["errors"]
    assert code == 2
    found = [(error["code"], error.get("file"), error["line"]) for error in errors[len(codes) :]]
    assert [error["code"] for error in errors[: len(codes)]] == codes
    assert found == [
        ("remote-code-not-trusted", str(path), 1),
        ("variable-not-allowed", str(path), 3),
        ("data-not-found", str(path), 2),
    ]


def test_code_that_is_not_allowed_comes_with_what_cannot_be_resolved(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(UNTRUSTED + "training: {report_to: [nothing_of_this_name]}\n")
    _, out, _ = run("validate", str(path), "--json")
    codes = [error["code"] for error in json.loads(out)["errors"]]
    assert len(codes) > 3
    assert {"remote-code-not-trusted", "variable-not-allowed", "data-not-found"} < set(codes)


@pytest.mark.usefixtures("fake_model")
def test_decision_that_is_left_open_is_a_notice_with_its_line(recipe: Path) -> None:
    recipe.write_text(
        f"{SMALL}training:\n  # DECIDE: `global_batch_size`: 8 sequences for each GPU\n  seed: 1  # "
        "is no # DECIDE: line\n"
    )
    code, _, err = run("validate", str(recipe), "--offline")
    assert code == 0
    assert err == (
        f"notice: {recipe}:5:3: a decision is left open: `global_batch_size`: 8 sequences for each GPU\n"
        "hint: settle it, and remove the comment\n"
    )


@pytest.mark.usefixtures("fake_model")
def test_strict_counts_keys_without_effect(recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + "fsdp: {min_num_params: 5}\n")
    code, _, err = run("validate", str(recipe), "--offline")
    assert code == 0
    assert err.startswith(f"notice: {recipe}:4:8: `fsdp.min_num_params` has no effect")
    code, _, err = run("validate", str(recipe), "--offline", "--strict")
    assert code == 2
    assert err == f"error: {recipe}:4:8: `fsdp.min_num_params` has no effect: only SIZE_BASED_WRAP reads it\n"


@pytest.mark.usefixtures("fake_model")
def test_translated_spelling_passes_strict(recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + "fsdp: {cpu_offload: true}\n")
    assert run("validate", str(recipe), "--offline", "--strict")[0] == 0


def validated(recipe: Path, text: str) -> tuple[int, dict[str, Any]]:
    recipe.write_text(text)
    code, out, _ = run("validate", str(recipe), "--offline", "--json")
    return code, json.loads(out)


@pytest.mark.usefixtures("fake_model")
def test_bad_first_rows_are_reported_with_file_and_line(recipe: Path) -> None:
    rows = recipe.parent / "rows.jsonl"
    good = '{"prompt": "one plus one is", "completion": " two"}'
    rows.write_text("\n".join([good, good, "{broken", good, '{"prompt": "x", "completion": 5}']) + "\n")
    code, document = validated(recipe, SMALL.replace("builtin:arithmetic}]", f"{rows}}}]"))
    assert code == 2
    assert [(error["code"], error["file"], error["line"]) for error in document["errors"]] == [
        ("bad-row", str(rows), 3),
        ("bad-row", str(rows), 5),
        ("bad-rows", None, None),
    ]
    assert "2 of 5 rows cannot be used" in document["errors"][2]["message"]


@pytest.mark.usefixtures("fake_model")
@pytest.mark.parametrize(("bad", "good"), [(1, 3), (21, 39), (1, 150), (3, 400)])
@pytest.mark.parametrize("verb", ["validate", "prepare"])
def test_hint_about_bad_rows_that_was_followed_does_not_come_back(
    verb: str, bad: int, good: int, recipe: Path
) -> None:
    """`validate` and `prepare` refuse the same recipes, and take what their own hint says."""
    rows = recipe.parent / "rows.jsonl"
    lines = ['{"prompt": "x", "completion": ""}'] * bad + [
        '{"prompt": "one plus one is", "completion": " two"}'
    ] * good
    rows.write_text("\n".join(lines) + "\n")
    recipe.write_text(
        SMALL.replace("builtin:arithmetic}]", f"{rows}}}], cache_dir: {recipe.parent / 'cache'}")
    )

    def errors(verb: str, options: list[str]) -> tuple[int, list[dict[str, Any]]]:
        code, out, _ = run(verb, "--config", str(recipe), "--json", "--set", "launch.device=cpu", *options)
        return code, json.loads(out).get("errors", [])

    code, found = errors(verb, [])
    assert code == 2
    hint = found[-1]["hint"]
    options = [word for option in re.findall(r"--set ([^\s`]+)", hint) for word in ("--set", option)]
    assert errors(verb, options) == (0, []), hint
    assert errors("prepare", options) == (0, []), "what `validate` takes is prepared"


@pytest.mark.usefixtures("fake_model")
def test_bad_rows_that_are_skipped_are_a_notice_and_judged_by_the_share_of_all_rows(recipe: Path) -> None:
    rows = recipe.parent / "rows.jsonl"
    good = '{"prompt": "one plus one is", "completion": " two"}\n'
    text = SMALL.replace("builtin:arithmetic}]", f"{rows}}}], on_bad_row: skip")
    rows.write_text('{"prompt": "x", "completion": ""}\n' + good * 59)
    code, document = validated(recipe, text)
    assert (code, document["errors"][-1]["code"]) == (2, "too-many-bad-rows")
    assert "1 of 60 rows (1.67 %)" in document["errors"][-1]["message"]
    rows.write_text('{"prompt": "x", "completion": ""}\n' * 4 + good * 1000)
    code, document = validated(recipe, text)
    assert code == 0, "the share of all rows is not known"
    [notice] = [each for each in document["notices"] if each["code"] == "bad-rows-skipped"]
    assert "4 of the first 200 rows cannot be used" in notice["message"]
    assert "`data.max_bad_share: 0.01`" in notice["hint"]


def chats_with_a_call(recipe: Path) -> str:
    """A recipe with three rows, of which the chat template cannot render the second."""
    call = {"function": {"name": "f", "arguments": {}}}
    answers = [{"content": "a"}, {"content": "", "tool_calls": [call]}, {"content": "b"}]
    chats = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant"} | answer]} for answer in answers
    ]
    rows = recipe.parent / "rows.jsonl"
    rows.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return SMALL.replace(
        "train: [{path: builtin:arithmetic}]", f"chat_template: plain, train: [{{path: {rows}}}]"
    )


@pytest.mark.usefixtures("fake_model")
def test_row_that_the_chat_template_rejects_is_reported_with_a_way_out(recipe: Path) -> None:
    code, document = validated(recipe, chats_with_a_call(recipe))
    row, total = document["errors"]
    assert (code, row["line"], total["code"]) == (2, 2, "bad-rows")
    assert "omits 'f'" in row["message"]
    assert "`data.chat_template: plain-tools` renders this row" in row["hint"]
    code, _ = validated(recipe, chats_with_a_call(recipe).replace("plain", "plain-tools"))
    assert code == 0


@pytest.mark.usefixtures("fake_model")
def test_rows_beyond_the_limit_or_outside_the_main_thread_are_read_and_not_rendered(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(1) as pool:
        code, _ = pool.submit(validated, recipe, chats_with_a_call(recipe)).result()
    assert code == 0
    monkeypatch.setattr(first_rows, "RENDERED_BYTES", 10)
    code, _ = validated(recipe, chats_with_a_call(recipe))
    assert code == 0


@pytest.mark.usefixtures("fake_model")
def test_missing_data_file_is_reported_with_the_recipe_line(recipe: Path) -> None:
    # with and without a tokenizer to judge rows by
    for tokenizer in (
        "builtin:arithmetic",
        "nobody/nothing",
    ):
        text = SMALL.replace("{path: builtin:arithmetic}", "{path: gone.jsonl}").replace(
            "tokenizer: builtin:arithmetic", f"tokenizer: {tokenizer}"
        )
        code, document = validated(recipe, text)
        assert code == 2
        assert [(error["code"], error["file"], error["line"]) for error in document["errors"]] == [
            ("data-not-found", str(recipe), 2)
        ]


@pytest.mark.usefixtures("fake_model")
def test_unreachable_data_set_and_tokenizer_are_listed_as_unchecked(recipe: Path) -> None:
    text = SMALL.replace("{path: builtin:arithmetic}", "{path: some/set}").replace(
        "tokenizer: builtin:arithmetic", "tokenizer: some/tokenizer"
    )
    code, document = validated(recipe, text)
    assert code == 0
    assert ["tokenizer" in document["unchecked"][0], "some/set" in document["unchecked"][1]] == [True, True]


def test_tokenizer_larger_than_embedding_is_an_error(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checks, "INSPECT", inspector(recipe.parent, FACTS.model_copy(update={"embedding_rows": 300}))
    )
    code, document = validated(recipe, SMALL)
    assert code == 2
    assert [error["code"] for error in document["errors"]] == ["vocabulary-larger-than-embedding"]


@pytest.mark.slow
@pytest.mark.e2e
def test_tokens_that_lora_would_leave_untrained_are_refused_by_validate(tmp_path: Path) -> None:
    """By the model itself, with tied weights; the way out in the hint is valid."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 260,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).save_pretrained(tmp_path / "base")  # pyright: ignore[reportUnknownMemberType]
    base = (
        f"model: {{name_or_path: {tmp_path / 'base'}, tokenizer: builtin:arithmetic, tokens: {{add: "
        f"[<x>, <y>, <z>]}}"
    )
    rest = (
        "}\ndata: {train: [{path: builtin:arithmetic}], max_length: 32}\nlaunch: {device: cpu, "
        "num_processes: 1}\n"
    )
    path = tmp_path / "r.yaml"
    code, document = validated(path, f"{base}{rest}lora: {{r: 4}}\n")
    assert (code, [error["code"] for error in document["errors"]]) == (2, ["lora-new-tokens"])
    assert document["errors"][0]["line"] == 1
    untied = (
        f"{base}, config_overrides: {{tie_word_embeddings: false}}{rest}lora: {{r: 4, modules_to_save: "
        f"[embed_tokens, lm_head]}}\n"
    )
    code, document = validated(path, untied)
    assert code == 0, document


def problem(code: str, message: str) -> dict[str, Any]:
    return {
        "code": code,
        "file": None,
        "line": None,
        "column": None,
        "key": None,
        "message": message,
        "hint": "h",
    }


def test_model_that_needs_the_network_is_listed_as_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "`gpt2` cannot be loaded: We couldn't connect to 'https://huggingface.co' to load the files"
    document = {"problems": [problem("model-not-found", message)], "notices": []}
    monkeypatch.setattr(checks, "INSPECT", inspector(tmp_path, document))
    found = checks.inspect_model(load(MINIMAL).recipe)
    assert (found.problems, found.model) == ([], None)
    assert found.unchecked == [
        "the model `gpt2`: the hub cannot be reached, and its files are not in the cache"
    ]


def test_unknown_model_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {
        "problems": [problem("model-not-found", "`a/b` is not a valid model identifier")],
        "notices": [problem("n", "m")],
    }
    monkeypatch.setattr(checks, "INSPECT", inspector(tmp_path, document))
    found = checks.inspect_model(load(MINIMAL).recipe)
    assert [(each.code, each.hint) for each in found.problems] == [("model-not-found", "h")]
    assert [each.code for each in found.notices] == ["n"]
    assert found.unchecked == [
        "checks that need the complete model, such as the merge of adapters and the size of the embedding"
    ]


@pytest.mark.parametrize("output", ["", "not json"])
def test_failed_inspection_is_reported_with_its_last_line(
    tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "INSPECT", inspector(tmp_path, output, exit_code=1))
    found = checks.inspect_model(load(MINIMAL).recipe)
    assert found.problems[0].code == "model-not-inspected"
    assert "last words" in found.problems[0].message


def test_killed_inspection_is_reported_with_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, sys\nsys.stderr.write('a warning\\n')\nsys.stderr.flush()\nos.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setattr(checks, "INSPECT", (sys.executable, str(script)))
    found = checks.inspect_model(load(MINIMAL).recipe)
    assert "was killed by SIGKILL" in found.problems[0].message
    assert "memory" in str(found.problems[0].hint)


def test_embedded_recipe_is_valid(cli: Cli, tmp_path: Path) -> None:
    """The real child process builds the real model on the meta device."""
    done = cli("validate", "--config", "gpt2_smoke", "--strict", "--json")
    assert done.returncode == 0, done.stderr
    assert document(done)["model"]["layer_classes"] == ["GPT2Block"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_second_validate_does_not_import_torch_and_sees_a_change_of_the_model(
    cli: Cli, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    config = {"model_type": "gpt2", "vocab_size": 384}
    (base / "config.json").write_text(json.dumps(config))
    (tmp_path / "my.yaml").write_text(SMALL)
    time.sleep(2.5)  # files that have just been written are not compared by their times

    def seconds(*words: str) -> tuple[float, dict[str, Any]]:
        before = sum(os.times()[2:4])
        overrides = ["launch.device=cpu", "data.max_length=32", f"model.from_config={base}", *words]
        done = cli(
            "validate",
            "--config",
            "my.yaml",
            "--json",
            *(word for each in overrides for word in ("--set", each)),
        )
        return sum(os.times()[2:4]) - before, json.loads(done.stdout)

    first, found = seconds()
    second, again = seconds("output_dir=elsewhere")
    assert (found["valid"], again["model"]) == (True, found["model"])
    assert second < first / 2
    before = (base / "config.json").stat()
    (base / "config.json").write_text(json.dumps(config | {"vocab_size": 128}))
    os.utime(base / "config.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    _, changed = seconds()
    assert [each["code"] for each in changed["errors"]] == ["vocabulary-larger-than-embedding"]


@pytest.mark.slow
def test_optimizer_that_its_class_refuses_is_an_error_of_validate_and_train(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(f"{SMALL}training: {{optim: sgd, optim_args: 'nesterov=true'}}\n")
    for words in (["validate"], ["train", "--set", "data.max_length=32"]):
        done = cli(*words, "--config", "my.yaml", "--set", "launch.device=cpu")
        assert done.returncode == 2, done.stdout
        assert "my.yaml:4:" in done.stderr
        assert "Nesterov momentum requires a momentum and zero dampening" in done.stderr
        assert "hint: " in done.stderr


def test_catalogue_is_listed_shown_and_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("recipes", "list")
    assert code == 0
    assert "llama7b_full_shard  " in out
    names = [each["name"] for each in json.loads(run("recipes", "list", "--json")[1])["recipes"]]
    assert "gpt2_smoke" in names
    shown = run("recipes", "show", "gpt2_smoke")[1]
    assert run("recipes", "copy", "gpt2_smoke")[0] == 0
    assert (tmp_path / "gpt2_smoke.yaml").read_text() == shown
    assert load_recipe("gpt2_smoke.yaml").recipe.name == "gpt2_smoke"
    code, _, err = run("recipes", "copy", "gpt2_smoke")
    assert code == 2
    assert "already exists" in err
    assert run("recipes", "copy", "gpt2_smoke", "mine.yaml")[0] == 0
    assert run("recipes", "copy", "gpt2_smoke", "no/such/dir.yaml")[0] == 2


@pytest.mark.parametrize("verb", ["show", "copy"])
def test_unknown_recipe_name_is_reported_with_the_closest(verb: str) -> None:
    code, _, err = run("recipes", verb, "gpt2_smok")
    assert code == 2
    assert "did you mean `gpt2_smoke`?" in err


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_schema_is_json_on_stdout(extra: list[str]) -> None:
    code, out, _ = run("recipes", "schema", *extra)
    assert code == 0
    assert json.loads(out)["title"] == "fsdp-tune recipe"


RATE = "rate: 0 → 0.01 at step 3 → 0.00134 at step 10"


@pytest.mark.slow
@pytest.mark.usefixtures("fake_model")
def test_schedule_is_shown_by_each_command_and_refused_before_a_start(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    schedule = "lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1.0e-3}"
    small = SMALL.replace("arithmetic}]", "arithmetic}], max_length: 32")
    file.write_text(f"{small}training: {{max_steps: 10, warmup_steps: 2, learning_rate: 0.01, {schedule}}}\n")
    for words in (
        ["validate", str(file)],
        ["train", str(file), "--dry-run"],
        ["plan", str(file), "--gpu", "A100-80GB", "--num-gpus", "2"],
    ):
        code, stdout, stderr = run(*words)
        assert (code, RATE in stdout + stderr) == (0, True), stdout + stderr
    for words in (["validate"], ["train", "--dry-run"], ["plan", "--gpu", "A100-80GB"], ["rehearse"]):
        code, stdout, stderr = run(words[0], str(file), *words[1:], "--set", "training.learning_rate=1e-5")
        assert code == 2
        assert "rises to 0.001, above `training.learning_rate: 1e-05`" in stderr
        assert "my.yaml:4" in stderr
        assert "hint: `min_lr` is a learning rate" in stderr


_HYBRID = (
    "{model_type: lfm2, vocab_size: 384, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2,"
)
_HYBRID += " intermediate_size: 64, layer_types: [conv, full_attention]}"
_OWN_MASK = "{model_type: openai-gpt, vocab_size: 384, n_embd: 64, n_layer: 2, n_head: 4}"


@pytest.mark.slow
def test_packing_for_a_hybrid_has_a_price_and_for_a_model_with_a_mask_of_its_own_a_refusal(
    cli: Cli, tmp_path: Path
) -> None:
    """The ranks of the latter would find that too, minutes later."""

    def validate(model: str, *options: str) -> tuple[int, str]:
        text = SMALL.replace("{model_type: gpt2, vocab_size: 384}", model).replace(
            "arithmetic}]}", "arithmetic}], packing: true}"
        )
        (tmp_path / "r.yaml").write_text(text)
        done = cli("validate", "r.yaml", "--set", "launch.device=cpu", *options)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    code, shown = validate(_HYBRID)
    assert code == 0, shown
    assert (
        "Lfm2ShortConv computes each example alone: one call for examples of similar length, with at "
        "most 25% more tokens" in shown
    )
    code, shown = validate(_HYBRID, "--set", "kernels.compile=true")
    assert code == 2
    assert "hint: --set kernels.compile=false" in shown
    code, shown = validate(_OWN_MASK)
    assert code == 2
    assert re.search(
        r"error: r.yaml:2:\d+: OpenAIGPTLMHeadModel with attention `eager` lets packed examples see "
        r"each other",
        shown,
    ), shown
    assert "hint: --set data.packing=false" in shown


MISTAKES = {
    "indivisible": "training: {global_batch_size: 7}",
    "unknown-key": "launch: {num_processes: 2, num_machine: 1}",
    "wrong-value": "merge: {dtype: bf17}",
    "tracker-not-installed": "training: {report_to: [no_such_tracker]}",
    "variable-not-allowed": "launch: {num_processes: 2, env: {LD_PRELOAD: x.so}}",
}
"""Code of a mistake that neither model nor rows depend on → what to write for it."""


@pytest.mark.usefixtures("fake_model")
@pytest.mark.parametrize("code", MISTAKES)
def test_mistake_hides_none_of_template_and_rows(code: str, recipe: Path) -> None:
    rows = recipe.parent / "rows.jsonl"
    rows.write_text(
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n{broken\n'
    )
    text = SMALL.replace(
        "train: [{path: builtin:arithmetic}]",
        f"chat_template: chatmll, train: [{{path: {rows}}}, {{path: gone.jsonl}}]",
    )
    section = MISTAKES[code].partition(":")[0]
    kept = [line for line in text.splitlines() if not line.startswith(f"{section}:")]
    exit_code, answer = validated(recipe, "\n".join([*kept, MISTAKES[code]]) + "\n")
    codes = {error["code"] for error in answer["errors"]}
    assert exit_code == 2
    assert codes >= {"no-such-template", "bad-row", "bad-rows", "data-not-found"}, codes
    assert codes - {"no-such-template", "bad-row", "bad-rows", "data-not-found"}, "the mistake itself"
    assert len(answer["unchecked"]) == 1
    assert answer["unchecked"][0].startswith("the rows as tokens")


@pytest.mark.usefixtures("fake_model")
def test_rows_are_read_without_the_tokenizer_that_is_missing(recipe: Path) -> None:
    rows = recipe.parent / "rows.jsonl"
    rows.write_text('{"prompt": "x", "completion": "y"}\n{"prompt": "x"}\n')
    text = SMALL.replace("builtin:arithmetic}]", f"{rows}}}]").replace(
        "tokenizer: builtin:arithmetic", "tokenizer: ./gone"
    )
    code, answer = validated(recipe, text)
    assert code == 2
    assert [(error["line"], error["file"] == str(rows)) for error in answer["errors"][:2]] == [
        (1, False),
        (2, True),
    ]
    assert "`model.tokenizer`" in answer["unchecked"][-1]


@pytest.mark.usefixtures("fake_model")
@pytest.mark.parametrize(
    ("text", "key"), [("data: {formt: text}", "data.formt"), ("data: {format: messagess}", "data.format")]
)
def test_stage_is_not_checked_with_values_that_the_user_did_not_mean(
    text: str, key: str, recipe: Path
) -> None:
    rows = recipe.parent / "rows.jsonl"
    rows.write_text('{"text": 5}\n')
    code, answer = validated(
        recipe,
        SMALL.replace("train: [{path: builtin:arithmetic}]", f"{text[7:-1]}, train: [{{path: {rows}}}]"),
    )
    assert (code, [error["key"] for error in answer["errors"]]) == (2, [key])
    assert answer["unchecked"] == [f"tokenizer, chat template and rows, which depend on `{key}`"]


@pytest.mark.usefixtures("fake_model")
def test_what_an_imported_recipe_lacks_here_is_a_notice_and_its_mistakes_are_errors(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rule for model, tokenizer, rows and packages; without the first line the file is for this
    machine."""
    monkeypatch.setattr("fsdp_tune.recipe.rules.trackers._is_installed", lambda _module: False)
    text = "model: {name_or_path: /cluster/model}\ndata: {train: [{path: /cluster/rows.jsonl}]}\n"
    text += "training: {report_to: [wandb]}\nlaunch: {num_processes: 2}\n"
    codes = {"not-found", "data-not-found", "tracker-not-installed"}
    code, answer = validated(recipe, f"# Imported from a.yaml (axolotl) by `fsdp-tune import`.\n{text}")
    assert (code, answer["valid"]) == (0, True)
    assert {each["code"] for each in answer["notices"]} == codes
    assert all(each["file"] == str(recipe) for each in answer["notices"])
    assert "`model.name_or_path`" in answer["unchecked"][0]
    code, answer = validated(
        recipe, f"# Imported from a.yaml (axolotl) by `fsdp-tune import`.\n{text}merge: {{dtype: int}}\n"
    )
    assert (code, [each["code"] for each in answer["errors"]]) == (2, ["wrong-value"])
    code, answer = validated(recipe, text)
    assert code == 2
    assert {each["code"] for each in answer["errors"]} == codes
