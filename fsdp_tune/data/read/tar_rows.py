"""Read rows of a tar archive as the webdataset library writes it: members with one base name are a row,
counted from 1.

A `.json` member holds the fields of the row, a `.txt` member its `text`. Other members are columns named
by their ending (`.jpg`), which no format reads; none is ever unpickled.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from itertools import groupby, islice
from typing import IO

from fsdp_tune.data.read.row_files import BadRow, NumberedRow, Part, json_row

Member = tuple[str, str, bytes | None]
"""Base name, ending without the dot, and content; None for an ending that is not read."""


def tar_rows(file: IO[bytes], part: Part, max_bytes: int) -> Iterator[NumberedRow | BadRow]:
    """Yield the rows of an open archive; a member of more than `max_bytes` is a bad row."""
    with tarfile.open(fileobj=file, mode="r|") as archive:
        samples = enumerate(
            (
                list(members)
                for _, members in groupby(_members(archive, max_bytes), key=lambda member: member[0])
            ),
            1,
        )
        for number, members in islice(samples, part.first, None, part.step):
            yield _row(number, members, max_bytes)


def _members(archive: tarfile.TarFile, max_bytes: int) -> Iterator[Member]:
    """Yield the files of an archive in their order; only those that hold rows are read. An ending begins at
    the first dot of a name."""
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]  it would grow by an entry for each member
        folder, slash, file_name = member.name.rpartition("/")
        name, _, ending = file_name.partition(".")
        if not member.isfile() or not name:
            continue
        content = archive.extractfile(member) if ending in ("json", "txt") else None
        yield folder + slash + name, ending, None if content is None else content.read(max_bytes + 1)
    # tarfile ends without an error where a file is cut off between two members; a complete archive ends with
    # a block of zeros.
    if archive.fileobj.tell() <= archive.offset:  # type: ignore[attr-defined,union-attr]
        raise tarfile.ReadError("it has no end mark")


def _row(number: int, members: list[Member], max_bytes: int) -> NumberedRow | BadRow:
    """Return the row of members with one base name."""
    name = members[0][0]
    contents = {ending: content for _, ending, content in members if content is not None}
    if not contents:
        endings = ", ".join(sorted({f".{ending}" for _, ending, _ in members}))
        return BadRow(number, f"`{name}` has no `.json` or `.txt` member; it has {endings}")
    texts: dict[str, str] = {}
    for ending, content in contents.items():
        if len(content) > max_bytes:
            return BadRow(number, f"`{name}.{ending}` is longer than {max_bytes >> 20} MiB")
        try:
            texts[ending] = content.decode("utf-8")
        except UnicodeDecodeError as error:
            return BadRow(number, f"`{name}.{ending}` is not UTF-8: byte 0x{content[error.start]:02x}")
    others = {f".{ending}": f"{name}.{ending}" for _, ending, content in members if content is None}
    if "json" not in texts:
        return number, {"text": texts["txt"], **others}
    row = json_row(number, texts["json"])
    if isinstance(row, BadRow):
        return BadRow(number, f"`{name}.json`: {row.reason}")
    if "txt" in texts and "text" in row[1]:
        return BadRow(number, f"`{name}` has a `.txt` member, and `text` in its `.json` member")
    return number, {**row[1], **({"text": texts["txt"]} if "txt" in texts else {}), **others}
