"""`evaluate`: metrics with intervals, paired comparisons, files of rows, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from fsdp_tune.answer.model_requests import Request, RowScore
from fsdp_tune.answer.score import run
from fsdp_tune.cli.runs import evaluate
from fsdp_tune.core.devices import Machine
from fsdp_tune.data.read.file_access import CHAT_TEMPLATE, EOS, PAD, builtin_tokenizer
from fsdp_tune.jobs import evaluate as job
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.cli.conftest import Cli, document
from tests.cuda.devices import on_devices

app = typer.Typer()
app.command()(evaluate)
DATA = ("--data", "builtin:arithmetic", "--split", "test")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two model directories, `tuned` and `base`, with random weights, and an adapter of `base`."""
    from peft import LoraConfig, get_peft_model

    root = tmp_path_factory.mktemp("models")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=builtin_tokenizer("builtin:arithmetic"),
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
    )
    for seed, name in enumerate(("tuned", "base")):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=64,
            eos_token_id=tokenizer.eos_token_id,
            **sizes,
        )
        LlamaForCausalLM(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    adapted = get_peft_model(
        LlamaForCausalLM.from_pretrained(root / "base"),
        LoraConfig(init_lora_weights=False, target_modules=["q_proj"]),
    )
    adapted.save_pretrained(root / "adapter")
    return root


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Scores in this process: importing torch in a child for each test takes seconds."""

    def in_process(request: Request, scored: Mapping[str, Any], observer: object) -> None:
        run(
            request,
            lambda line: scored[line["set"]].add(
                line["model"], [RowScore(**row) for row in json.loads(json.dumps(line["rows"]))]
            ),
        )

    monkeypatch.setattr(job, "_run", in_process)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments: object, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.e2e
@on_devices
def test_command_scores_two_models_in_a_child_process(cli: Cli, models: Path, device: str) -> None:
    done = cli(
        "evaluate",
        models / "tuned",
        *DATA,
        "--base",
        models / "base",
        "--max-rows",
        "12",
        "--device",
        device,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    assert document(done)["device"] == device
    found = document(done)["sets"]["test"]
    assert found["rows"] == 12
    assert found["base"]["value"] != found["metric"]["value"]
    assert found["comparison"]["low"] <= found["comparison"]["difference"] <= found["comparison"]["high"]


@pytest.mark.slow
@pytest.mark.e2e
def test_processes_share_the_rows_and_find_the_same(cli: Cli, models: Path) -> None:
    """Eleven rows in batches of two: six batches, of which the last has one row."""
    found: dict[int, dict[str, Any]] = {}
    for count in (1, 2, 3):
        arguments = (
            "--max-rows",
            "11",
            "--batch-size",
            "2",
            "--num-processes",
            str(count),
            "--out",
            f"{count}.jsonl",
        )
        done = cli("evaluate", models / "tuned", *DATA, "--base", models / "base", *arguments, "--json")
        assert done.returncode == 0, done.stderr
        found[count] = document(done)
    assert [each["processes"] for each in found.values()] == [1, 2, 3]
    one = found[1]["sets"]["test"]
    for other in (found[2]["sets"]["test"], found[3]["sets"]["test"]):
        assert (other["rows"], other["tokens"]) == (one["rows"], one["tokens"]) == (11, other["tokens"])
        for part in ("metric", "loss", "base"):
            assert other[part] == pytest.approx(one[part], rel=1e-6)


@pytest.mark.parametrize("measure", ["loss", "generate"])
def test_parts_have_each_row_once_with_the_same_score(
    here: Path, models: Path, monkeypatch: pytest.MonkeyPatch, measure: str
) -> None:
    requests: list[Request] = []
    monkeypatch.setattr(
        job, "_run", lambda request, *_: requests.append(request) or (_ for _ in ()).throw(KeyboardInterrupt)
    )
    metric = ("--metric", "exact_match", "--max-new-tokens", "4") if measure == "generate" else ()
    CliRunner().invoke(app, [str(models / "tuned"), *DATA, "--max-rows", "11", "--batch-size", "2", *metric])

    def rows(parts: int) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for part in range(parts):
            run(replace(requests[0], part=part, parts=parts), lines.append)
        return [row for line in lines for row in line["rows"]]

    alone = sorted(rows(1), key=lambda row: row["index"])
    assert [row["index"] for row in alone] == list(range(11))
    for parts in (2, 3, 8):
        assert sorted(rows(parts), key=lambda row: row["index"]) == alone


def test_child_that_fails_ends_the_others(
    models: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second of three is killed; the first and the third wait for ever."""
    program = (
        "import json, os, signal, sys, time\n"
        "request = json.loads(sys.stdin.read())\n"
        "if request['part'] == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(600)"
    )
    monkeypatch.setattr(job, "SCORE", (sys.executable, "-c", program))
    started = time.monotonic()
    error = invoke(models / "tuned", *DATA, "--num-processes", "3", "--batch-size", "1", code=1)["errors"][0]
    assert (error["code"], "SIGKILL" in error["message"]) == ("evaluation-failed", True)
    assert time.monotonic() - started < 60


def test_more_processes_than_gpus_are_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "this_machine", lambda _: Machine("cuda", 2, 8, "A100"))
    error = invoke(models / "tuned", *DATA, "--num-processes", "3", code=2)["errors"][0]
    assert (error["code"], error["hint"]) == ("no-device", "--num-processes 2")


def test_perplexity_is_that_of_a_plain_forward(here: Path, models: Path) -> None:
    found = invoke(models / "tuned", *DATA, "--max-rows", "9", "--batch-size", "4", "--out", "rows.jsonl")[
        "sets"
    ]["test"]
    model = LlamaForCausalLM.from_pretrained(models / "tuned").eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(models / "tuned")
    total, count = 0.0, 0
    for line in map(json.loads, (here / "rows.jsonl").read_text().splitlines()):
        prompt, answer = (
            tokenizer(text, add_special_tokens=False).input_ids for text in (line["prompt"], line["target"])
        )
        ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(
                model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none"
            )
        targets = losses[len(prompt) - 1 :]
        assert line["total"] == pytest.approx(float(targets.sum()), rel=1e-5)
        total, count = total + float(targets.sum()), count + len(targets)
    assert found["tokens"] == count
    assert found["loss"]["value"] == pytest.approx(total / count, rel=1e-6)
    assert found["metric"]["value"] == pytest.approx(math.exp(total / count), rel=1e-5)


def test_exact_match_counts_answers_of_a_model_that_knows_them(
    here: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = iter(range(1000))

    def answers(model: object, prompts: list[list[int]], **options: Any) -> list[list[int]]:
        ends = sorted(options["end_ids"])
        return [
            [*PreTrainedTokenizerFast.from_pretrained(models / "tuned")(" two").input_ids, ends[0]]
            for _ in prompts
            if next(known) < 999
        ]

    monkeypatch.setattr("fsdp_tune.answer.score.generate", answers)
    arguments = (
        models / "tuned",
        *DATA,
        "--metric",
        "exact_match",
        "--max-rows",
        "20",
        "--base",
        models / "base",
        "--out",
        "rows.jsonl",
    )
    found = invoke(*arguments)
    result = found["sets"]["test"]
    lines = [json.loads(line) for line in (here / "rows.jsonl").read_text().splitlines()]
    right = sum(line["target"] == " two" for line in lines) / 2
    assert 0 < right < 20
    assert result["metric"]["value"] == right / 20
    assert result["comparison"]["p"] == 1.0
    assert (found["interval"], found["test"]) == ("Wilson, 95 %", "McNemar, exact")
    assert all(line["score"] == float(line["target"] == " two") for line in lines)


def test_answers_are_extracted_from_both_texts(here: Path, models: Path) -> None:
    rows = [
        {"prompt": "zero plus two is", "completion": " so #### 2\nor"},
        {"prompt": "zero plus one is", "completion": " #### 1"},
    ]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    exact = ("--metric", "exact_match", "--max-new-tokens", "2")
    found = invoke(models / "tuned", "--data", "rows.jsonl", *exact, "--answer", "#### (.*)")
    assert found["sets"]["rows.jsonl"]["metric"]["value"] == 0.0
    (notice,) = [notice for notice in found["notices"] if notice["code"] == "answers-cut"]
    assert "2 of 2 answers to `rows.jsonl` did not end within 2 tokens" in notice["message"]
    failed = invoke(models / "tuned", "--data", "rows.jsonl", *exact, "--answer", "= (.*)", code=2)["errors"][
        0
    ]
    assert (failed["code"], failed["file"], failed["line"]) == ("answer-pattern", "rows.jsonl", 1)
    failed = invoke(models / "tuned", "--data", "rows.jsonl", *exact, "--answer", "= (.*)|or", code=2)[
        "errors"
    ][0]
    assert (failed["code"], failed["line"]) == ("answer-pattern", 1)  # a match without its group


def test_answers_do_not_depend_on_the_batch(here: Path, models: Path) -> None:
    """The second prompt leaves few of the model's 64 positions, which must not end the answers of the
    others."""
    rows = [{"prompt": "one plus two is " * count, "completion": " three"} for count in (1, 15, 4)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    predictions: list[list[str]] = []
    for size in (1, 3):
        exact = (
            "--metric",
            "exact_match",
            "--max-new-tokens",
            "40",
            "--batch-size",
            size,
            "--out",
            "out.jsonl",
        )
        invoke(models / "tuned", "--data", "rows.jsonl", *exact)
        predictions.append(
            [json.loads(line)["prediction"] for line in (here / "out.jsonl").read_text().splitlines()]
        )
    assert predictions[0] == predictions[1]


def test_extension_metric_gets_each_row_without_padding(
    here: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsdp_tune.recipe.extensions import Extension

    shapes: list[tuple[int, ...]] = []

    def accuracy(logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> tuple[Any, Any]:
        shapes.append(tuple(targets.shape))
        return (logits.argmax(-1) == targets)[mask].sum(), mask.sum()

    monkeypatch.setattr(
        job, "find_extension", lambda kind, name: Extension(kind, name, "mine:accuracy", "mine", "1")
    )
    monkeypatch.setattr(Extension, "load", lambda self: accuracy)
    arguments = (models / "tuned", *DATA, "--metric", "accuracy", "--max-rows", "60")
    assert invoke(*arguments, code=2)["errors"][0]["code"] == "extension-not-allowed"
    found = invoke(*arguments, "--allow-extensions")["sets"]["test"]
    assert 0.0 <= found["metric"]["low"] <= found["metric"]["value"] <= found["metric"]["high"] <= 1.0
    assert len(set(shapes)) > 1
    assert all(rows == 1 for rows, _ in shapes)


def test_adapter_is_added_to_its_base(here: Path, models: Path) -> None:
    plain = invoke(models / "base", *DATA, "--max-rows", "4")["sets"]["test"]
    shutil.copytree(models / "adapter", here / "adapter")
    adapted = invoke("adapter", *DATA, "--max-rows", "4", "--base", models / "base")["sets"]["test"]
    assert adapted["base"] == plain["metric"]
    assert adapted["metric"] != plain["metric"]


def test_adapter_is_added_to_the_revision_that_it_was_trained_on(
    here: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = {"base": "b" * 40, "tuned": "a" * 40}
    cached = here / "cache" / "models--org--moved"
    for name, commit in commits.items():
        shutil.copytree(models / name, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commits["tuned"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "cache"))
    shutil.copytree(models / "adapter", here / "adapter")
    config = json.loads((here / "adapter" / "adapter_config.json").read_text())
    pinned = config | {"base_model_name_or_path": "org/moved", "revision": commits["base"]}
    (here / "adapter" / "adapter_config.json").write_text(json.dumps(pinned))
    found = invoke("adapter", *DATA, "--max-rows", "4", "--base", models / "adapter")["sets"]["test"]
    assert found["metric"] == found["base"]


def test_adapter_that_is_a_prompt_is_refused(here: Path, models: Path) -> None:
    (here / "prompt").mkdir()
    config = {"peft_type": "PROMPT_TUNING", "base_model_name_or_path": str(models / "base")}
    (here / "prompt" / "adapter_config.json").write_text(json.dumps(config))
    (error,) = invoke("prompt", *DATA, code=2)["errors"]
    assert "PROMPT_TUNING" in error["message"]


def test_base_with_another_tokenizer_is_refused(here: Path, models: Path) -> None:
    shutil.copytree(models / "base", here / "other")
    names = [
        token
        for token, _ in sorted(
            builtin_tokenizer("builtin:arithmetic").get_vocab().items(), key=lambda item: item[1]
        )
    ]
    document = json.loads((here / "other" / "tokenizer.json").read_text())
    document["model"]["vocab"] = dict(zip(names, [*range(1, len(names)), 0], strict=True))
    document["added_tokens"] = [
        token | {"id": (token["id"] + 1) % len(names)} for token in document["added_tokens"]
    ]
    (here / "other" / "tokenizer.json").write_text(json.dumps(document))
    assert (
        invoke(models / "tuned", *DATA, "--base", "other", code=2)["errors"][0]["code"] == "tokenizer-differs"
    )
    for file in (here / "other").glob("tokenizer*"):
        file.unlink()  # a base without a tokenizer is trusted
    assert (
        invoke(models / "tuned", *DATA, "--base", "other", "--max-rows", "1")["notices"][0]["code"]
        == "few-rows"
    )


def test_all_rows_are_evaluated_with_a_recipe_of_a_stream(
    here: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_tune.data.preparation.SAMPLE_ROWS", 2)
    (here / "recipe.yaml").write_text(
        f"model: {{name_or_path: {models / 'base'}}}\n"
        "data: {train: [{path: 'builtin:arithmetic'}], streaming: true}\n"
        "training: {max_steps: 1}\nlaunch: {num_processes: 1}\n"
    )
    (here / "rows.jsonl").write_text(
        (json.dumps({"prompt": "one plus one is", "completion": " two"}) + "\n") * 12
    )
    found = invoke(models / "tuned", "--config", "recipe.yaml", "--data", "rows.jsonl")
    assert found["sets"]["rows.jsonl"]["rows"] == 12


def test_recipe_gives_eval_sets_and_their_format(here: Path, models: Path) -> None:
    recipe = here / "recipe.yaml"
    recipe.write_text(f"""
model: {{name_or_path: {models / "base"}}}
data:
  train: [{{path: "builtin:arithmetic"}}]
  eval: [{{path: "builtin:arithmetic", split: test, label: sums}}]
  packing: true
  max_length: 32
""")
    packed = invoke(models / "tuned", "--config", recipe)["sets"]["sums"]
    plain = invoke(models / "tuned", *DATA)["sets"]["test"]
    assert (packed["rows"], packed["tokens"]) == (plain["rows"], plain["tokens"])
    assert packed["loss"]["value"] == pytest.approx(plain["loss"]["value"], rel=1e-6)
    prompts: list[list[str]] = []
    for arguments in (("--config", recipe), DATA):
        invoke(models / "tuned", *arguments, "--max-rows", "7", "--out", "rows.jsonl")
        prompts.append(
            [json.loads(line)["prompt"] for line in (here / "rows.jsonl").read_text().splitlines()]
        )
    assert len(prompts[0]) == 7
    assert prompts[0] == prompts[1], "the first rows, however they are packed"


def test_cut_rows_are_counted_and_left_out_of_exact_match(here: Path, models: Path) -> None:
    rows = [{"prompt": "one plus", "completion": " two" * length} for length in (1, 40)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "recipe.yaml").write_text(
        f"model: {{name_or_path: {models / 'base'}}}\ndata: {{train: [{{path: rows.jsonl}}], "
        f"max_length: 16}}\n"
    )
    arguments = (models / "tuned", "--config", "recipe.yaml", "--data", "rows.jsonl")
    found = invoke(*arguments, "--metric", "exact_match", "--max-new-tokens", "2")["sets"]["rows.jsonl"]
    assert (found["rows"], found["cut_rows"]) == (1, 1)
    assert invoke(*arguments)["sets"]["rows.jsonl"]["rows"] == 2


def test_mistakes_are_one_line_with_a_hint(here: Path, models: Path) -> None:
    tuned = models / "tuned"
    (here / "text.jsonl").write_text('{"text": "one plus two"}\n')
    (here / "long.jsonl").write_text(
        json.dumps({"prompt": "one plus two " * 40, "completion": " two"}) + "\n"
    )
    (here / "empty").mkdir()
    run_directory = here / "run"
    (run_directory / "model").mkdir(parents=True)
    (run_directory / "recipe.json").write_text("{}")
    for expected, arguments in {
        "unknown-extension": (tuned, *DATA, "--metric", "bleu"),
        "model-not-found": ("empty", *DATA),
        "run-not-merged": ("run", *DATA),
        "no-evaluation-data": (tuned,),
        "no-prompt": (tuned, "--data", "text.jsonl", "--metric", "exact_match"),
        "beyond-positions": (tuned, "--data", "long.jsonl", "--metric", "exact_match"),
        "answer-pattern": (tuned, *DATA, "--metric", "exact_match", "--answer", "("),
        "no-recipe": (tuned, *DATA, "--set", "data.max_length=4"),
        "no-device": (tuned, *DATA, "--device", "cuda"),
        "no-directory": (tuned, *DATA, "--out", "nowhere/rows.jsonl"),
        "wrong-value": (tuned, "--data", "text.jsonl", "--format", "csv"),
        "no-such-split": (tuned, "--data", "builtin:arithmetic", "--split", "dev"),
    }.items():
        (error,) = invoke(*arguments, code=2)["errors"]
        assert (error["code"], bool(error["hint"]) or expected == "answer-pattern") == (expected, True), error


def test_loader_of_a_run_needs_permission(here: Path, models: Path) -> None:
    shutil.copytree(models / "tuned", here / "run" / "merged")
    (here / "run" / "model").mkdir()
    data = {"train": [{"path": "rows", "loader": "mine"}], "eval": {"rows": 2}}
    recipe = Recipe.model_validate(
        {"data": data, "launch": {"num_processes": 1}, "extensions": {"metrics": ["unused"]}}
    )
    (here / "run" / "recipe.json").write_text(recipe.model_dump_json(by_alias=True))
    (error,) = invoke("run", code=2)["errors"]
    assert (error["code"], error["key"]) == ("extension-not-allowed", "data.train[0].loader")


def test_model_without_all_weights_or_tokens_is_refused(here: Path, models: Path) -> None:
    for name in ("incomplete", "small"):
        shutil.copytree(models / "tuned", here / name)
    weights = load_file(here / "incomplete" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, here / "incomplete" / "model.safetensors", {"format": "pt"})
    assert invoke("incomplete", *DATA, code=1)["errors"][0]["code"] == "model-incomplete"
    model = LlamaForCausalLM.from_pretrained(here / "small")
    model.resize_token_embeddings(300)
    model.save_pretrained(here / "small")
    assert invoke("small", *DATA, code=2)["errors"][0]["code"] == "vocabulary-larger-than-embedding"


def test_score_that_is_not_finite_exits_4_with_its_row(here: Path, models: Path) -> None:
    shutil.copytree(models / "tuned", here / "damaged")
    model = LlamaForCausalLM.from_pretrained(here / "damaged")
    model.lm_head.weight.data[3] = np.nan
    model.save_pretrained(here / "damaged")
    (error,) = invoke("damaged", *DATA, code=4)["errors"]
    assert (error["code"], error["file"]) == ("score-not-finite", "builtin:arithmetic")
    assert error["line"] > 0


@pytest.mark.slow
@pytest.mark.ranks
@on_devices
def test_loss_of_a_run_equals_its_last_evaluation(cli: Cli, tmp_path: Path, device: str) -> None:
    keys = {
        "training.max_steps": 3,
        "training.logging_steps": 1,
        "launch.num_processes": 2,
        "output_dir": "run",
        "merge.dtype": "fp32",
    }
    keys |= {"launch.device": device}
    keys |= {
        "precision.mixed_precision": "no",
        "data.packing": "true",
        "data.max_length": 64,
        "training.global_batch_size": 64,
    }
    overrides = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    done = cli("train", "--config", "gpt2_smoke", *overrides)
    assert done.returncode == 0, done.stderr
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = [line["eval_loss"] for line in logged if "eval_loss" in line][-1]
    for count in ("1", "2"):
        result = document(cli("evaluate", "run", "--device", device, "--num-processes", count, "--json"))
        (found,) = result["sets"].values()
        assert found["loss"]["value"] == pytest.approx(expected, rel=1e-6)
    card = tmp_path / "run" / "merged" / "README.md"
    assert tmp_path / result["card"] == card
    (shown,) = ModelCard.load(card).data.eval_results
    assert (shown.metric_type, shown.metric_value) == (
        "perplexity",
        pytest.approx(found["metric"]["value"], rel=1e-5),
    )
    assert (shown.dataset_name, shown.dataset_type, shown.dataset_split) == (
        "held_out",
        "builtin:arithmetic",
        "test",
    )
    assert card.read_text().count("| perplexity |") == 1


@pytest.mark.parametrize(
    ("data", "label", "expected"),
    [
        (
            {"eval": [{"path": "org/sums", "name": "en", "split": "test", "label": "sums"}]},
            "sums",
            ("sums", "org/sums", "en", "test"),
        ),
        ({"eval": {"rows": 5}}, "held_out", ("held_out", "rows.jsonl", None, "held out of train")),
        (
            {
                "eval": {"rows": 5},
                "train": [{"path": "/home/ann/one.jsonl"}, {"path": "org/two", "split": "all"}],
            },
            "two",
            ("two", "org/two", None, "held out of all"),
        ),
    ],
)
def test_card_names_the_data_and_split_of_a_set(
    data: dict[str, Any], label: str, expected: tuple[str | None, ...]
) -> None:
    recipe = Recipe.model_validate({"data": {"train": [{"path": "/home/ann/rows.jsonl"}], **data}})
    found = job._origin(recipe, label, is_only=False)
    assert tuple(found[name] for name in ("name", "data", "config", "split")) == expected


def test_columns_that_no_format_reads_are_refused_or_ignored(here: Path, models: Path) -> None:
    rows = [{"prompt": "one plus one is", "completion": " two", "stars": 5}] * 3
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = (models / "tuned", "--data", "rows.jsonl")
    (first, *_) = invoke(*arguments, code=2)["errors"]
    assert "`stars` is not read" in first["message"]
    (usage,) = invoke(*arguments, "--set", "data.ignore_columns=[stars]", code=2)["errors"]
    assert "`--ignore-column NAME`" in usage["hint"]
    (found,) = invoke(*arguments, "--ignore-column", "stars")["sets"].values()
    assert found["rows"] == 3
