"""A scoring service: `python reward_server.py`, which prints its port. It scores how many characters of a response
differ."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Scorer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send("here")

    def do_POST(self) -> None:
        samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send([float(len(set(sample["response"]))) for sample in samples])

    def _send(self, said: object) -> None:
        content = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scorer)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)  # noqa: T201
    server.serve_forever()
