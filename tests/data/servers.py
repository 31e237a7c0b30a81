"""Servers of files for tests: one over HTTP that does what a test asks of it, and moto's S3."""

from __future__ import annotations

import functools
import gzip
import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


class Served(ThreadingHTTPServer):
    """A folder over HTTP with byte ranges and validators.

    faults: what the next requests meet, each once: a status, "drop", "cut", a number of seconds or a function of the
    handler, as one of `HOSTILE`; always: the same of every request for a path; delay: seconds that every request takes;
    bytes_sent and requests count what was asked for. dead: every connection is dropped.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.folder, self.faults, self.delay, self.dead = folder, list[object](), 0.0, False
        self.ranges, self.retry_after, self.validators = True, "0", ("ETag",)
        self.always = dict[str, object]()
        self.bytes_sent, self.requests = 0, Counter[str]()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # the client is gone


@functools.lru_cache(maxsize=64)
def _read(path: Path, time: int) -> tuple[bytes, str]:
    data = path.read_bytes()
    return data, hashlib.md5(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Served

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.path = self.path.partition("?")[0]
        server, path = self.server, self.server.folder / unquote(self.path).lstrip("/")
        with server.lock:
            server.requests[self.path] += 1
            fault = server.faults.pop(0) if server.faults else server.always.get(self.path)
        if callable(fault):
            self.close_connection = True
            with suppress(OSError):
                fault(self)
            return None
        time.sleep(server.delay)
        if server.dead or fault == "drop":
            self.close_connection = True
            return None
        if isinstance(fault, float):
            time.sleep(fault)
        if isinstance(fault, int):
            return self._answer(fault, b"", {"Retry-After": server.retry_after})
        if path.is_dir():
            names = "".join(f'<a href="{one.name}">{one.name}</a>' for one in sorted(path.iterdir()))
            return self._answer(200, names.encode(), {"Content-Type": "text/html"})
        if not path.is_file():
            return self._answer(404, b"", {})
        data, tag = _read(path, path.stat().st_mtime_ns)
        known = {"ETag": f'"{tag}"', "Last-Modified": self.date_time_string(int(path.stat().st_mtime))}
        headers = {name: known[name] for name in server.validators}
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if part is None or not server.ranges:
            return self._answer(200, data, headers, fault == "cut")
        first, last = int(part[1]), min(int(part[2]), len(data) - 1)
        if first >= len(data):
            return self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return self._answer(206, data[first : last + 1], headers, fault == "cut")

    def _answer(self, status: int, data: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = self.close_connection or cut
        with self.server.lock:
            self.server.bytes_sent += len(data)


def _hostile(
    status: int = 206, place: str = "bytes 0-0/9000", block: bytes = bytes(1 << 16), pause: float = 0.0, **more: str
):
    """An answer whose headers may say anything and whose body doesn't end; what was sent is counted."""

    def answer(handler: _Handler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Range": place, **more}.items():
            for part in value if isinstance(value, list) else [value]:
                handler.send_header(name.replace("_", "-"), part)
        handler.end_headers()
        while block:
            handler.wfile.write(block)
            handler.server.bytes_sent += len(block)
            time.sleep(pause)

    return answer


HOSTILE = {
    "a body without end": _hostile(),
    "a whole body without end": _hostile(200),
    "a body of a terabyte": _hostile(Content_Length=str(1 << 40)),
    "a bomb": _hostile(block=gzip.compress(bytes(8 << 20)), Content_Encoding="gzip"),
    "a byte at times": _hostile(block=b"x", pause=0.05),
    "an error without end": _hostile(400),
    "a header without end": _hostile(X="x" * (1 << 20)),
    "headers without end": _hostile(X=["x" * 1000] * 2000),
    "redirects without end": _hostile(302, block=b"", Location="/1", Content_Length="0"),
    "no place": _hostile(place="", block=b"", Content_Length="0"),
    "another place": _hostile(place="bytes 7-7/9000", block=b"", Content_Length="0"),
    "a size beyond all": _hostile(place=f"bytes 0-0/{10**30}", block=b"", Content_Length="0"),
    "a size of minus one": _hostile(place="bytes 0-0/-1", block=b"", Content_Length="0"),
    "a wait without end": _hostile(503, block=b"", Content_Length="0", Retry_After="9" * 400),
    "a wait that is no number": _hostile(503, block=b"", Content_Length="0", Retry_After="\u00b2"),
}


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[Served]:
    with Served(folder, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
