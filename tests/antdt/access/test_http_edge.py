"""The service's HTTP address by itself: probes, pages, and callers that behave badly."""

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gmeta.access import http_edge
from gmeta.access.auth import Tokens
from gmeta.access.http_edge import HttpRequest, RouteServer
from tests.support.waiting import PATIENCE_S, wait_until


class Site:
    """A server of three pages, one of which answers when it is told to."""

    def __init__(self) -> None:
        self.serving = True
        self.entered, self.go_on = threading.Semaphore(0), threading.Event()
        routes = {"/page": self.page, "/slow": self.slow, "/broken": self.broken}
        self.server = RouteServer("127.0.0.1", 0, routes, lambda: self.serving)
        self.port = self.server.start()

    def page(self, request: HttpRequest) -> None:
        request.send(200, "the page\n", {"X-Of": "page"}, content_type="text/x-test")

    def slow(self, request: HttpRequest) -> None:
        self.entered.release()
        assert self.go_on.wait(PATIENCE_S)
        request.send(200, "late\n")

    def broken(self, request: HttpRequest) -> None:
        raise ConnectionResetError("the caller left")

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def ask(self, path: str, method: str = "GET") -> tuple[http.client.HTTPResponse, str]:
        with closing(self.connection()) as connection:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer, answer.read().decode()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.go_on.set()
    site.server.stop()


def test_a_probe_is_told_whether_the_service_serves(site: Site) -> None:
    for serving, status, text in ((True, 200, "serving\n"), (False, 503, "not serving\n")):
        site.serving = serving
        answer, body = site.ask("/healthz")
        assert (answer.status, body) == (status, text)


def test_a_page_is_found_whatever_is_asked_of_it(site: Site) -> None:
    answer, body = site.ask("/page?since=3")
    assert (answer.status, body) == (200, "the page\n")
    assert answer.headers["Content-Type"] == "text/x-test"
    assert answer.headers["X-Of"] == "page"


def test_head_is_the_same_without_the_page(site: Site) -> None:
    answer, body = site.ask("/page", "HEAD")
    assert (answer.status, body) == (200, "")
    assert answer.headers["Content-Length"] == str(len("the page\n"))


def test_a_wrong_path_is_told_which_there_are(site: Site) -> None:
    answer, body = site.ask("/pages")
    assert answer.status == 404
    assert body == "no such page; there are /page, /slow, /broken\n"


def test_a_request_that_is_none_is_told_so_and_the_next_is_answered(site: Site) -> None:
    """urllib takes a bracket for the beginning of an IPv6 address."""
    with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE_S) as caller:
        caller.sendall(b"GET http://[ HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = http.client.HTTPResponse(caller)
        answer.begin()
        assert (answer.status, answer.read()) == (400, b"the path of the request cannot be read\n")
    assert site.ask("/page")[0].status == 200


def test_nobody_is_told_what_the_server_is_made_of(site: Site) -> None:
    answer, _ = site.ask("/page")
    assert "python" not in str(answer.headers).lower()


def test_other_methods_are_refused(site: Site) -> None:
    for method in ("POST", "DELETE"):
        answer, _ = site.ask("/page", method)
        assert answer.status == 501


def test_a_caller_that_leaves_harms_nobody(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    with closing(site.connection()) as connection:
        connection.request("GET", "/broken")
        with pytest.raises(ConnectionError):
            connection.getresponse()
    with socket.create_connection(("127.0.0.1", site.port)):
        pass  # it connects, and says nothing
    assert site.ask("/page")[0].status == 200
    assert capfd.readouterr().err == ""


def test_a_silent_caller_does_not_keep_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_edge, "REQUEST_TIMEOUT_S", 0.05)
    monkeypatch.setattr(HttpRequest, "timeout", 0.05)
    site = Site()
    with socket.create_connection(("127.0.0.1", site.port), PATIENCE_S) as silent:
        assert silent.recv(1) == b""  # the server hung up
    site.server.stop()


def test_one_request_too_many_is_dropped_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_edge, "MAX_REQUESTS", 2)
    site = Site()
    waiting = [site.connection() for _ in range(2)]
    for connection in waiting:
        connection.request("GET", "/slow")
        assert site.entered.acquire(timeout=PATIENCE_S)
    with pytest.raises(ConnectionError):
        site.ask("/page")
    site.go_on.set()
    for connection in waiting:
        assert connection.getresponse().read() == b"late\n"
        connection.close()
    # A place is free again once its request has ended, a moment after its answer.
    answered = False
    while not answered:
        try:
            answered = site.ask("/page")[0].status == 200
        except ConnectionError:
            continue
    site.server.stop()


def test_a_request_that_comes_byte_by_byte_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is in time, the request is not."""
    monkeypatch.setattr(http_edge, "REQUEST_TIMEOUT_S", 0.05)
    site = Site()
    with socket.create_connection(("127.0.0.1", site.port), PATIENCE_S) as dribbling:
        dribbling.settimeout(0.01)
        dribbling.sendall(b"GET /page HTTP/1.1\r\nX-A: ")
        wait_until(lambda: hung_up_on_the_next_byte(dribbling), "hung up")
    site.server.stop()


def hung_up_on_the_next_byte(caller: socket.socket) -> bool:
    try:
        caller.sendall(b"a")
        return not caller.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_probe_is_answered_while_every_place_is_taken(site: Site) -> None:
    for _ in range(http_edge.MAX_REQUESTS):
        threading.Thread(target=site.ask, args=("/slow",), daemon=True).start()
        assert site.entered.acquire(timeout=PATIENCE_S)
    with pytest.raises(ConnectionError):
        site.ask("/page")
    assert site.ask("/healthz")[1] == "serving\n"


def test_who_may_not_look_is_logged_without_what_was_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gmeta.antdt")
    for role in ("viewer", "worker"):
        (tmp_path / role).write_text(f"{role}-0123456789abcdef\n")
    server = RouteServer("127.0.0.1", 0, {}, lambda: True, tokens=Tokens(tmp_path))
    port = server.start()
    for token in ("stranger", "worker-0123456789abcdef", "viewer-0123456789abcdef"):
        headers = {"Authorization": f"Bearer {token}"}
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as asking:
            asking.request("GET", f"/page?key={token}", headers=headers)
            asking.getresponse().read()
    server.stop()
    told = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert told == [{"path": "/page", "status": code, "peer": "127.0.0.1"} for code in (401, 403)]
