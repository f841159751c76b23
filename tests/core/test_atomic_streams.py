"""Files that a user names may be devices, pipes and descriptors: they are written to, and never replaced."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fsdp_tune.core.atomic import check_output_file, write_file

WRITES = """
import sys
from pathlib import Path
from fsdp_tune.core.atomic import check_output_file, write_file
check_output_file(Path(sys.argv[1]))
write_file(Path(sys.argv[1]), "written", private=True)
"""


def test_pipe_gets_the_content_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    check_output_file(pipe)
    write_file(pipe, "written")
    reader.join(10)
    assert read == [b"written"]
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a device")
def test_device_of_root_is_not_replaced(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
        device.write_bytes(b"")
    except OSError:
        pytest.skip("this container makes or opens no devices")
    write_file(device, "written")
    (tmp_path / "link").symlink_to(device)
    write_file(tmp_path / "link", "written")
    assert device.is_char_device()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "null"]


@pytest.mark.parametrize("kind", ["pipe", "file"])
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_may_be_named(tmp_path: Path, name: str, kind: str) -> None:
    before = os.lstat("/dev/stdout")
    with open(tmp_path / "out", "wb") as out:
        command = [sys.executable, "-c", WRITES, name]
        done = subprocess.run(
            command,
            stdout=out if kind == "file" else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert (done.stdout if kind == "pipe" else (tmp_path / "out").read_text()) == "written"
    after = os.lstat("/dev/stdout")
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)


def test_link_to_a_file_is_replaced_as_before(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    write_file(tmp_path / "link", "written")
    assert ((tmp_path / "theirs").read_text(), (tmp_path / "link").read_text()) == ("kept", "written")
