"""Answers the browser on this machine: the page, what is new, and images of the runs. Nothing else is served."""

import json
import re
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cosmos_rl.errors import UserError
from cosmos_rl.tracking.watch.page import Watch, find_image
from cosmos_rl.utils.logging import logger

HOST = "127.0.0.1"
_HERE = Path(__file__).parent
_STATIC = {
    "/watch.js": (_HERE / "watch.js", "text/javascript; charset=utf-8"),
    "/watch.css": (_HERE / "watch.css", "text/css; charset=utf-8"),
    "/report.css": (_HERE.parent / "report" / "style.css", "text/css; charset=utf-8"),
}
_IMAGE = re.compile(r"/runs/(\d{1,4})/media/(validation|rollout)/(step_\d{1,12})/([\w-][\w.-]*\.(?:png|mp4))")
_TYPES = {".png": "image/png", ".mp4": "video/mp4"}
_HEADERS = {
    # the browser itself refuses what is from elsewhere and every script but ours, whatever a prompt may hold
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_TIMEOUT_S = 60.0


class WatchServer(ThreadingHTTPServer):
    """Listens on this machine alone."""

    daemon_threads = True

    def __init__(self, watch: Watch, port: int) -> None:
        """``port`` 0 takes any free one.

        Raises:
            UserError: the port is in use or not allowed.
        """
        self.watch = watch
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UserError(f"--port {port}: {error.strerror}; leave it out for any free one") from None
        self.names = {f"{host}:{self.server_port}" for host in (HOST, "localhost")}
        """What a browser may have asked for: a page from elsewhere that lets its own name lead here has another."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing for a browser that is gone before it has its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S

    @property
    def _watch(self) -> Watch:
        return self._server.watch

    @property
    def _server(self) -> WatchServer:
        assert isinstance(self.server, WatchServer)
        return self.server

    def do_GET(self) -> None:
        """Answer with a page, a file, or why not."""
        if self.headers.get("Host") not in self._server.names:
            self._send(HTTPStatus.MISDIRECTED_REQUEST, b"another host is meant\n")
            return
        address = urlsplit(self.path)
        if address.path == "/":
            self._send(HTTPStatus.OK, self._watch.page().encode(), "text/html; charset=utf-8")
        elif address.path == "/poll":
            self._poll(address.query)
        elif address.path in _STATIC:
            file, kind = _STATIC[address.path]
            self._send(HTTPStatus.OK, file.read_bytes(), kind)
        else:
            self._send_image(address.path)

    def _poll(self, query: str) -> None:
        known = parse_qs(query).get("known", ["0"])[0]
        if not re.fullmatch(r"\d{1,12}", known):
            self._send(HTTPStatus.BAD_REQUEST, b"known: a whole number\n")
            return
        answer = json.dumps(self._watch.poll(int(known)))
        self._send(HTTPStatus.OK, answer.encode(), "application/json")

    def _send_image(self, path: str) -> None:
        match = _IMAGE.fullmatch(path)
        file = None
        if match:
            file = find_image(self._watch.runs, int(match[1]), match.groups()[1:])
        if file is None:
            self._send(HTTPStatus.NOT_FOUND, b"no such page\n")
            return
        try:
            image = file.read_bytes()  # whole, so that what follows the headers is never cut short
        except OSError as error:  # the run may delete it at any moment
            logger.warning(f"{file}: cannot be sent ({error.strerror})")
            self.close_connection = True
            self._send(HTTPStatus.NOT_FOUND, b"no such page\n")
            return
        self._send(HTTPStatus.OK, image, _TYPES[file.suffix])

    def _send(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a page asks every two seconds."""
