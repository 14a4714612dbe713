"""An HTTP proxy in a process of its own that stands before a real server, counts, and misbehaves on request.

    client ──► proxy ──► upstream (a real S3 API server, any HTTP server)
                 ▲
                 └─ POST /__faults__  a JSON list of faults: what to do to which requests
                    POST /__forget__  empties the log
                    GET  /__log__     [[method, path, status, seconds], …] of what came, and when; status 0: not answered yet

As a program: ``python proxy.py 127.0.0.1:9000`` prints the port it listens on. In tests: ``FaultProxy.start(upstream)``.

A fault is a dictionary; the first that matches a request and is not used up is applied:

    method   "GET"         only these requests
    match    "cats/"       only paths that contain this
    header   ["Authorization", "old-key"]   only requests in which this header contains this
    times    3             this often, then no more; without it, always
    latency  0.05          seconds before the first byte
    status   503           answer this instead of forwarding
    headers  {"Retry-After": "1"}   with that answer
    body     "<Error/>"    of that answer
    rate     1000000       bytes of the body a second, on each connection
    truncate 1000          send so many bytes of the body, then close in order, with the full Content-Length promised
    reset    1000          send so many bytes of the body, then reset the connection
    stall    1000          send so many bytes of the body, then nothing until the client gives up or the proxy ends
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PACE_BYTES = 1 << 18
_NOT_FORWARDED = {"connection", "transfer-encoding", "keep-alive", "proxy-connection", "te", "upgrade"}


@dataclass
class FaultProxy:
    """A running proxy, as its tests see it."""

    process: subprocess.Popen[bytes]
    port: int

    @staticmethod
    def start(upstream: str) -> FaultProxy:
        """Start a proxy before ``host:port``."""
        process = subprocess.Popen([sys.executable, __file__, upstream], stdout=subprocess.PIPE)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the proxy ended at once"
        return FaultProxy(process, int(line))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set_faults(self, *faults: dict[str, Any]) -> None:
        """Replace the faults; none for an honest proxy."""
        request = urllib.request.Request(f"{self.url}/__faults__", json.dumps(faults).encode(), method="POST")
        urllib.request.urlopen(request, timeout=30).close()

    def forget(self) -> None:
        """Be honest from now on, and forget what was asked so far."""
        self.set_faults()
        urllib.request.urlopen(f"{self.url}/__forget__", b"", timeout=30).close()

    def requests(self, method: str = "GET", match: str = "") -> list[tuple[str, str, int]]:
        """What was asked so far: method, path, status."""
        with urllib.request.urlopen(f"{self.url}/__log__", timeout=30) as answer:
            log = json.load(answer)
        return [(verb, path, status) for verb, path, status, _ in log if verb == method and match in path]

    def times(self, method: str = "GET", match: str = "") -> list[float]:
        """When each of these requests came, in seconds of one clock."""
        with urllib.request.urlopen(f"{self.url}/__log__", timeout=30) as answer:
            log = json.load(answer)
        return [moment for verb, path, _, moment in log if verb == method and match in path]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.lock = threading.Lock()
        self.faults: list[dict[str, Any]] = []
        self.log: list[list[Any]] = []

    def fault_for(self, method: str, path: str, headers: Message) -> dict[str, Any]:
        with self.lock:
            for fault in self.faults:
                if method != fault.get("method", method) or fault.get("match", "") not in path:
                    continue
                name, content = fault.get("header", ("", ""))
                if content not in headers.get(name, ""):
                    continue
                if "times" in fault:
                    if fault["times"] <= 0:
                        continue
                    fault["times"] -= 1
                return fault
        return {}

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes, and the second must not wait for an answer
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Quiet."""

    def handle_any(self) -> None:
        body = self._body()
        if self.path == "/__faults__":
            with self.server.lock:
                self.server.faults = json.loads(body)
            return self._answer(200, b"")
        if self.path == "/__forget__":
            with self.server.lock:
                self.server.log.clear()
            return self._answer(200, b"")
        if self.path == "/__log__":
            with self.server.lock:
                log = json.dumps(self.server.log).encode()
            return self._answer(200, log)
        fault = self.server.fault_for(self.command, self.path, self.headers)
        entry = [self.command, self.path, 0, time.monotonic()]
        with self.server.lock:
            self.server.log.append(entry)
        time.sleep(fault.get("latency", 0))
        if "status" in fault:
            entry[2] = fault["status"]
            return self._answer(fault["status"], fault.get("body", "<Error/>").encode(), fault.get("headers", {}))
        return self._forward(body, fault, entry)

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _forward(self, body: bytes, fault: dict[str, Any], entry: list[Any]) -> None:
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=120)
        with contextlib.closing(upstream):
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _NOT_FORWARDED}
            upstream.request(self.command, self.path, body=body or None, headers=headers)
            answer = upstream.getresponse()
            content = answer.read()
            entry[2] = answer.status
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _NOT_FORWARDED | {"content-length"}:
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            if length is not None:
                self.send_header("Content-Length", length)
            self.end_headers()
        if self.command == "HEAD":
            return
        cut = next((fault[kind] for kind in ("truncate", "reset", "stall") if kind in fault), None)
        for start in range(0, len(content[:cut]), _PACE_BYTES):
            piece = content[:cut][start : start + _PACE_BYTES]
            self.wfile.write(piece)
            time.sleep(len(piece) / fault["rate"] if "rate" in fault else 0)
        if cut is None or len(content) <= cut:
            return
        self.wfile.flush()
        self.close_connection = True
        if "stall" in fault:
            self.rfile.read(1)  # returns when the client closes
        elif "reset" in fault:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


for _verb in ("GET", "PUT", "POST", "HEAD", "DELETE", "PATCH", "OPTIONS"):
    setattr(_Handler, f"do_{_verb}", _Handler.handle_any)

if __name__ == "__main__":
    _server = _Server(sys.argv[1])
    print(_server.server_address[1], flush=True)
    _server.serve_forever()
