"""The mirror against a local S3 server, behind a proxy that loses connections and answers with the errors of
S3."""

from __future__ import annotations

import http.client
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

from fsdp_tune.cluster.mirror import writer as writing
from fsdp_tune.cluster.mirror.remote_run import RemoteRun, mirror_error
from fsdp_tune.cluster.mirror.send import follow
from fsdp_tune.cluster.mirror.sender import Sender
from fsdp_tune.cluster.mirror.writer import MirrorInUseError
from fsdp_tune.run import remote_files, remote_requests
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.remote_requests import ContentError, UrlError
from tests.cluster.mirrors import (
    Elsewhere,
    complete_and_verified,
    complete_steps,
    make_run,
    remote_checkpoint,
    save,
    send_all,
    state_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Fault = Callable[[str, str], "str | tuple[int, str] | None"]
"""From method and path: `cut` closes the connection half-way, `cut after` when the request has been done,
(status, code) is an error of S3, None passes the request on."""


class Proxy:
    def __init__(self, target: tuple[str, int]) -> None:
        self.fault: Fault = lambda method, path: None
        self.refuses_conditions = False
        """Whether `If-None-Match` is not implemented."""
        self.refused: list[str] = []
        self.requests: list[tuple[str, str]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                fault = proxy.fault(self.command, self.path)
                proxy.requests.append((self.command, self.path))
                if fault == "cut":
                    self.rfile.read(length // 2)
                    self.close_connection = True
                    self.connection.close()
                    return
                body = self.rfile.read(length)
                if isinstance(fault, tuple):
                    text = f"<Error><Code>{fault[1]}</Code><Message>{fault[1]}</Message></Error>".encode()
                    self._answer(
                        fault[0],
                        [("Content-Type", "application/xml")],
                        b"" if self.command == "HEAD" else text,
                    )
                    return
                if proxy.refuses_conditions and "If-None-Match" in self.headers:
                    proxy.refused.append(self.path)
                    text = (
                        b"<Error><Code>NotImplemented</Code><Message>A header is not "
                        b"implemented</Message></Error>"
                    )
                    self._answer(501, [("Content-Type", "application/xml")], text)
                    return
                connection = http.client.HTTPConnection(*target)
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                if fault == "cut after":
                    answer.read()
                    self.close_connection = True
                    self.connection.close()
                    return
                self._answer(answer.status, answer.getheaders(), answer.read())
                connection.close()

            def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
                self.send_response_only(status)
                is_head = self.command == "HEAD"
                for name, value in headers:
                    if name.lower() not in ("transfer-encoding", "connection") and (
                        is_head or name.lower() != "content-length"
                    ):
                        self.send_header(name, value)
                if not is_head:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def moto() -> Iterator[tuple[str, int]]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture
def proxy(moto: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(moto)
    variables = {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote_requests, "WAITS", (0.05, 0.05))
    S3FileSystem.clear_instance_cache()
    files = S3FileSystem()
    if files.exists("backup"):
        files.rm("backup", recursive=True)
    files.mkdir("backup")
    yield proxy
    S3FileSystem.clear_instance_cache()
    proxy.close()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


@pytest.fixture
def remote(proxy: Proxy) -> RemoteRun:
    return RemoteRun("s3://backup/runs", "run")


def every(number: int, fault: str | tuple[int, str]) -> Fault:
    """Return a fault of each `number`-th request, from the first."""
    count = -1

    def of(method: str, path: str) -> str | tuple[int, str] | None:
        nonlocal count
        count += 1
        return fault if count % number == 0 else None

    return of


def test_checkpoints_reach_s3_and_come_back(tmp_path: Path, remote: RemoteRun) -> None:
    remote.probe()
    assert remote.directory.list() == {}, "the probe leaves nothing"
    run = make_run(tmp_path / "run")
    for step in (1, 2, 3):
        save(run, step)
        if step > 1:
            shutil.rmtree(run.checkpoint(step - 1))
        assert send_all(run, remote, keep=2, start=step)
    assert complete_and_verified(remote, tmp_path / "check") == [3, 2]
    assert not [name for name in remote.directory.list() if name.startswith("checkpoint-1/")]


@pytest.mark.parametrize("fault", ["cut", (503, "SlowDown"), (500, "InternalError")], ids=str)
def test_lost_connections_and_throttling_are_repeated(
    tmp_path: Path, run: RunDir, remote: RemoteRun, proxy: Proxy, fault: str | tuple[int, str]
) -> None:
    save(run, 5)
    proxy.fault = every(4, fault)
    assert send_all(run, remote)
    assert complete_and_verified(remote, tmp_path / "check") == [5]


def test_half_an_upload_of_parts_leaves_no_file_and_is_sent_again(
    tmp_path: Path, remote: RemoteRun, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "PART_BYTES", 5 << 20)
    run = make_run(tmp_path / "run")
    save(run, 5, size=6000)  # 12 MiB a file: three parts
    proxy.fault = lambda method, path: "cut" if method == "PUT" and "partNumber=2" in path else None
    assert not send_all(run, remote)
    assert complete_steps(remote) == []
    assert not [name for name in remote.directory.list() if name.endswith(".distcp")]
    state = state_of(run)
    assert state.waiting == ["checkpoint-5"]
    assert state.left_bytes > 20 << 20
    assert state.error
    proxy.fault = lambda method, path: None
    assert send_all(run, remote)
    assert complete_and_verified(remote, tmp_path / "check") == [5]


@pytest.mark.parametrize("left_bytes", [None, 0, 1000])
def test_missing_or_short_object_is_damage_and_is_not_waited_for(
    tmp_path: Path, remote: RemoteRun, left_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, name = make_run(tmp_path / "run"), "checkpoint-5/shards/__1_0.distcp"
    save(run, 5, size=9000)  # two ranges
    assert send_all(run, remote)
    remote.directory.remove(name)
    if left_bytes is not None:
        remote.directory.write(name, bytes(left_bytes))
    found = remote_checkpoint(remote, 5)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waited"))
    entry = found.manifest.files[name.partition("/")[2]]
    with pytest.raises(ContentError, match="is missing" if left_bytes is None else "is shorter"):
        remote.directory.fetch(name, tmp_path / "file", entry, lambda _: None)
    remote.directory.write(name, b"x")
    with pytest.raises(ContentError, match="is shorter"):
        remote.directory._read_range(name, 5, 9)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ((403, "InvalidAccessKeyId"), "mirror-refused"),
        ((403, "AccessDenied"), "mirror-refused"),
        ((403, "RequestTimeTooSkewed"), "mirror-clock"),
        ((404, "NoSuchBucket"), "mirror-missing"),
        ("cut", "mirror-unreachable"),
    ],
    ids=str,
)
def test_store_that_cannot_be_used_is_named_at_the_start(
    remote: RemoteRun, proxy: Proxy, answer: str | tuple[int, str], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.fault = lambda method, path: answer
    with pytest.raises(UrlError) as caught:
        remote.probe()
    error = mirror_error(remote.url, caught.value)
    assert error.problems[0].code == code
    assert error.problems[0].hint
    assert error.exit_code == 2


def test_bucket_that_vanishes_is_reported_and_filled_again(
    tmp_path: Path, sent: RunDir, remote: RemoteRun
) -> None:
    S3FileSystem().rm("backup", recursive=True)
    save(sent, 10)
    assert not send_all(sent, remote, start=5)
    state = state_of(sent)
    assert "exist" in (state.error or "")
    S3FileSystem().mkdir("backup")
    assert send_all(sent, remote, start=5)
    assert complete_and_verified(remote, tmp_path / "check") == [10, 5]


def test_clock_that_is_off_for_a_while_delays_the_mirror(
    tmp_path: Path, run: RunDir, remote: RemoteRun, proxy: Proxy
) -> None:
    save(run, 5)
    proxy.fault = lambda method, path: (403, "RequestTimeTooSkewed")
    sender, waits = Sender(run, remote), list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            proxy.fault = lambda method, path: None

    assert follow(sender, lambda: len(waits) > 3, 0, wait)
    assert waits[:3] == [5.0, 15.0, 30.0]
    assert complete_and_verified(remote, tmp_path / "check") == [5]


def test_of_several_commands_one_claims_a_bucket(remote: RemoteRun) -> None:
    writers, owned, barrier = (
        [Elsewhere(remote.directory, f"node{each}") for each in range(4)],
        list[Elsewhere](),
        threading.Barrier(4),
    )

    def claim(writer: Elsewhere) -> None:
        barrier.wait()
        with suppress(MirrorInUseError):
            writer.claim()
            owned.append(writer)

    threads = [threading.Thread(target=claim, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = owned
    winner.check()
    winner.release()
    assert Elsewhere(remote.directory).claim() is None, "it was given back"


def test_claim_whose_answer_was_lost_is_recognised(remote: RemoteRun, proxy: Proxy) -> None:
    is_cut = False

    def cut_once(method: str, path: str) -> str | None:
        nonlocal is_cut
        if method == "PUT" and "writers" in path and not is_cut:
            is_cut = True
            return "cut after"
        return None

    proxy.fault = cut_once
    writer = Elsewhere(remote.directory)
    assert writer.claim() is None
    assert is_cut
    writer.check()
    writer.release()


def test_store_without_conditional_writes_is_claimed_and_checked(
    remote: RemoteRun, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SETTLE_SECONDS", 0.0)
    proxy.refuses_conditions = True
    first = Elsewhere(remote.directory)
    assert first.claim() is None
    assert proxy.refused, "the condition was sent"
    with pytest.raises(MirrorInUseError):
        Elsewhere(remote.directory, "node8").claim()
    first.release()


def test_silent_command_is_taken_over_by_the_clock_of_the_store(
    remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SILENCE_SECONDS", 2.0)
    first, second = Elsewhere(remote.directory), Elsewhere(remote.directory, "node8")
    first.claim()
    first.dies()
    time.sleep(4)  # S3 dates files to the second
    monkeypatch.setattr(time, "time", lambda: 0.0)  # the clock of this machine is of no account
    assert second.claim() is not None
    with pytest.raises(UrlError, match="taken it over"):
        first.check()
    second.release()
