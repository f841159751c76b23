"""Accelerate's default configuration on this machine is found, and read within the limits of a recipe."""

from __future__ import annotations

from pathlib import Path

from fsdp_tune.launch.command.default_config import accelerate_default_config


def test_default_accelerate_config_is_found_in_its_directory(tmp_path: Path) -> None:
    assert accelerate_default_config({"HF_HOME": str(tmp_path)}) is None
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("distributed_type: DEEPSPEED\n")
    found = accelerate_default_config({"HF_HOME": str(tmp_path)})
    assert found == {
        "path": str(tmp_path / "accelerate" / "default_config.yaml"),
        "content": {"distributed_type": "DEEPSPEED"},
    }


def test_damaged_accelerate_config_is_reported_instead_of_its_content(tmp_path: Path) -> None:
    path = tmp_path / "accelerate" / "default_config.yaml"
    path.parent.mkdir()
    aliases = [
        "a0: &a0 [x, x, x, x]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)),
    ]
    for text in ("use_cpu: true\nuse_cpu: false", "\n".join(aliases), "[" * 500):
        path.write_text(text)
        found = accelerate_default_config({"HF_HOME": str(tmp_path)})
        assert found is not None
        assert str(found["content"]).startswith("cannot be read: ")
