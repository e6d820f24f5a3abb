"""A server that answers what a test tells it to, over a real socket."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.conftest import tiny, tiny_folder  # noqa: F401 - a real server, for a few

if TYPE_CHECKING:
    from collections.abc import Callable


class Fake:
    """A scripted server.

    Attributes:
        url: where it listens.
        bodies: of the generation requests, in the order of their arrival.
        settings: what `/explain` shows; None: it has no such route, as servers of others.
        reply: body -> (status, answer); a text is the content of an assistant's message.
        most: requests that were in flight together at most.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.settings: dict[str, str] | None = {"kv_cache_dtype": "bfloat16", "port": "1"}
        self.reply: Callable[[dict[str, Any]], Any] = lambda body: "42"
        self.most = self._now = 0
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self.answer(200, {"data": [{"id": "fake"}]})
                elif self.path == "/explain" and fake.settings is not None:
                    rows = [{"name": n, "value": v} for n, v in fake.settings.items()]
                    self.answer(200, {"settings": rows})
                else:
                    self.answer(404, {"error": {"message": "no such route"}})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.answer(*fake.handle(self.path, body, self.headers))

            def answer(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.send_header("retry-after", "0")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def handle(self, path: str, body: dict[str, Any], headers: Any) -> tuple[int, Any]:
        with self._lock:
            self.bodies.append({**body, "path": path, "auth": headers.get("authorization")})
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            found = self.reply(body)
        finally:
            with self._lock:
                self._now -= 1
        if isinstance(found, str):
            found = {"content": found}
        if isinstance(found, tuple):
            return found
        usage = {"prompt_tokens": 7, "completion_tokens": 2}
        choice = {"message": found, "text": found.get("content"), "finish_reason": "stop"}
        return 200, {"choices": [choice], "usage": usage}

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(5)


@pytest.fixture
def fake():
    server = Fake()
    yield server
    server.close()
