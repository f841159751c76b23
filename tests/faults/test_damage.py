"""Damage every file of a real checkpoint in every way: the damage is named, and the older checkpoint is
used."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from fsdp_tune.run.directory import (
    Checkpoint,
    RunDir,
    checkpoint_to_start_from,
    inspect_checkpoint,
    latest_checkpoint,
)
from fsdp_tune.run.manifest import FORMAT_VERSION, MANIFEST_NAME
from tests.faults import ranks
from tests.faults.conftest import Count
from tests.ranks import Ranks, shared_ranks
from tests.session import made_once

pytestmark = pytest.mark.ranks
FLIPS = 64


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two checkpoints of two ranks."""

    def make(folder: Path) -> None:
        folder.mkdir()
        for step in (ranks.FIRST, ranks.SECOND):
            shared_ranks().run(2, ranks.save, folder, step, False, None)

    return RunDir(
        shutil.copytree(made_once("two-checkpoints", make), tmp_path_factory.mktemp("damage") / "run")
    )


def files_of(checkpoint: Path) -> list[str]:
    return sorted(
        path.relative_to(checkpoint).as_posix()
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name != "damage.json"
    )


def expect_older(run: RunDir, name: str, what: str) -> None:
    checkpoint, rejected = latest_checkpoint(run, digests=True)
    assert checkpoint is not None, what
    assert checkpoint.step == ranks.FIRST, what
    assert any(
        bad.path == run.checkpoint(ranks.SECOND) and (name in bad.reason or name == MANIFEST_NAME)
        for bad in rejected
    ), what


def flipped(raw: bytes, offset: int, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[offset] ^= 1 << bit
    return bytes(changed)


def test_every_flipped_bit_is_detected(pristine: RunDir, count: Count) -> None:
    """64 offsets of every file: the loaders of DCP, torch and safetensors say nothing to any of them."""
    draw, done = random.Random(0), 0
    checkpoint = pristine.checkpoint(ranks.SECOND)
    for name in files_of(checkpoint):
        path = checkpoint / name
        raw = path.read_bytes()
        try:
            for offset in sorted({0, len(raw) - 1, *(draw.randrange(len(raw)) for _ in range(FLIPS - 2))}):
                path.write_bytes(flipped(raw, offset, draw.randrange(8)))
                if name == MANIFEST_NAME and _still_says_the_same(path, raw):
                    continue  # white space turned into other white space
                expect_older(pristine, name, f"{name} at {offset}")
                done += 1
        finally:
            path.write_bytes(raw)
    assert latest_checkpoint(pristine, digests=True)[0] == inspect_checkpoint(checkpoint, digests=True)
    count(corruptions=done)


def _still_says_the_same(path: Path, raw: bytes) -> bool:
    try:
        return bool(json.loads(path.read_bytes()) == json.loads(raw))
    except ValueError:
        return False


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "one byte short": lambda raw: raw[:-1],
    "half": lambda raw: raw[: len(raw) // 2],
    "empty": lambda raw: b"",
    "zeros": lambda raw: b"\0" * len(raw),
    "noise": lambda raw: random.Random(1).randbytes(len(raw)),
    "appended to": lambda raw: raw + b"\0",
    "gone": lambda raw: None,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_truncated_emptied_or_removed_file_is_detected(
    kind: str, pristine: RunDir, count: Count
) -> None:
    checkpoint = pristine.checkpoint(ranks.SECOND)
    names = files_of(checkpoint)
    for name in names:
        path = checkpoint / name
        raw = path.read_bytes()
        changed = DAMAGE[kind](raw)
        if name == MANIFEST_NAME and kind == "one byte short":
            changed = raw[:-2]  # its last byte ends a line, and nothing else
        try:
            if changed is None:
                path.unlink()
            else:
                path.write_bytes(changed)
            expect_older(pristine, name, f"{name} {kind}")
        finally:
            path.write_bytes(raw)
    count(corruptions=len(names))


@pytest.mark.parametrize(
    "part",
    ["pytorch_model_fsdp_0", "optimizer_0", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"],
)
def test_file_of_another_step_is_detected(part: str, pristine: RunDir, tmp_path: Path) -> None:
    """Two halves that are whole by themselves, with all the right names and sizes."""
    run = RunDir(shutil.copytree(pristine.path, tmp_path / "run"))
    target, source = run.checkpoint(ranks.SECOND) / part, run.checkpoint(ranks.FIRST) / part
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    expect_older(run, part, part)


@pytest.mark.parametrize(
    "part", ["pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0", "rng_state_1.pth"]
)
def test_file_replaced_by_link_is_detected(part: str, pristine: RunDir, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(pristine.path, tmp_path / "run"))
    target = run.checkpoint(ranks.SECOND) / part
    moved = target.rename(tmp_path / "elsewhere")
    target.symlink_to(moved)
    verdict = inspect_checkpoint(run.checkpoint(ranks.SECOND), digests=True)
    assert not isinstance(verdict, Checkpoint)
    assert "leads out" in verdict.reason


def manifest_edit(run: RunDir, edit: Callable[[dict], object]) -> None:
    """Change a manifest and its digest: the fields themselves must be checked."""
    path = run.checkpoint(ranks.SECOND) / MANIFEST_NAME
    document = json.loads(path.read_text())
    del document["digest"]
    edit(document)
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["digest"] = xxhash.xxh3_128(canonical.encode()).hexdigest()
    path.write_text(json.dumps(document))


MANIFESTS: dict[str, Callable[[dict], object]] = {
    "of another kind": lambda m: m.update(kind="something else"),
    "of a newer format": lambda m: m.update(format_version=FORMAT_VERSION + 1),
    "of another step": lambda m: m["facts"].update(step=7),
    "a digest edited": lambda m: m["files"]["trainer_state.json"].update(digest="0" * 64),
    "a size edited": lambda m: m["files"]["trainer_state.json"].update(size_bytes=1),
    "no files": lambda m: m.pop("files"),
    "a list of files": lambda m: m.update(files=[]),
    "a file outside": lambda m: m["files"].update(
        {"../checkpoint-10/trainer_state.json": m["files"]["trainer_state.json"]}
    ),
    "an absolute file": lambda m: m["files"].update({"/etc/hostname": {"size_bytes": 1, "digest": "0"}}),
    "a name with NUL": lambda m: m["files"].update({"a\0b": {"size_bytes": 1, "digest": "0"}}),
    "a name of 5,000 letters": lambda m: m["files"].update({"a" * 5000: {"size_bytes": 1, "digest": "0"}}),
    "a file by its case twin": lambda m: m["files"].update(
        {"TRAINER_STATE.JSON": m["files"].pop("trainer_state.json")}
    ),
    "no name": lambda m: m["files"].update({"": {"size_bytes": 0, "digest": "0"}}),
    "the directory itself": lambda m: m["files"].update({".": {"size_bytes": 0, "digest": "0"}}),
    "a size that is no number": lambda m: m["files"]["trainer_state.json"].update(size_bytes="many"),
    "a size beyond all numbers": lambda m: m["files"]["trainer_state.json"].update(size_bytes=float("inf")),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_mismatched_manifest_is_not_a_checkpoint(kind: str, pristine: RunDir, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(pristine.path, tmp_path / "run"))
    manifest_edit(run, MANIFESTS[kind])
    expect_older(run, MANIFEST_NAME, kind)
    assert checkpoint_to_start_from(run.checkpoint(ranks.SECOND)) is None


@pytest.mark.parametrize("fact", ["step", "world_size", "recipe_digest", "no digest"])
def test_changed_manifest_field_is_detected(fact: str, pristine: RunDir, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(pristine.path, tmp_path / "run"))
    path = run.checkpoint(ranks.SECOND) / MANIFEST_NAME
    document = json.loads(path.read_text())
    if fact == "no digest":
        del document["digest"]
    else:
        value = document["facts"][fact]
        document["facts"][fact] = value + 1 if isinstance(value, int) else "f" + value[1:]
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    checkpoint, rejected = latest_checkpoint(run, digests=False)
    assert checkpoint is not None
    assert checkpoint.step == ranks.FIRST
    assert "digest" in rejected[0].reason


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"1", b"\xff\xfe", b"[" * 100_000, b'{"a":1}'],
    ids=lambda raw: repr(raw[:9]),
)
def test_invalid_manifest_is_not_a_checkpoint(raw: bytes, pristine: RunDir, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(pristine.path, tmp_path / "run"))
    (run.checkpoint(ranks.SECOND) / MANIFEST_NAME).write_bytes(raw)
    expect_older(run, MANIFEST_NAME, repr(raw[:9]))


EXTRAS = (
    ".nfs000000000001",
    ".DS_Store",
    "trainer_state.json~",
    "pytorch_model_fsdp_0/__2_0.distcp",
    "pytorch_model_fsdp_0/__0_0.distcp.swp",
)


def test_extra_files_in_checkpoint_are_ignored(pristine: RunDir, tmp_path: Path, on_ranks: Ranks) -> None:
    """A stale shard among them, of a rank that this world does not have."""
    run = RunDir(shutil.copytree(pristine.path, tmp_path / "run"))
    for name in EXTRAS:
        (run.checkpoint(ranks.SECOND) / name).write_bytes(b"not ours")
    assert on_ranks.run(2, ranks.come_back, [run.path]) == [[(ranks.SECOND, True)]] * 2


def test_read_only_copy_without_mtimes_resumes(pristine: RunDir, tmp_path: Path, on_ranks: Ranks) -> None:
    run = RunDir(tmp_path / "elsewhere" / "of another name")
    shutil.copytree(pristine.path, run.path, copy_function=shutil.copyfile)
    for path in run.checkpoint(ranks.SECOND).rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert on_ranks.run(2, ranks.come_back, [run.path]) == [[(ranks.SECOND, True)]] * 2


@pytest.mark.parametrize(
    "name", ["checkpoint-x", "checkpoint-", "checkpoint-07x", "Checkpoint-30", "checkpoint-30.old"]
)
def test_lookalike_directory_is_not_a_checkpoint(name: str, pristine: RunDir, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(pristine.path, tmp_path / "run"))
    shutil.copytree(run.checkpoint(ranks.SECOND), run.path / name)
    checkpoint, _ = latest_checkpoint(run, digests=True)
    assert checkpoint is not None
    assert checkpoint.path == run.checkpoint(ranks.SECOND)


@pytest.mark.parametrize("kind", ["link", "link to itself", "file", "renamed"])
def test_misnamed_checkpoint_directory_is_reported(kind: str, pristine: RunDir, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(pristine.path, tmp_path / "run"))
    late = run.checkpoint(30)
    if kind == "link":
        late.symlink_to(run.checkpoint(ranks.SECOND))
    elif kind == "link to itself":
        late.symlink_to(late)
    elif kind == "file":
        late.write_text("x")
    else:
        shutil.copytree(run.checkpoint(ranks.SECOND), late)
    checkpoint, rejected = latest_checkpoint(run, digests=True)
    assert checkpoint is not None
    assert checkpoint.step == ranks.SECOND
    assert [bad.path for bad in rejected] == [late]
