"""A server of JSON on this machine, for tests of what asks one."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JsonServer:
    """A server at `url`, which replies with `answer(path, body, headers)`: a status and a value.

    Text and bytes are sent as they are.
    """

    def __init__(self, answer):
        handler = type("Handler", (Handler,), {"answer": staticmethod(answer)})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply(None)

    def do_POST(self):
        is_lines = self.headers["Content-Type"] == "application/x-ndjson"
        self.reply(self.read_body() if is_lines else json.loads(self.read_body()))

    def do_PUT(self):
        self.reply(self.read_body())

    def read_body(self):
        return self.rfile.read(int(self.headers["Content-Length"]))

    def reply(self, body):
        status, value = self.answer(self.path, body, self.headers)
        if not isinstance(value, str | bytes):
            value = json.dumps(value)
        content = value.encode() if isinstance(value, str) else value
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass
