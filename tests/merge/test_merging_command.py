"""`fsdp-tune merge-checkpoint` as users run it: text, JSON and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fsdp_tune.cli.app import app
from tests.merge.checkpoints import SHARDS, make_run, merged_tensors, save_dcp
from tests.merge.peft import write_config

STATE = {"w": torch.arange(6.0).reshape(2, 3)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", {5: STATE, 10: STATE})


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["merge-checkpoint", *map(str, arguments)])


def test_result_has_source_reason_and_output(run):
    result = invoke(run, "--dtype", "keep")
    assert result.exit_code == 0
    assert "the newest of 2 complete checkpoints" in result.stdout
    assert "1 tensors, 6 parameters, float32" in result.stdout
    assert str(run / "merged") in result.stdout


def test_json_is_one_document_and_messages_go_to_stderr(run):
    result = invoke(run, "--json", "--step", 5, "--dtype", "bf16")
    document = json.loads(result.stdout)
    assert document["merged"] == str(run / "merged")
    assert (document["step"], document["dtype"], document["tensors"], document["verified"]) == (
        5,
        "bfloat16",
        1,
        "quick",
    )
    assert document["dtypes"] == {"bfloat16": 1}
    assert set(document["files"]) == {"README.md", "merge.json", "model.safetensors"}
    assert document["notices"][0]["code"] == "merge-bare"


def test_json_counts_the_tensors_of_each_dtype(tmp_path):
    state = {"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4, 4), "position": torch.arange(64)}
    document = json.loads(invoke(make_run(tmp_path / "run", {5: state}), "--json", "--dtype", "bf16").stdout)
    assert document["dtype"] == "bfloat16"
    assert document["dtypes"] == {"bfloat16": 2, "int64": 1}


def test_errors_are_in_the_document_with_their_exit_code(run, tmp_path):
    for arguments, code, exit_code in (
        ((run, "--step", 7), "merge-no-such-step", 2),
        ((tmp_path / "nowhere",), "merge-source-not-found", 2),
        (("/dev/null",), "merge-source-not-found", 2),
        ((run, "--output", run), "merge-output-is-input", 2),
        ((run, "--output", run / "checkpoint-5" / "merged"), "output-in-checkpoint", 2),
        ((run, "--max-shard-size", "5"), "merge-shard-size", 2),
        ((run / "checkpoint-5", "--best"), "merge-no-run", 2),
    ):
        result = invoke(*arguments, "--json")
        assert result.exit_code == exit_code
        assert [error["code"] for error in json.loads(result.stdout)["errors"]] == [code]
    (run / "checkpoint-10" / SHARDS / "__0_0.distcp").write_bytes(b"")
    result = invoke(run / "checkpoint-10", "--json")
    assert (result.exit_code, json.loads(result.stdout)["errors"][0]["code"]) == (
        1,
        "merge-incomplete-checkpoint",
    )


def test_command_options_are_passed_to_merge(run, tmp_path):
    result = invoke(
        run,
        "--output",
        tmp_path / "out",
        "--dtype",
        "fp16",
        "--max-shard-size",
        "1KB",
        "--verify",
        "none",
        "--average",
        "last:2",
    )
    assert result.exit_code == 0, result.output
    assert merged_tensors(tmp_path / "out")["w"].dtype == torch.float16
    assert invoke(run, "--output", tmp_path / "out").exit_code == 2
    assert invoke(run, "--output", tmp_path / "out", "--overwrite").exit_code == 0


def test_command_itself_never_imports_torch(run):
    show = "print(sorted({'torch', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    code = f"import sys; from fsdp_tune.cli.app import app\ntry: app()\nfinally: {show}"
    done = subprocess.run(
        [sys.executable, "-c", code, "merge-checkpoint", str(run)], capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_adapter_option_selects_merge_or_export(tmp_path):
    state = {f"base_model.model.w.lora_{side}.default.weight": torch.ones(4, 4) for side in "AB"}
    state |= {
        "base_model.model.w.base_layer.weight": torch.ones(4, 4),
        "base_model.model.n.weight": torch.ones(2),
    }
    save_dcp({"model": state}, write_config(tmp_path / "c") / SHARDS)
    merged = invoke(tmp_path / "c", "-o", tmp_path / "merged", "--merged", "--json")
    assert json.loads(merged.stdout)["adapter"]["is_exported"] is False
    assert merged_tensors(tmp_path / "merged")["w.weight"].unique().tolist() == [9.0]  # 1 + 8/4 · 4
    exported = invoke(tmp_path / "c", "-o", tmp_path / "adapter", "--adapter")
    assert f"the adapter is in {tmp_path / 'adapter'}" in exported.stdout
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    elsewhere = tmp_path / "elsewhere.json"
    (tmp_path / "c" / "adapter_config.json").rename(elsewhere)
    failed = invoke(tmp_path / "c", "-o", tmp_path / "again", "--json")
    assert (failed.exit_code, json.loads(failed.stdout)["errors"][0]["code"]) == (2, "merge-adapter-config")
    assert invoke(tmp_path / "c", "-o", tmp_path / "again", "--adapter-config", elsewhere).exit_code == 0


LINKS = (
    "tokenizer.model",
    "tokenizer_config.json",
    "config.json",
    "additional_chat_templates/tool.jinja",
    "modeling_x.py",
)


@pytest.mark.parametrize("name", LINKS)
def test_link_to_outside_of_the_model_is_neither_read_nor_copied(tmp_path, name):
    (tmp_path / "secret").write_text('{"password": "hidden"}')
    base = tmp_path / "base"
    (base / name).parent.mkdir(parents=True)
    (base / "config.json").write_text('{"model_type": "x", "auto_map": {}}')
    (base / name).unlink(missing_ok=True)
    (base / name).symlink_to(tmp_path / "secret")
    run = make_run(tmp_path / "run", {5: STATE})
    result = invoke(run, "--base", base, "--verify", "none", "--json")
    (error,) = json.loads(result.stdout)["errors"]
    assert (result.exit_code, error["code"]) == (2, "merge-link")
    assert error["file"] == str(base / name)
    assert not (run / "merged").exists()


def test_links_inside_of_the_model_and_into_the_store_of_a_snapshot_are_files_of_it(tmp_path):
    """The hub's cache has every file in `blobs` and links to it in `snapshots/COMMIT`."""
    store = tmp_path / "models--org--name"
    snapshot = store / "snapshots" / "abc"
    (store / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (store / "blobs" / "123").write_text('{"model_type": "x"}')
    (snapshot / "config.json").symlink_to("../../blobs/123")
    (snapshot / "vocab.json").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("vocab.json")
    run = make_run(tmp_path / "run", {5: STATE})
    result = invoke(run, "--base", snapshot, "--verify", "none", "--json")
    assert result.exit_code == 0, result.stdout
    record = json.loads((run / "merged" / "merge.json").read_text())
    assert record["files"] == sorted(path.name for path in (run / "merged").iterdir())
    assert {"config.json", "tokenizer.json"} <= set(record["files"])
