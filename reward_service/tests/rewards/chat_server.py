"""A local server that speaks the OpenAI protocol."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ChatServer:
    """Lists ``models``, answers each chat request with ``answer(request) -> (status, content)``, keeps the requests."""

    def __init__(self, model):
        self.models, self.models_status = [model], 200
        self.requests, self.headers = [], []
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format, *args):
                pass

            def send(self, status, content):
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                self.send(outer.models_status, {"data": [{"id": name} for name in outer.models]})

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.requests.append(request)
                    outer.headers.append(self.headers["Authorization"])
                self.send(*outer.answer(request))

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, request):
        raise NotImplementedError

    def close(self):
        self._server.shutdown()
        self._server.server_close()
