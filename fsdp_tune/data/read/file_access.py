"""Open the files that a source names: local files with their digests, files at URLs, and the data set of the
package.

A file at a URL is read in blocks, which grow the longer it is read in sequence; a request that fails is
repeated after a wait. HTTP uses `urllib`. Other protocols are file systems of `fsspec`, most of which need a
package, such as s3fs for s3.

Digests of local files are stored, so that an unchanged file is not read again at each start. A digest is
reused while the file has the size, modification time, status change time and inode that it had when it was
hashed. Programs that write a file and then restore its modification time (rsync, tar) cannot restore the
status change time.

`builtin:arithmetic` is a data set of sums in words with its tokenizer, generated without a download:
`thirty seven plus four is` → ` forty one`, a number below a hundred plus a number below ten. A tenth of the
thousand sums is held out: the splits `train` and `test` share no question, so exact match on `test` measures
addition and not memorisation.
"""

from __future__ import annotations

import io
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from fsdp_tune.core.atomic import DISK, write_json
from fsdp_tune.core.errors import Where, usage_error
from fsdp_tune.core.library_errors import first_line
from fsdp_tune.run.manifest import digest, digest_file, digest_number
from fsdp_tune.run.remote_files import PACKAGES, STAMP_KEYS
from fsdp_tune.run.remote_requests import UrlError, retried

if TYPE_CHECKING:
    from tokenizers import Tokenizer


PROTOCOLS = ("http", "https", "s3", "gs", "gcs", "az", "abfs", "abfss", "hf")
"""Others are refused: chains such as `filecache::` or `zip://` write to this disk or open further files."""
FIRST_BLOCK, LARGEST_BLOCK = 256 << 10, 8 << 20
TIMEOUT_SECONDS = 60.0

_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*)(://|::)", re.IGNORECASE)
_PINNED = re.compile(r"hf://[^@]+@[0-9a-f]{40}/")


@dataclass(frozen=True, slots=True)
class RemoteInfo:
    size: int
    stamp: str
    """Changes when the file is written; empty if the server returns nothing that does."""


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


def url_path(url: str) -> PurePosixPath:
    """Return the path of a URL without query."""
    return PurePosixPath(urllib.parse.urlsplit(url).path)


def check_protocol(url: str, where: Where) -> None:
    """Raises: usage error (exit 2) if rows are not read by the protocol of `url`, or if it needs a
    package."""
    match = _URL.match(url)
    protocol = match["protocol"].lower() if match else ""
    if protocol not in PROTOCOLS or "::" in url:
        name = f"{protocol}::" if match and match[2] == "::" else f"{protocol}://"
        hint = f"protocols are: {', '.join(PROTOCOLS)}; a local file is given by its path"
        raise usage_error(
            "data-unreadable",
            f"`{url}`: files are not read by `{name}` or by chained protocols",
            where=where,
            hint=hint,
        )
    try:
        _file_system(url)
    except ImportError as error:
        package = PACKAGES.get(protocol, "fsspec")
        raise usage_error(
            "data-unreadable", f"`{url}`: {first_line(error)}", where=where, hint=f"`pip install {package}`"
        ) from error


def find_urls(pattern: str) -> list[str]:
    """Return the files at a URL, which may be a glob or a directory unless it is http. Raises: UrlError."""
    if pattern.startswith(("http://", "https://")):
        return [pattern]
    files, path = _file_system(pattern)

    def find() -> list[str]:
        found = files.glob(path) if any(character in path for character in "*?[") else files.find(path)
        return sorted(str(files.unstrip_protocol(name)) for name in found)

    return retried(find)


def remote_info(url: str, *, fresh: bool = False) -> RemoteInfo:
    """Return size and stamp of a file; `fresh` ignores cached listings. Raises: UrlError."""
    if url.startswith(("http://", "https://")):
        return retried(lambda: _http_range(url, 0, 1)[1])
    files, path = _file_system(url)
    if fresh and not _PINNED.match(url):
        files.invalidate_cache()
    info = retried(lambda: files.info(path))
    return RemoteInfo(int(info["size"]), next((str(info[key]) for key in STAMP_KEYS if info.get(key)), ""))


class RemoteFile(io.RawIOBase):
    """A file at a URL, opened for reading."""

    def __init__(self, url: str) -> None:
        self._url, self._size = url, remote_info(url).size
        self._at, self._start = 0, 0
        self._block: bytes = b""
        self._length = FIRST_BLOCK

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = self._start + len(self._block)
        if not self._start <= self._at < end:
            if self._at >= self._size:
                return 0
            self._length = min(2 * self._length, LARGEST_BLOCK) if self._at == end else FIRST_BLOCK
            self._start, self._block = (
                self._at,
                self._fetch(self._at, min(self._at + max(self._length, len(buffer)), self._size)),
            )
        part = self._block[self._at - self._start :][: len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _fetch(self, start: int, end: int) -> bytes:
        def fetch() -> bytes:
            if self._url.startswith(("http://", "https://")):
                data: bytes = _http_range(self._url, start, end)[0]
            else:
                files, path = _file_system(self._url)
                options = {"cache_type": "none"} if self._url.startswith("hf://") else {}
                data = files.cat_file(path, start=start, end=end, **options)
            if len(data) != end - start:
                raise UrlError(f"{len(data)} of {end - start} bytes from byte {start} were received")
            return data

        return retried(fetch)


def _file_system(url: str) -> tuple[Any, str]:
    if url.startswith(("http://", "https://")):
        return None, url
    return import_module("fsspec.core").url_to_fs(url)


def _http_range(url: str, start: int, end: int) -> tuple[bytes, RemoteInfo]:
    """Return the bytes from `start` to `end`, with size and stamp of the file."""
    request = urllib.request.Request(
        url, headers={"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            status, headers = response.status, response.headers
            data = response.read() if status == 206 else b""
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 416 or not (error.headers.get("Content-Range") or "").endswith("/0"):
            raise
        return b"", RemoteInfo(0, _http_stamp(error.headers))  # a file without bytes has no range
    total = (headers.get("Content-Range") or "").rpartition("/")[2]
    if status != 206 or not total.isdigit():
        raise PermissionError("the server does not return ranges of bytes; download the file")
    return data, RemoteInfo(int(total), _http_stamp(headers))


def _http_stamp(headers: Any) -> str:
    return str(headers.get("ETag") or headers.get("Last-Modified") or "")


DIGESTS = "digests"
"""Folder below `data.cache_dir`: one JSON file for each directory that holds source files."""
SETTLED_SECONDS = 2.0
"""Resolution of file times. A file that changed less than this before it was hashed could change again
without a new time."""

Stamp = tuple[int, int, int, int]


def stamp(path: Path) -> Stamp:
    """Size in bytes, modification time and status change time in nanoseconds, inode: changes whenever the
    file is written to."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


class FileDigests:
    """Digests of files, from stored records where a file is unchanged. `verify` hashes every file."""

    def __init__(self, cache_dir: Path, *, verify: bool = False) -> None:
        self._folder = cache_dir / DIGESTS
        self._verify = verify

    def __call__(self, paths: Sequence[Path]) -> list[str]:
        by_directory: dict[Path, list[Path]] = {}
        for path in paths:
            by_directory.setdefault(path.absolute().parent, []).append(path)
        found: dict[Path, str] = {}
        for directory, files in by_directory.items():
            found |= self._of_directory(directory, files)
        return [found[path] for path in paths]

    def _of_directory(self, directory: Path, paths: list[Path]) -> dict[Path, str]:
        record = self._folder / f"{digest(str(directory), size=16)}.json"
        remembered = _read(record)
        found: dict[Path, str] = {}
        changed = False
        for path in paths:
            known = remembered.get(path.name)
            before, started = stamp(path), time.time()
            if not self._verify and known is not None and known[:4] == list(before):
                found[path] = str(known[4])
                continue
            found[path] = digest_file(path).digest
            settled = max(before[1], before[2]) < (started - SETTLED_SECONDS) * 1e9
            entry = [*before, found[path]]
            if settled and stamp(path) == before and known != entry:
                remembered[path.name] = entry
                changed = True
        if changed:
            _remember(record, {"directory": str(directory), "files": remembered})
        return found


def _read(record: Path) -> dict[str, list[Any]]:
    """Return entries by file name: the four numbers of a stamp, and the digest. Unreadable records are
    ignored."""
    try:
        files = json.loads(record.read_bytes())["files"]
        return {
            str(name): entry for name, entry in files.items() if len(entry) == 5 and isinstance(entry[4], str)
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _remember(record: Path, content: dict[str, object]) -> None:
    """Store a record. Best effort: if the cache cannot be written (full, read-only), the next start hashes
    the files again."""
    try:
        DISK.mkdir(record.parent)
        write_json(record, content)
    except OSError:
        pass


PREFIX = "builtin:"
NAMES = ("arithmetic",)
SPLITS = ("train", "test")
HIGHEST_LEFT, HIGHEST_RIGHT = 99, 9
HELD_OUT_SHARE = 0.1

EOS, PAD, TURN_END = "<|endoftext|>", "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token if "
    "message['role'] == 'assistant' else '<|end|>' }}{% endfor %}{% if add_generation_prompt "
    "%}<|assistant|>{% endif %}"
)
MODEL_MAX_LENGTH = 1 << 20

# fmt: off
_UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# fmt: on
_OTHER_WORDS = ("hundred", "plus", "is")


def is_builtin(name: str) -> bool:
    return name.startswith(PREFIX)


def builtin_name(path: str) -> str:
    """Return `arithmetic` for `builtin:arithmetic`. Raises: usage error (exit 2) for a name that the package
    does not have."""
    name = path.removeprefix(PREFIX)
    if name not in NAMES:
        raise usage_error(
            "unknown-builtin",
            f"there is no `{path}`",
            hint=f"the package has: {', '.join(PREFIX + known for known in NAMES)}",
        )
    return name


def spelled_out(number: int) -> str:
    """Spell a number from 0 to 199 in English words."""
    if number < len(_UNITS):
        return _UNITS[number]
    if number >= 100:
        rest = number - 100
        return "one hundred" + (f" {spelled_out(rest)}" if rest else "")
    tens, units = divmod(number, 10)
    return _TENS[tens - 2] + (f" {_UNITS[units]}" if units else "")


def builtin_rows(path: str, split: str) -> list[dict[str, object]]:
    """Return the rows of a split, with `prompt` and `completion`; always the same rows in the same order."""
    builtin_name(path)
    if split not in SPLITS:
        raise usage_error(
            "no-such-split", f"`{path}` has no split `{split}`", hint=f"its splits are: {', '.join(SPLITS)}"
        )
    held_out = split == "test"
    return [
        {"prompt": prompt, "completion": answer}
        for prompt, answer in _questions()
        if _is_held_out(prompt) == held_out
    ]


def held_out_prompts(count: int | None = None) -> list[tuple[str, str]]:
    """Return the first `count` (prompt, answer) pairs that are in no training row, in a hashed order; an
    answer starts with a space."""
    pairs = sorted(
        (pair for pair in _questions() if _is_held_out(pair[0])), key=lambda pair: digest_number(pair[0])
    )
    return pairs[:count]


def _questions() -> Iterator[tuple[str, str]]:
    for left in range(HIGHEST_LEFT + 1):
        for right in range(HIGHEST_RIGHT + 1):
            yield f"{spelled_out(left)} plus {spelled_out(right)} is", f" {spelled_out(left + right)}"


def _is_held_out(prompt: str) -> bool:
    return digest_number(prompt) < HELD_OUT_SHARE * 2**64


def builtin_tokenizer(path: str) -> Tokenizer:
    """Return a byte-level BPE tokenizer: each word of the task is one token, other text is encoded as bytes,
    so all text round-trips."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    builtin_name(path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*_UNITS, *_TENS, *_OTHER_WORDS]
    pieces = [*letters, *words, *(f"Ġ{word}" for word in words)]  # Ġ is how byte-level BPE writes a space
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    # a full word is looked up first, then its bytes
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in (EOS, PAD, TURN_END, *(f"<|{role}|>" for role in ROLES)):
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])  # pyright: ignore[reportUnknownMemberType]
    return tokenizer
