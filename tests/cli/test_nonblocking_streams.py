"""A reader that takes nothing delays nothing; what it misses is counted."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator

import pytest

from fsdp_tune.cli.nonblocking_streams import Outlet, OutletStream, write_all

LINE = b"step 1: loss 2.5\n"


class Reader:
    """Takes what it is given while its gate is open."""

    def __init__(self) -> None:
        self.gate, self.taken = threading.Event(), b""
        self.failures: list[OSError] = []
        self.error: OSError | None = None

    def write(self, data: bytes) -> None:
        self.gate.wait()
        if self.error is not None:
            raise self.error
        self.taken += data


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.gate.set()


def test_lines_arrive_in_order(reader: Reader) -> None:
    outlet = Outlet(reader.write, reader.failures.append)
    reader.gate.set()
    lines = [b"%d\n" % number for number in range(1000)]
    for line in lines:
        outlet.put(line)
    assert outlet.close()
    assert reader.taken == b"".join(lines)


def test_reader_that_takes_nothing_delays_nothing_and_learns_what_it_missed(reader: Reader) -> None:
    outlet = Outlet(reader.write, reader.failures.append, limit_bytes=10 * len(LINE))
    began = time.monotonic()
    for _ in range(5000):
        outlet.put(LINE)
    assert time.monotonic() - began < 2.0
    reader.gate.set()
    assert outlet.close()
    kept = reader.taken.count(LINE)
    assert kept < 20
    assert f"({5000 - kept:,} lines were left out: nobody took them)\n".encode() in reader.taken


def test_close_gives_up_on_a_reader_that_takes_nothing(reader: Reader) -> None:
    outlet = Outlet(reader.write, reader.failures.append)
    outlet.put(LINE)
    assert not outlet.close(seconds=0.2)


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ESTALE, errno.EPIPE, errno.EIO]
)
def test_failure_is_reported_once_and_ends_the_outlet(reader: Reader, number: int) -> None:
    outlet = Outlet(reader.write, reader.failures.append)
    reader.error = OSError(number, os.strerror(number))
    outlet.put(LINE)
    outlet.put(LINE)
    reader.gate.set()
    assert outlet.close()
    outlet.put(LINE)
    assert outlet.close()
    assert [failure.errno for failure in reader.failures] == [number]


def test_stream_over_a_full_pipe_takes_lines_and_its_reader_gets_them_later() -> None:
    out, into = os.pipe()
    text = "first\n" + "é" * 100_000 + "\n"
    with open(into, "w", encoding="utf-8") as plain:
        stream = OutletStream(plain, lambda error: None)
        stream.write(text)
        assert (stream.isatty(), stream.fileno(), stream.encoding) == (False, into, "utf-8")
        assert not stream.drain(seconds=0.2)
        read = b""
        while len(read) < len(text.encode()):
            read += os.read(out, 1 << 16)
        assert read.decode() == text
    os.close(out)


def test_descriptor_that_another_program_made_non_blocking_gets_everything() -> None:
    out, into = os.pipe()
    os.set_blocking(into, False)
    data = os.urandom(300_000)
    writer = threading.Thread(target=write_all, args=(into, data))
    writer.start()
    time.sleep(0.1)
    read = b""
    while len(read) < len(data):
        read += os.read(out, 1 << 16)
    writer.join()
    assert read == data
    os.close(out)
    os.close(into)
