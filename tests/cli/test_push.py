"""`fsdp-tune push`: what is uploaded where, as users run it, with a class in place of huggingface_hub's
client."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fsdp_tune.cli.app import app
from fsdp_tune.merge.source import newer_checkpoint
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.written_files import unsealed
from tests.merge.checkpoints import make_run


class Hub:
    """Stands for huggingface_hub.HfApi."""

    calls: list[tuple[Any, ...]]
    error: Exception | None
    is_private: bool
    licences: dict[str, str]

    def __init__(self, **_: object) -> None: ...

    def whoami(self) -> dict[str, str]:
        if self.error:
            raise self.error
        return {"name": "me"}

    def create_repo(self, name: str, **options: object) -> SimpleNamespace:
        self.whoami()
        self.calls.append(("create", name, options))
        return SimpleNamespace(repo_id=name if "/" in name else f"me/{name}")

    def create_branch(self, name: str, **options: object) -> None:
        self.calls.append(("branch", name, options))

    def model_info(self, name: str) -> SimpleNamespace:
        licence = self.licences.get(name)
        card = SimpleNamespace(license=licence, get=lambda _: None) if licence else None
        return SimpleNamespace(private=self.is_private, card_data=card)

    def upload_folder(self, *, folder_path: Path, **options: Any) -> SimpleNamespace:
        files = {path.name: path.read_bytes() for path in folder_path.iterdir()}
        self.calls.append(("upload", options["repo_id"], sorted(files), options | {"files": files}))
        return SimpleNamespace(commit_url="https://hub/commit")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    for name, value in {"calls": [], "error": None, "is_private": True, "licences": {}}.items():
        monkeypatch.setattr(Hub, name, value, raising=False)
    return Hub


def invoke(*arguments: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "run", {10: {"w": torch.arange(6.0).reshape(2, 3)}})
    assert invoke("merge-checkpoint", run)[0] == 0
    return run / "merged"


FILES = ["README.md", "merge.json", "model.safetensors"]


def test_merge_uploads_its_output_to_a_private_repository(hub, tmp_path):
    run = make_run(tmp_path / "run", {10: {"w": torch.ones(2, 3)}})
    code, document = invoke("merge-checkpoint", run, "--push-to-hub", "me/model")
    assert (code, document["pushed"]) == (0, "https://hub/commit")
    create, upload = hub.calls
    assert create == ("create", "me/model", {"private": True, "exist_ok": True})
    assert upload[:3] == ("upload", "me/model", FILES)


def test_files_of_an_earlier_model_are_removed(hub, merged):
    """transformers reads a `model.safetensors` that is left over instead of the index of new shards."""
    assert invoke("push", merged, "--to", "me/model")[0] == 0
    assert {"*.safetensors", "*.safetensors.index.json"} <= set(hub.calls[-1][3]["delete_patterns"])


def test_failed_push_keeps_the_model_and_names_the_command_that_repeats_it(hub, merged, monkeypatch):
    monkeypatch.setattr(hub, "error", OSError("no network"))
    command = ["push", str(merged), "--to", "me/model", "--private", "--revision", "v 2"]
    code, document = invoke(*command)
    assert (code, document["errors"][0]["code"]) == (1, "push-failed")
    assert "no network" in document["errors"][0]["message"]
    assert document["errors"][0]["hint"].endswith(shlex.join(["fsdp-tune", *command]))
    assert sorted(path.name for path in merged.iterdir()) == FILES


def test_public_repository_needs_the_option(hub, merged, monkeypatch):
    monkeypatch.setattr(hub, "is_private", False)
    code, document = invoke("push", merged, "--to", "me/model")
    assert (code, document["errors"][0]["code"]) == (2, "push-public")
    assert [call[0] for call in hub.calls] == ["create"], "nothing is uploaded"
    assert invoke("push", merged, "--to", "me/model", "--public")[0] == 0


def test_branch_is_created(hub, merged):
    assert invoke("push", merged, "--to", "me/model", "--revision", "v2")[0] == 0
    assert ("branch", "me/model", {"branch": "v2", "exist_ok": True}) in hub.calls
    assert hub.calls[-1][3]["revision"] == "v2"


def test_uploaded_files_name_no_folders_of_this_machine(hub, merged):
    adapter = {"base_model_name_or_path": str(merged.parent / "base"), "target_modules": ["q_proj"]}
    (merged / "adapter_config.json").write_text(json.dumps(adapter))
    record = json.loads((merged / "merge.json").read_text())
    (merged / "merge.json").write_text(
        json.dumps(unsealed(record) | {"files": [*record["files"], "adapter_config.json"]})
    )
    assert invoke("push", merged, "--to", "me/model")[0] == 0
    files = hub.calls[-1][3]["files"]
    assert [name for name, content in files.items() if str(merged.parent).encode() in content] == []
    assert json.loads(files["adapter_config.json"]) == {
        "base_model_name_or_path": "base",
        "target_modules": ["q_proj"],
    }
    assert json.loads(files["merge.json"])["source"] == ["checkpoint-10"]
    assert files["model.safetensors"] == (merged / "model.safetensors").read_bytes()
    assert json.loads((merged / "adapter_config.json").read_text()) == adapter, (
        "commands here still need the path"
    )


def test_model_that_is_older_than_its_run_is_reported(hub, tmp_path):
    run = make_run(tmp_path / "run", {10: {"w": torch.zeros(2, 3)}})
    assert invoke("merge-checkpoint", run)[0] == 0
    shutil.copytree(
        make_run(tmp_path / "later", {20: {"w": torch.ones(2, 3)}}) / "checkpoint-20", run / "checkpoint-20"
    )
    (found,) = newer_checkpoint(RunDir(run), run / "merged")
    assert (found.code, found.message) == (
        "merge-out-of-date",
        "it is of step 10, and the run has checkpoint-20 since",
    )
    assert invoke("merge-checkpoint", "--overwrite", run)[0] == 0
    assert newer_checkpoint(RunDir(run), run / "merged") == ()


@pytest.mark.parametrize("licence", ["apache-2.0", None])
def test_card_names_the_licence_of_the_base(hub, merged, monkeypatch, licence):
    card = merged / "README.md"
    card.write_text(card.read_text().replace("---\n", '---\nbase_model: "org/base"\n', 1))
    monkeypatch.setattr(hub, "licences", {"org/base": licence} if licence else {})
    code, document = invoke("push", merged, "--to", "me/model")
    assert code == 0
    assert ("license: apache-2.0" in card.read_text()) is (licence is not None)
    assert [notice["code"] for notice in document.get("notices", [])] == (
        [] if licence else ["licence-unknown"]
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("nowhere", "--to", "me/model"), "push-not-merged"),
        ((".", "--to", "me/model"), "push-not-merged"),
        (("OUT",), "push-name"),
        (("OUT", "--to", "me/model", "--adapter"), "usage"),
    ],
)
def test_what_cannot_be_pushed_is_refused(hub, merged, arguments, code):
    given = [merged if argument == "OUT" else argument for argument in arguments]
    exit_code, document = invoke("push", *given)
    assert (exit_code, document["errors"][0]["code"]) == (2, code)
    assert document["errors"][0]["hint"]
    assert hub.calls == []


def test_only_what_the_merge_wrote_is_published(hub, merged):
    (merged / ".env").write_text("SECRET=1")
    (merged / "notes").mkdir()
    (merged / "notes" / "todo.txt").write_text("later")
    code, document = invoke("push", merged, "--to", "me/model")
    assert (code, hub.calls[-1][2]) == (0, FILES)
    (notice,) = [notice for notice in document["notices"] if notice["code"] == "push-unlisted"]
    assert ".env" in notice["message"]
    assert "notes/todo.txt" in notice["message"]


def test_output_of_an_earlier_version_is_published_without_strange_files(hub, merged):
    record = json.loads((merged / "merge.json").read_text())
    del record["files"], record["record_digest"]
    (merged / "merge.json").write_text(json.dumps(record))
    (merged / "tokenizer.json").write_text("{}")
    (merged / ".env").write_text("SECRET=1")
    assert invoke("push", merged, "--to", "me/model")[0] == 0
    assert hub.calls[-1][2] == sorted([*FILES, "tokenizer.json"])


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "linked.json", "inner/../../secret"])
def test_record_cannot_publish_files_from_outside(hub, merged, name):
    (merged.parent / "secret").write_text("key")
    (merged / "linked.json").symlink_to(merged.parent / "secret")
    record = json.loads((merged / "merge.json").read_text())
    (merged / "merge.json").write_text(json.dumps(record | {"files": [*record["files"], name]}))
    code, document = invoke("push", merged, "--to", "me/model")
    assert (code, document["errors"][0]["code"]) == (
        2,
        "merge-link" if name == "linked.json" else "push-not-merged",
    )
    assert [call for call in hub.calls if call[0] == "upload"] == []
