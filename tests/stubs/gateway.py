"""A Pushgateway in this process: it accepts PUT and DELETE of groups, like a real Pushgateway."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Gateway:
    """``groups`` maps a path ("/metrics/job/hpcdist/jobid/42") to the last text stored there."""

    def __init__(self) -> None:
        self.groups: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        self.status = 200  # of all answers; others than 200 change nothing
        self.answers = threading.Event()  # cleared: requests wait
        self.answers.set()
        self.arrived = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                gateway.requests.append((self.command, self.path))
                gateway.arrived.set()
                gateway.answers.wait(30)
                reference = re.fullmatch(r"/metrics/job/[^/]+(/[^/]+/[^/]+)*", self.path)
                status = gateway.status if reference else 400
                if status == 200:
                    gateway.change(self.command, self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_PUT = do_DELETE = answer  # noqa: N815 - names of the library

            def log_message(self, *arguments: object) -> None:
                pass

        return Handler

    def change(self, method: str, path: str, body: str) -> None:
        if method == "PUT":
            self.groups[path] = body
        else:
            self.groups.pop(path, None)

    def stop(self) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def running() -> Iterator[Gateway]:
    gateway = Gateway()
    try:
        yield gateway
    finally:
        gateway.stop()
