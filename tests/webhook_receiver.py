"""A webhook of the test's own, on a socket."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "s3cret-path"
SOON = 30.0  # seconds


class Receiver:
    """Answers with these codes, one after the other, then with 200."""

    def __init__(self, *codes: int) -> None:
        self.codes, self.got, self.news = list(codes), list[dict[str, Any]](), threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with receiver.news:
                    code = receiver.codes.pop(0) if receiver.codes else 200
                    receiver.got.append(found | {"code": code, "type": self.headers["Content-Type"]})
                    receiver.news.notify()
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def do_GET(self) -> None:
                raise AssertionError("a redirect was followed")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/{SECRET}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def wait(self, count: int) -> list[dict[str, Any]]:
        with self.news:
            assert self.news.wait_for(lambda: len(self.got) >= count, SOON), self.got
            return self.got

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
