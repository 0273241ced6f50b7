"""The XML API of Google's storage, which obstore speaks, in front of an emulator that has it only for reading.

Each write becomes the same request of the JSON API, condition and all; what the emulator answers is passed back.
"""

from __future__ import annotations

import http.client
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

_DROPPED = ("content-length", "connection", "transfer-encoding", "date", "server")


class XmlDoor(http.server.BaseHTTPRequestHandler):
    """Attributes: `conditions` tells whether the condition of a write is passed on; `uploads` are parts by upload."""

    target = ""
    conditions = True
    uploads: ClassVar[dict[str, dict[int, bytes]]] = {}
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        bucket, _, key = parts.path.lstrip("/").partition("/")
        query = {name: found[0] for name, found in parse_qs(parts.query, keep_blank_values=True).items()}
        where = f"/storage/v1/b/{bucket}/o/{quote(unquote(key), safe='')}"
        if parts.path.startswith(("/storage/v1/", "/upload/", "/download/")):  # the other API passes
            names = ("Content-Type", "Range", "X-Upload-Content-Type", "Content-Range")
            headers = {name: self.headers[name] for name in names if self.headers.get(name)}
            self._answer(*self._ask(self.command, self.path, body, headers))
        elif self.command in ("GET", "HEAD"):
            headers = {"Range": self.headers["Range"]} if self.headers.get("Range") else {}
            self._answer(*self._ask(self.command, f"/download{where}?alt=media" if key else self.path, b"", headers))
        elif self.command == "DELETE":
            self._answer(*self._ask("DELETE", where))
        elif "uploads" in query:
            name = f"u{len(self.uploads)}"
            self.uploads[name] = {}
            found = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
            self._answer(200, {}, found.encode())
        elif "partNumber" in query:
            self.uploads[query["uploadId"]][int(query["partNumber"])] = body
            self._answer(200, {"ETag": f'"{query["partNumber"]}"'}, b"")
        elif "uploadId" in query:
            whole = self.uploads.pop(query["uploadId"])
            status, headers, data = self._insert(bucket, key, b"".join(whole[number] for number in sorted(whole)))
            found = "<CompleteMultipartUploadResult><ETag>whole</ETag></CompleteMultipartUploadResult>"
            self._answer(status, headers, found.encode() if status == 200 else data)
        elif self.headers.get("x-goog-copy-source"):
            source, _, other = self.headers["x-goog-copy-source"].lstrip("/").partition("/")
            source = f"/storage/v1/b/{source}/o/{quote(unquote(other), safe='')}"
            self._answer(*self._ask("POST", f"{source}/rewriteTo{where.removeprefix('/storage/v1')}"))
        else:
            self._answer(*self._insert(bucket, key, body))

    def _insert(self, bucket: str, key: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart"
        condition = self.headers.get("x-goog-if-generation-match")
        if condition is not None and self.conditions:
            path += f"&ifGenerationMatch={condition}"
        # One request of two parts: of the emulator's ways to write, the one that heeds the condition.
        name = json.dumps({"name": unquote(key)}).encode()
        kinds = (b"application/json", name), (b"application/octet-stream", body)
        parts = b"".join(b"--=door=\r\nContent-Type: %b\r\n\r\n%b\r\n" % kind for kind in kinds)
        kind = {"Content-Type": 'multipart/related; boundary="=door="'}
        status, headers, data = self._ask("POST", path, parts + b"--=door=--", kind)
        if status == 200:
            made = json.loads(data)
            headers, data = {"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]}, b""
        return status, headers, data

    def _ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.target, timeout=20)
        try:
            connection.request(method, path, body or None, headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in _DROPPED:
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def log_message(self, *args: object) -> None:
        """Nothing."""


@contextmanager
def xml_door(endpoint: str) -> Iterator[str]:
    """The endpoint of a door before the emulator at `endpoint`."""
    XmlDoor.target, XmlDoor.conditions = urlsplit(endpoint).netloc, True
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), XmlDoor)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
