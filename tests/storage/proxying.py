"""A proxy before a server: it counts, and it spoils."""

from __future__ import annotations

import http.server
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

_CODES = {"409": "ConditionalRequestConflict", "501": "NotImplemented", "503": "SlowDown"}


class Proxy(http.server.BaseHTTPRequestHandler):
    """Passes requests on, notes each, and spoils some.

    Attributes:
        spoil: What becomes of the next `left` conditional PUTs into a journal: `drop` loses their answers, `409` and
            `503` are answered instead.
        refuse_copies: Answers 501 to every copy inside the service.
        refuse_parts: Answers 501 to every part of a large file.
        seen: Method, whether it was a copy, and bytes of body and answer, of every request.
    """

    target = ""
    spoil = ""
    left = 0
    refuse_copies = False
    refuse_parts = False
    seen: ClassVar[list[tuple[str, bool, int]]] = []
    lock = threading.Lock()
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        conditional = self.command == "PUT" and self.headers.get("If-None-Match") == "*" and "/journal/" in self.path
        with Proxy.lock:
            spoil = Proxy.spoil if conditional and Proxy.left > 0 else ""
            Proxy.left -= bool(spoil)
        copy = "x-amz-copy-source" in self.headers
        if (copy and Proxy.refuse_copies) or (Proxy.refuse_parts and "partNumber=" in self.path):
            spoil = "501"
        if spoil in _CODES:
            code = _CODES[spoil]
            Proxy.seen.append((self.command, copy, len(body)))
            self._answer(int(spoil), {}, f"<Error><Code>{code}</Code></Error>".encode())
            return
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
        request = urllib.request.Request(Proxy.target + self.path, body or None, headers, method=self.command)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                status, found, data = answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            status, found, data = error.code, dict(error.headers), error.read()
        Proxy.seen.append((self.command, copy, len(body) + len(data)))
        if spoil == "drop":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self._answer(status, found, data)

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on

    def log_message(self, *args: object) -> None:
        """Nothing."""


@contextmanager
def proxied(endpoint: str) -> Iterator[str]:
    """The endpoint of a proxy before `endpoint`, that spoils nothing yet."""
    Proxy.target, Proxy.spoil, Proxy.left = endpoint, "", 0
    Proxy.refuse_copies = Proxy.refuse_parts = False
    Proxy.seen.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.handle_error = lambda *args: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
