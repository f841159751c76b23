"""A page that is served on this machine while runs train: each request gets the page as it is now, and its script fetches it again."""

from __future__ import annotations

import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import cast

from fsdp_tune.core.errors import FsdpTuneError, usage_error

ADDRESS = "127.0.0.1"
HOST_NAMES = ("127.0.0.1", "localhost")
"""Names under which a browser may reach the page, at any port: `ssh -L` forwards another one. A page of another site whose name was made to
resolve to this machine (DNS rebinding) sends its own name."""
RENEWED_SECONDS = 1.0
"""Age from which a page is read again."""
WATCHED_SECONDS = 2.0
RENEWED_SHARE = 4
"""A page that took long to read is kept for this many times as long."""
SILENT_SECONDS = 30.0
"""After which a connection without a request is closed."""
MAX_PORT = 65_535


class LivePage(ThreadingTCPServer):
    """Serves one page, at an address that contains a secret: other users of the machine can reach its ports too.

    `render` returns the document; it is called by one thread at a time, and not more often than it takes. `watch` is called every few
    seconds by the thread of `run`.
    """

    allow_reuse_address = True
    daemon_threads = True

    def __init__(
        self,
        render: Callable[[], str],
        *,
        port: int = 0,
        renewed_seconds: float = RENEWED_SECONDS,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """Listen at `port`, or at a free one. Raises: usage error `port-not-free`."""
        self.path = f"/{secrets.token_urlsafe(16)}/"
        self._render, self._renewed_seconds = render, renewed_seconds
        self._watch, self._watch_at = watch, 0.0
        self._lock = threading.Lock()
        self._page, self._tag, self._renew_at = b"", "", 0.0
        self._failure: FsdpTuneError | OSError | None = None
        self.bug: Exception | None = None
        """What no page may raise; it has ended the server."""
        try:
            super().__init__((ADDRESS, port), _Answer)
        except (OSError, OverflowError) as error:
            why = f"it is not one of 1 to {MAX_PORT:,}" if isinstance(error, OverflowError) else str(error.strerror).lower()
            hint = "leave out `--port` to get a free one"
            raise usage_error("port-not-free", f"the page cannot be served at port {port}: {why}", hint=hint) from error

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}{self.path}"

    def run(self) -> None:
        """Answer requests until this thread is interrupted. Raises: what `render` raised, if it is a bug."""
        with self:
            self.serve_forever(poll_interval=0.2)
        if self.bug is not None:
            raise self.bug

    def service_actions(self) -> None:
        """Watch now and then, between requests."""
        if time.monotonic() >= self._watch_at:
            self._watch()
            self._watch_at = time.monotonic() + WATCHED_SECONDS

    def current(self) -> tuple[bytes, str]:
        """Return the page and its ETag. Raises: FsdpTuneError or OSError if the runs cannot be read now."""
        with self._lock:
            began = time.monotonic()
            if began >= self._renew_at:
                try:
                    self._page = self._render().encode()
                    self._failure = None
                except (FsdpTuneError, OSError) as error:
                    self._failure = error
                self._tag = f'"{hashlib.sha256(self._page).hexdigest()[:32]}"'
                ended = time.monotonic()
                self._renew_at = ended + max(self._renewed_seconds, RENEWED_SHARE * (ended - began))
            if self._failure is not None:
                raise self._failure
            return self._page, self._tag

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore browsers that went away."""

    def fail(self, error: Exception) -> None:
        """End the server, from the thread of a request."""
        self.bug = error
        self.shutdown()


class _Answer(BaseHTTPRequestHandler):
    """Answers GET of the page. Any other method gets 501, from the base class."""

    timeout = SILENT_SECONDS

    def do_GET(self) -> None:
        page = cast(LivePage, self.server)
        host = self.headers.get("Host", "").rpartition(":")
        if (host[0] or host[2]).lower() not in HOST_NAMES:
            self._send(HTTPStatus.MISDIRECTED_REQUEST, b"this page is served to this machine only")
            return
        if not secrets.compare_digest(self.path.encode(), page.path.encode()):
            self._send(HTTPStatus.NOT_FOUND, b"not found")
            return
        try:
            text, tag = page.current()
        except (FsdpTuneError, OSError) as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"the runs cannot be read: {error}".encode())
        except Exception as error:  # noqa: BLE001  a bug: the command ends with it, as if it had happened in its own thread
            page.fail(error)
        else:
            is_known = self.headers.get("If-None-Match") == tag
            self._send(HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK, b"" if is_known else text, kind="text/html", tag=tag)

    def _send(self, status: HTTPStatus, body: bytes, *, kind: str = "text/plain", tag: str = "") -> None:
        self.send_response(status)
        fields = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Cache-Control": "no-store",
            "Content-Security-Policy": "frame-ancestors 'none'",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in (fields | ({"ETag": tag} if tag else {})).items():
            self.send_header(name, value)
        if status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def forwarding_command(port: int) -> str:
    """Return what to type at another machine to reach a port of this one."""
    return f"ssh -L {port}:{ADDRESS}:{port} {socket.gethostname()}"
