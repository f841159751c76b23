"""Digests of texts and files, and the manifest that completes a directory: written last, it lists every file
with its size and digest."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import xxhash

from fsdp_tune.core.atomic import DISK, write_json
from fsdp_tune.core.files import UnsuitableFileError, is_inside, open_regular, read_regular


def digest(*parts: str | bytes, size: int = 8) -> str:
    """Return `2 * size` hexadecimal digits that identify `parts`, in any process and version: names of caches
    contain them."""
    content = b"\0".join(
        part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in parts
    )
    return hashlib.blake2b(content, digest_size=size).hexdigest()


def digest_number(*parts: str | bytes, size: int = 8) -> int:
    """Return the digest as an integer below 256 ** `size`."""
    return int(digest(*parts, size=size), 16)


MANIFEST_NAME = "manifest.json"
DAMAGE_NAME = "damage.json"
"""Next to a manifest: the files whose contents were found to differ from it, so that they need not be read
again."""
FORMAT_VERSION = 2
DIGEST_CHUNK_BYTES = 1 << 22
Progress = Callable[[int], object]
_SHOWN_LETTERS = 200


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and XXH3-128 digest (hexadecimal) of one file.

    The digest detects damage, not forgery: a process that can write the files can write the manifest too. It
    runs at memory speed, where a cryptographic hash would take longer than the disk.
    """

    size_bytes: int
    digest: str


MACHINES_FACT = "machines"


@dataclass(frozen=True, slots=True)
class MachineFiles:
    """A machine that has a part of a directory (`launch.shared_directory: false`)."""

    host: str
    directory: str
    """The run directory there."""
    files: list[str]
    """Names of the files that it wrote. Several machines may have written the same small file."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """`files` maps POSIX paths relative to the directory. `facts` holds step, world size, mesh, versions …

    The file also holds a digest of itself, so that a flipped digit of the step or the world size is detected.
    """

    kind: str
    files: dict[str, FileEntry]
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    format_version: int = FORMAT_VERSION

    @property
    def size_bytes(self) -> int:
        """Total size of all files without the manifest."""
        return sum(entry.size_bytes for entry in self.files.values())

    @property
    def identity(self) -> str:
        """Digest of all that the manifest has: copies of one checkpoint have the same."""
        return digest_of_values(asdict(self))

    @property
    def machines(self) -> list[MachineFiles]:
        """The machines that wrote parts of the directory, each into its own; [] if one directory was
        written."""
        return [
            MachineFiles(str(raw["host"]), str(raw["directory"]), list(raw["files"]))
            for raw in self.facts.get(MACHINES_FACT, [])
        ]

    def absence(self, names: Collection[str]) -> str:
        """Describe files of other machines that are not in the directory."""
        owners = [each for each in self.machines if not set(names).isdisjoint(each.files)]
        where = " and ".join(f"{each.host}:{each.directory}" for each in owners) or "another machine"
        are, them = ("are", "them") if len(names) > 1 else ("is", "it")
        return f"{len(names)} of its {len(self.files)} files {are} not here; {where} had {them}"

    def to_json(self) -> str:
        fields = asdict(self)
        return json.dumps({**fields, "digest": digest_of_values(fields)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Parse a manifest. Raises: ValueError if it is damaged or of another version."""
        try:
            raw = json.loads(text)
            if raw["format_version"] != FORMAT_VERSION:
                raise ValueError(
                    f"manifest of format {raw['format_version']}, this version reads {FORMAT_VERSION}"
                )
            if raw.pop("digest") != digest_of_values(raw):
                raise ValueError("the manifest itself is damaged (digest differs)")
            files = {
                str(name): FileEntry(int(entry["size_bytes"]), str(entry["digest"]))
                for name, entry in raw["files"].items()
            }
            return cls(str(raw["kind"]), files, dict(raw["facts"]))
        except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"not a manifest: {error!r}") from error


def digest_of_values(values: Mapping[str, object]) -> str:
    """Return the XXH3-128 of a JSON object with text keys, independent of the layout of its file."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(canonical.encode()).hexdigest()


class Digester:
    """Incremental digest and size of a stream of bytes."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.size_bytes = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._hash.update(data)
        self.size_bytes += len(data)

    def entry(self) -> FileEntry:
        return FileEntry(self.size_bytes, self._hash.hexdigest())


def digest_data(data: bytes) -> FileEntry:
    """Return the entry of a file with these contents."""
    digester = Digester()
    digester.update(data)
    return digester.entry()


def digest_file(path: Path, progress: Progress | None = None) -> FileEntry:
    """Hash a file. `progress` is called with the number of bytes as they are hashed."""
    digester = Digester()
    with open_regular(path) as file:
        while chunk := file.read(DIGEST_CHUNK_BYTES):
            digester.update(chunk)
            if progress is not None:
                progress(len(chunk))
    return digester.entry()


def list_files(root: Path) -> list[str]:
    """Return the sorted POSIX paths of the regular files under `root`, without the manifest and the record of
    damage."""
    return sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.is_file() and path.name not in (MANIFEST_NAME, DAMAGE_NAME)
    )


def read_manifest(root: Path) -> Manifest | None:
    """Return the manifest of a directory, or None if it has none and is thus incomplete. Raises: ValueError
    if it is damaged."""
    try:
        return Manifest.from_json(read_regular(root / MANIFEST_NAME))
    except FileNotFoundError:
        return None
    except UnsuitableFileError as error:
        raise ValueError(f"{MANIFEST_NAME} {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Damage:
    """One file that differs from its entry in the manifest."""

    name: str
    what: str
    is_of_contents: bool = False
    """Found by reading the file, not by its size."""
    is_absent: bool = False
    """There is no such file."""

    def __str__(self) -> str:
        return f"{self.name[:_SHOWN_LETTERS]}: {self.what}"


def damage(
    root: Path, manifest: Manifest, *, digests: bool, progress: Progress | None = None
) -> list[Damage]:
    """Return one entry per file that is missing or differs in size or contents; [] for a complete directory.

    Contents are read only with `digests`. Without, the record of `mark_damaged` applies to files that have
    not changed since.
    """
    marked = {} if digests else _marked(root)
    found = (
        _damage_of(root, name, entry, marked, digests=digests, progress=progress)
        for name, entry in sorted(manifest.files.items())
    )
    return [each for each in found if each is not None]


def _damage_of(
    root: Path,
    name: str,
    entry: FileEntry,
    marked: dict[str, list[int]],
    *,
    digests: bool,
    progress: Progress | None,
) -> Damage | None:
    path = root / name
    try:
        if not is_inside(name) or _passes_a_link(root, path):
            return Damage(name, "leads out of the directory")
        if not path.is_file():
            return Damage(name, "missing", is_absent=True)
        if (size_bytes := path.stat().st_size) != entry.size_bytes:
            return Damage(name, f"{size_bytes} bytes instead of {entry.size_bytes}")
        if marked.get(name) == _identity(path) or (digests and digest_file(path, progress) != entry):
            return Damage(
                name, "its contents are not those that were written (digest differs)", is_of_contents=True
            )
    except OSError as error:  # a bad sector, a name that no file system takes
        return Damage(name, f"cannot be read ({error.strerror})")
    return None


def mark_damaged(root: Path, names: Collection[str]) -> None:
    """Record the files whose contents differ, or remove the record if there are none. Replacing a file
    invalidates its record.

    Does nothing if the directory cannot be written, since the record only saves reading.
    """
    with contextlib.suppress(OSError):
        if names:
            write_json(root / DAMAGE_NAME, {name: _identity(root / name) for name in names})
        elif (root / DAMAGE_NAME).exists():
            DISK.unlink(root / DAMAGE_NAME)


def _marked(root: Path) -> dict[str, list[int]]:
    try:
        raw: object = json.loads(read_regular(root / DAMAGE_NAME))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast(dict[str, list[int]], raw) if isinstance(raw, dict) else {}


def _identity(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def _passes_a_link(root: Path, path: Path) -> bool:
    """Return whether the file, or a directory between `root` and it, is a link."""
    while path != root:
        if path.is_symlink():
            return True
        path = path.parent
    return False
