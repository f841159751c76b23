"""`scripts/release` refuses what must not be published: facts that disagree, and builds with missing, large
or foreign files."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.structure.sources import ROOT


@pytest.fixture(scope="module")
def release() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("release_script", str(ROOT / "scripts" / "release"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def git(folder: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words],
        cwd=folder,
        check=True,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose version 0.3.0 can be released."""
    folder = tmp_path_factory.mktemp("repository")
    files = {
        "fsdp_tune/core/version.py": '__version__ = "0.3.0"\n',
        "CHANGELOG.md": "# Changelog\n\n## 0.3.0 (2027-01-02)\n\n## 0.2.0 (2026-11-29)\n",
        "CITATION.cff": 'version: 0.3.0\ndate-released: "2027-01-02"\n',
        "pyproject.toml": '[project.urls]\nHomepage = "https://github.com/someone/fsdp-tune"\n',
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    git(folder, "tag", "v0.3.0")
    return folder


def test_release_whose_facts_agree_is_not_refused(release: ModuleType, tagged: Path) -> None:
    assert release.version_of(tagged) == "0.3.0"
    assert list(release.problems_of(tagged, "0.3.0")) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        (
            "CHANGELOG.md",
            "# Changelog\n",
            "# Changelog\n\n## Unreleased\n",
            "CHANGELOG.md starts with `## Unreleased`",
        ),
        ("CHANGELOG.md", "## 0.3.0 (2027-01-02)", "## 0.3.0", "write `## 0.3.0 (YYYY-MM-DD)`"),
        (
            "CHANGELOG.md",
            "2027-01-02",
            "2027-01-03",
            "CITATION.cff was released on 2027-01-02, and CHANGELOG.md says 2027-01-03",
        ),
        ("CITATION.cff", "0.3.0", "0.2.0", "CITATION.cff has version 0.2.0"),
        ("pyproject.toml", "github.com/someone/", "fsdp-tune.example/", "Homepage have the reserved host"),
    ],
)
def test_facts_that_disagree_are_named(
    release: ModuleType, tagged: Path, name: str, old: str, new: str, expected: str
) -> None:
    text = (tagged / name).read_text()
    (tagged / name).write_text(text.replace(old, new))
    try:
        found = list(release.problems_of(tagged, "0.3.0"))
    finally:
        (tagged / name).write_text(text)
    assert any(expected in each for each in found)
    assert any(each == f"the tree has 1 changed or untracked files: {name}" for each in found)
    assert len(found) == 2


def test_commit_without_the_tag_of_its_version_is_refused(release: ModuleType, tagged: Path) -> None:
    (found,) = [each for each in release.problems_of(tagged, "0.4.0") if "tag" in each]
    assert "`git tag -a v0.4.0" in found


def files_of_a_build(folder: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    info = "fsdp_tune-0.3.0.dist-info"
    package = (
        "fsdp_tune/py.typed",
        "fsdp_tune/configs/gpt2_smoke.yaml",
        "fsdp_tune/docs/errors.md",
        f"{info}/licenses/LICENSE",
    )
    wheel = dict.fromkeys(package, b"") | {f"{info}/METADATA": b"Name: fsdp-tune\nVersion: 0.3.0\n\n"}
    return wheel, dict.fromkeys(
        ("LICENSE", "CHANGELOG.md", "pyproject.toml", "fsdp_tune/py.typed", "PKG-INFO"), b""
    )


def problems(
    release: ModuleType, folder: Path, wheel: dict[str, bytes], sdist: dict[str, bytes]
) -> Iterator[str]:
    with zipfile.ZipFile(folder / "wheel", "w") as archive:
        for name, content in wheel.items():
            archive.writestr(name, content)
    with tarfile.open(folder / "sdist", "w:gz") as archive:
        for name, content in sdist.items():
            member = tarfile.TarInfo(f"fsdp_tune-0.3.0/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    tracked = ["LICENSE", "CHANGELOG.md", "pyproject.toml", "fsdp_tune/py.typed", "tests/large.bin"]
    return release.problems_in(folder / "wheel", folder / "sdist", "0.3.0", tracked)


def test_complete_build_is_not_refused(release: ModuleType, tmp_path: Path) -> None:
    assert list(problems(release, tmp_path, *files_of_a_build(tmp_path))) == []


@pytest.mark.parametrize(
    "name",
    ["fsdp_tune/py.typed", "fsdp_tune/configs/gpt2_smoke.yaml", "fsdp_tune-0.3.0.dist-info/licenses/LICENSE"],
)
def test_wheel_without_a_file_is_refused(release: ModuleType, tmp_path: Path, name: str) -> None:
    wheel, sdist = files_of_a_build(tmp_path)
    del wheel[name]
    assert list(problems(release, tmp_path, wheel, sdist)) == [f"the wheel lacks {name}"]


def test_files_that_are_foreign_or_large_are_refused(release: ModuleType, tmp_path: Path) -> None:
    wheel, sdist = files_of_a_build(tmp_path)
    wheel["tests/test_one.py"] = b""
    sdist |= {"runs/model.bin": b"", "tests/large.bin": b"0" * 1_000_001}
    del sdist["LICENSE"]
    assert list(problems(release, tmp_path, wheel, sdist)) == [
        "the wheel has tests/test_one.py",
        "the sdist lacks LICENSE",
        "the sdist has runs/model.bin, which git does not track",
        "tests/large.bin has 1,000,001 bytes",
    ]


def test_suites_of_a_release_exist(release: ModuleType) -> None:
    for suite in release.SUITES:
        files = [word for word in suite if word.startswith(("scripts/", "tests/"))]
        assert [name for name in files if not (ROOT / name).exists()] == []
        assert files
