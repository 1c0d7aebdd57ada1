"""Who is let in, to what, and how certificates and tokens are replaced while the service runs."""

import base64
import json
import logging
import os
import re
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from gmeta.access.auth import Tokens
from gmeta.access.credentials import CredentialError, ServerTls
from gmeta.access.errors import RefusedError
from gmeta.access.log import LOGGER_NAME
from gmeta.access.rate import CallLimits, RateLimit
from gmeta.access.roles import ALLOWED, Role, may_call, role_of_certificate
from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.client.connection import ConnectionConfig, ServiceConnection
from gmeta.antdt.errors import ServiceUnavailableError
from gmeta.antdt.service.edge import GUARD_LINES_PER_S
from gmeta.antdt.service.shard_server import (
    SERVICE_NAME,
    ServiceConfig,
    ServiceStartError,
    ShardServer,
)
from gmeta.cli.commands.shards import shards
from gmeta.cli.main import app
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb
from tests.antdt.driver import FakeClock
from tests.antdt.pki import Authority, Pair
from tests.antdt.slow_rate import limits_by_count
from tests.support.refusals import catch_message
from tests.support.waiting import PATIENCE_S

TOKENS = {role.value: f"{role.value}-" + "0123456789abcdef" for role in Role}
Serve = Callable[..., ShardServer]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    folder = tmp_path / "tokens"
    folder.mkdir()
    for role, token in TOKENS.items():
        (folder / role).write_text(f"{token}\n")
    return folder


@pytest.fixture
def serve(pki: Authority) -> Iterator[Serve]:
    """Starts a service with TLS and whatever proof is asked for."""
    started: list[ShardServer] = []
    cert, key = pki.issue("service")

    def start(**options: Any) -> ShardServer:
        files = {"tls_cert": cert, "tls_key": key, **options}
        started.append(ShardServer(ServiceConfig("127.0.0.1:0", **files)))
        return started[-1]

    yield start
    for server in started:
        server.stop(0.0)


def status(
    server: ShardServer, ca: Path, pair: Pair | None = None, token: Path | None = None
) -> Any:
    cert, key = pair or (None, None)
    config = ConnectionConfig(server.address, 0.2, PATIENCE_S, ca, cert, key, token)
    connection = ServiceConnection(config)
    try:
        return connection.call("Status", pb.StatusRequest)
    finally:
        connection.close()


def test_a_certificate_of_the_authority_is_needed_and_no_other_will_do(
    serve: Serve, pki: Authority, tmp_path: Path
) -> None:
    server = serve(tls_client_ca=pki.ca)
    assert status(server, pki.ca, pki.issue("rank0", "worker")).job == "default"
    stranger = Authority(tmp_path / "other").issue("rank0", "worker")
    expired = pki.issue("late", "worker", days=-1)
    for pair in (None, stranger, expired):
        with pytest.raises(ServiceUnavailableError):
            status(server, pki.ca, pair)


def test_a_client_does_not_talk_to_a_service_that_its_authority_did_not_sign(
    serve: Serve, pki: Authority, tmp_path: Path
) -> None:
    server = serve(tls_client_ca=pki.ca)
    with pytest.raises(ServiceUnavailableError, match=r"(?i)certificate|ssl|handshake"):
        status(server, Authority(tmp_path / "other").ca, pki.issue("rank0", "worker"))


def test_an_expired_service_certificate_is_refused_by_the_client(
    serve: Serve, pki: Authority, tokens: Path
) -> None:
    cert, key = pki.issue("old-service", days=-1)
    server = serve(tls_cert=cert, tls_key=key, tokens=tokens)
    with pytest.raises(ServiceUnavailableError):
        status(server, pki.ca, token=tokens / "worker")


@pytest.mark.parametrize("given", ["", "wrong-token-0123456789"])
def test_a_call_without_a_known_token_is_unauthenticated(
    serve: Serve, pki: Authority, tokens: Path, tmp_path: Path, given: str
) -> None:
    server = serve(tokens=tokens)
    file = tmp_path / "given"
    file.write_text(given)
    with pytest.raises(RefusedError) as stranger:
        status(server, pki.ca, token=file if given else None)
    assert (stranger.value.code, stranger.value.reason) == ("UNAUTHENTICATED",) * 2
    assert str(stranger.value) == (
        "the call carries no valid token; this service needs one. Pass the token file to "
        "the client."
    )


def test_strangers_and_wrong_roles_are_counted_and_logged_but_not_each_of_many(
    serve: Serve, pki: Authority, tokens: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Nobody would hear of an old token, or of somebody who tries."""
    caplog.set_level(logging.INFO, LOGGER_NAME)
    server = serve(tokens=tokens)
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong-token-0123456789")
    assert call_as(server, pki, tokens / "viewer", "Drain") == "PERMISSION_DENIED"
    count = 3 * int(GUARD_LINES_PER_S)
    server.edge._lines_of_guard._clock = FakeClock(time.monotonic())
    for _ in range(count):
        assert call_as(server, pki, wrong, "Status") == "UNAUTHENTICATED"
    labels = {"rpc": "Status", "code": "UNAUTHENTICATED"}
    registry = server.edge.metrics.registry
    assert registry.get_sample_value("antdt_calls_total", labels) == count
    refused = [record.fields for record in caplog.records if record.message == "refused"]  # type: ignore[attr-defined]
    assert [refused[0][name] for name in ("rpc", "reason")] == ["Drain", "PERMISSION_DENIED"]
    assert refused[1]["reason"] == "UNAUTHENTICATED"
    assert refused[1]["peer"].startswith("ipv4:127.0.0.1:")
    assert len(refused) <= GUARD_LINES_PER_S


def test_where_both_proofs_are_asked_both_count(serve: Serve, pki: Authority, tokens: Path) -> None:
    server = serve(tls_client_ca=pki.ca, tokens=tokens)
    worker = pki.issue("rank0", "worker")
    assert status(server, pki.ca, worker, tokens / "worker").job == "default"
    with pytest.raises(RefusedError):
        status(server, pki.ca, worker)
    with pytest.raises(ServiceUnavailableError):
        status(server, pki.ca, None, tokens / "worker")


def call_as(server: ShardServer, pki: Authority, token: Path, rpc: str) -> str:
    """The gRPC code of an empty request: OK and INVALID_ARGUMENT have both passed the guard."""
    with grpc.secure_channel(
        server.address, grpc.ssl_channel_credentials(pki.ca.read_bytes())
    ) as channel:
        method = pb.DESCRIPTOR.services_by_name["ShardService"].methods_by_name[rpc]
        response = getattr(pb, method.output_type.name)
        path = f"/{SERVICE_NAME}/{rpc}"
        kind = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = kind(path, lambda _: b"", response.FromString)
        metadata = (("authorization", f"Bearer {token.read_text().strip()}"),)
        try:
            answer = call(None, metadata=metadata, timeout=PATIENCE_S)
            if method.server_streaming:
                next(answer)
                answer.cancel()
        except grpc.RpcError as error:
            return str(error.code().name)  # type: ignore[attr-defined]
    return "OK"


@pytest.mark.parametrize("role", Role, ids=lambda role: role.value)
def test_each_role_may_make_its_calls_and_no_other(
    serve: Serve, pki: Authority, tokens: Path, role: Role
) -> None:
    server = serve(tokens=tokens)
    methods = [method.name for method in pb.DESCRIPTOR.services_by_name["ShardService"].methods]
    codes = {rpc: call_as(server, pki, tokens / role.value, rpc) for rpc in methods}
    let_in = {rpc for rpc, code in codes.items() if code != "PERMISSION_DENIED"}
    assert let_in == ALLOWED[role]
    assert "UNAUTHENTICATED" not in codes.values()


def test_every_call_of_the_proto_is_somebodys_and_a_new_one_is_nobodys() -> None:
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["ShardService"].methods}
    assert set().union(*ALLOWED.values()) == methods, "decide in roles.py who may call it"
    assert not any(may_call(role, f"/{SERVICE_NAME}/Erase") for role in Role)


def test_a_workers_certificate_does_not_operate(serve: Serve, pki: Authority) -> None:
    server = serve(tls_client_ca=pki.ca)
    options = ["--service", server.address, "--tls-ca", str(pki.ca)]
    for name, role in (("rank0", "worker"), ("nameless", "")):
        cert, key = pki.issue(name, role)
        with pytest.raises(RefusedError) as refused:
            CliRunner().invoke(
                shards,
                ["drain", *options, "--tls-cert", str(cert), "--tls-key", str(key)],
                catch_exceptions=False,
            )
        assert refused.value.reason == "PERMISSION_DENIED"
        assert str(refused.value) == (
            "Drain is not a call of the role worker; it may call AckAction, CommitCheckpoint, "
            "Complete, Fail, Heartbeat, Lease, PrepareCheckpoint, Progress, Register, "
            "RegisterDataset, Release, Restore, Status, Stream. Use the credentials of the role "
            "that may."
        )
    cert, key = pki.issue("me", "operator")
    done = CliRunner().invoke(
        shards,
        ["drain", *options],
        env={"GMETA_SHARD_TLS_CERT": str(cert), "GMETA_SHARD_TLS_KEY": str(key)},
    )
    assert done.output == "the service is draining; shards that went back: 0\n"


@pytest.mark.parametrize(
    ("uri", "role"),
    [
        ("spiffe://prod.example/ns/ml/gmeta/operator", Role.OPERATOR),
        ("spiffe://x/gmeta/viewer", Role.VIEWER), ("spiffe://x/other/operator", Role.WORKER),
        ("spiffe://x/gmeta/root", Role.WORKER), ("", Role.WORKER),
    ],
)  # fmt: skip
def test_a_certificates_uri_names_the_role(uri: str, role: Role) -> None:
    assert role_of_certificate([uri]) is role


def replace(target: Pair, source: Pair) -> None:
    """As a mounted Secret is replaced: each file by rename."""
    for old, new in zip(target, source, strict=True):
        copy = old.with_suffix(".new")
        shutil.copy(new, copy)
        os.replace(copy, old)


def peer_certificate(address: str, ca: Path) -> str:
    host, port = address.split(":")
    return ssl.get_server_certificate((host, int(port)), ca_certs=str(ca))


def test_a_replaced_certificate_is_served_without_a_restart_and_a_wrong_one_is_not(
    serve: Serve, pki: Authority, tokens: Path, tmp_path: Path
) -> None:
    live = (tmp_path / "tls.crt", tmp_path / "tls.key")
    first, second = pki.issue("first"), pki.issue("second")
    replace(live, first)
    server = serve(tls_cert=live[0], tls_key=live[1], tokens=tokens)
    token = tokens / "worker"
    with ShardClient(server.address, "rank0", tls_ca=pki.ca, token_file=token) as client:
        assert peer_certificate(server.address, pki.ca) == first[0].read_text()
        replace(live, second)
        assert peer_certificate(server.address, pki.ca) == second[0].read_text()
        # A key that is not the certificate's, and then no file at all: the old pair goes on.
        replace(live, (second[0], first[1]))
        assert peer_certificate(server.address, pki.ca) == second[0].read_text()
        live[0].unlink()
        assert peer_certificate(server.address, pki.ca) == second[0].read_text()
        assert client.service_epoch == 1


def test_a_client_takes_its_replaced_certificate_when_it_connects_again(
    serve: Serve, pki: Authority, tmp_path: Path
) -> None:
    live = (tmp_path / "client.crt", tmp_path / "client.key")
    replace(live, pki.issue("short", "worker", days=-1))
    server = serve(tls_client_ca=pki.ca)
    config = ConnectionConfig(server.address, PATIENCE_S, PATIENCE_S, pki.ca, *live)
    connection = ServiceConnection(config)
    with pytest.raises(ServiceUnavailableError):
        connection.call("Status", pb.StatusRequest, budget_s=0.2)
    replace(live, pki.issue("fresh", "worker"))
    assert connection.call("Status", pb.StatusRequest).job == "default"
    connection.close()


def test_tokens_are_replaced_without_a_restart_on_both_sides(
    serve: Serve, pki: Authority, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gmeta.access.auth._RELOAD_EVERY_S", 0.0)
    mine = tmp_path / "mine"
    mine.write_text(TOKENS["worker"])
    server = serve(tokens=tokens)
    connection = ServiceConnection(
        ConnectionConfig(server.address, 0.2, PATIENCE_S, pki.ca, token_file=mine)
    )
    connection.call("Status", pb.StatusRequest)
    fresh = "fresh-0123456789abcdef-fresh"
    (tokens / "worker").write_text(f"{TOKENS['worker']}\n{fresh}\n")  # both, for a while
    connection.call("Status", pb.StatusRequest)
    mine.write_text(fresh)
    (tokens / "worker").write_text(f"{fresh}\n")
    connection.call("Status", pb.StatusRequest)
    (tokens / "worker").write_text("short\n")  # a mistake does not lock everybody out
    connection.call("Status", pb.StatusRequest)
    mine.write_text(TOKENS["worker"])
    with pytest.raises(RefusedError, match="no valid token"):
        connection.call("Status", pb.StatusRequest)
    connection.close()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {},
            "the token folder {folder} has none of the files worker, operator, viewer: nobody "
            "could call. Write a token to each role's file.",
        ),
        (
            {"worker": "s3cret"},
            "a token in {folder}/worker has 6 characters; at least 16 are needed. Make one with: "
            "openssl rand -hex 32",
        ),
        (
            {"worker": "0123456789abcdef", "operator": "0123456789abcdef"},
            "a token in {folder}/operator stands in the file of another role too; a token has one "
            "role. Make another one.",
        ),
        (
            {"viewer": "\n"},
            "the token file {folder}/viewer is empty; it must hold one line. Write a long random "
            "token to it.",
        ),
        *(
            (
                {"worker": token},
                "a token in {folder}/worker has a character that no call can carry; allowed are "
                "visible ASCII characters without spaces. Make one with: openssl rand -hex 32",
            )
            for token in ("grün-0123456789abcdef", "two words-0123456789abcdef", "\x01" * 16)
        ),
    ],
)
def test_token_files_that_cannot_be_meant_are_explained(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert catch_message(CredentialError, Tokens, tmp_path) == message.format(folder=tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"listen": "0.0.0.0:0"}, {"listen": "[::]:0"}, {"listen": "service.example:7070"},
        {"listen": "127.0.0.1:0", "metrics_listen": "0.0.0.0:0"},
    ],
)  # fmt: skip
def test_an_open_service_listens_on_this_machine_only(options: dict[str, Any]) -> None:
    with pytest.raises(ServiceStartError, match="can be reached from other machines"):
        ShardServer(ServiceConfig(**options))


def test_tokens_without_tls_do_not_leave_this_machine(tokens: Path) -> None:
    with pytest.raises(ServiceStartError) as bare:
        ShardServer(ServiceConfig("0.0.0.0:0", tokens=tokens))
    assert str(bare.value) == (
        "--listen 0.0.0.0:0 can be reached from other machines, and of what protects a service "
        f"there is --tokens {tokens}; --tls-cert, --tls-key and one of --tls-client-ca and "
        "--tokens are needed. Pass them, or listen on 127.0.0.1."
    )


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"cert": Path("c")}, "--tls-key"),
        ({"key": Path("k")}, "--tls-cert"),
        ({"client_ca": Path("a")}, "--tls-cert and --tls-key"),
    ],
)
def test_half_of_a_services_tls_is_refused(given: dict[str, Path], missing: str) -> None:
    assert catch_message(
        CredentialError, ServerTls.of, **{"cert": None, "key": None, "client_ca": None, **given}
    ) == (f"TLS needs a certificate and its key; not given: {missing}. Pass both.")


@pytest.mark.parametrize("half", [{"tls_cert": Path("c")}, {"tls_key": Path("c")}])
def test_half_of_a_clients_certificate_is_refused(half: dict[str, Path], pki: Authority) -> None:
    with pytest.raises(CredentialError) as bad:
        ServiceConnection(ConnectionConfig("127.0.0.1:1", tls_ca=pki.ca, **half))
    assert str(bad.value) == (
        "a client certificate needs its key; only c is given. Pass both, --tls-cert and --tls-key "
        "(in Python, tls_cert and tls_key), or neither."
    )
    with pytest.raises(CredentialError) as bare:
        ServiceConnection(ConnectionConfig("127.0.0.1:1", **half))
    assert str(bare.value) == (
        "a client certificate (c) needs TLS, and no certificate authority is given. Name the file "
        "with the service's: --tls-ca (in Python, tls_ca)."
    )


def test_a_client_sends_its_token_over_tls_or_to_its_own_machine(tokens: Path) -> None:
    with pytest.raises(CredentialError) as bare:
        ServiceConnection(ConnectionConfig("shards.example:7070", token_file=tokens / "worker"))
    assert str(bare.value) == (
        "the token would travel to shards.example:7070 in clear text: no certificate "
        "authority is given. Name the file with the service's: --tls-ca (in Python, tls_ca)."
    )
    ServiceConnection(ConnectionConfig("localhost:7070", token_file=tokens / "worker")).close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "of what protects a service there is nothing; --tls-cert, --tls-key and one of "
            "--tls-client-ca and --tokens are needed. Pass them; or --insecure on a loopback "
            "address, where only this machine can call.",
        ),
        (
            ["--insecure", "--tls-cert", "c", "--tls-key", "k", "--tokens", "t"],
            "--insecure was given beside --tls-cert c --tls-key k --tokens t; a service is the "
            "one or the other. Leave out --insecure, or the rest.",
        ),
    ],
)
def test_the_command_wants_security_or_the_word(arguments: list[str], message: str) -> None:
    with pytest.raises(ServiceStartError, match=f"^{re.escape(message)}$"):
        CliRunner().invoke(app, ["shard-service", *arguments], catch_exceptions=False)


def test_another_certificates_key_is_refused(serve: Serve, pki: Authority, tokens: Path) -> None:
    cert, other = pki.issue("one")[0], pki.issue("two")[1]
    with pytest.raises(CredentialError, match="the key the certificate's own"):
        serve(tls_cert=cert, tls_key=other, tokens=tokens)


def get(url: str, pki: Authority, header: str = "", pair: Pair | None = None) -> tuple[int, str]:
    """The status and the page, or what of a refusal a browser acts on."""
    status, text, asks_for = answered(url, pki, header, pair)
    return status, text if status == 200 else asks_for


def told(url: str, pki: Authority, header: str = "", pair: Pair | None = None) -> tuple[int, str]:
    """The status and what a person reads, also of a refusal."""
    return answered(url, pki, header, pair)[:2]


def answered(url: str, pki: Authority, header: str, pair: Pair | None) -> tuple[int, str, str]:
    context = ssl.create_default_context(cafile=pki.ca)
    if pair:
        context.load_cert_chain(*pair)
    request = urllib.request.Request(url, headers={"Authorization": header} if header else {})
    try:
        with urllib.request.urlopen(request, context=context, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode(), ""
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers.get("WWW-Authenticate", "")


def basic(token: str) -> str:
    return "Basic " + base64.b64encode(f"me:{token}".encode()).decode()


def test_the_pages_open_to_operators_and_viewers_and_the_probe_to_all(
    serve: Serve, pki: Authority, tokens: Path
) -> None:
    server = serve(tokens=tokens, tls_client_ca=pki.ca, metrics_listen="127.0.0.1:0")
    base = f"https://127.0.0.1:{server.metrics_port}"
    assert get(f"{base}/healthz", pki) == (200, "serving\n")
    for page in ("/", "/events", "/metrics", "/nothing"):
        assert get(f"{base}{page}", pki) == (401, 'Basic realm="gmeta", charset="UTF-8"')
    assert get(f"{base}/metrics", pki, "Bearer nobody-0123456789")[0] == 401
    assert get(f"{base}/metrics", pki, "Basic ???")[0] == 401
    assert get(f"{base}/metrics", pki, "Basic \xe9")[0] == 401
    expected = (401, "show a token of the role operator or viewer\n")
    assert told(f"{base}/metrics", pki, "Bearer nobody-0123456789") == expected
    of_worker = 403, "a worker's credentials do not open this page\n"
    assert told(f"{base}/metrics", pki, f"Bearer {TOKENS['worker']}") == of_worker
    assert told(f"{base}/metrics", pki, pair=pki.issue("rank0", "worker")) == of_worker
    for header in (f"Bearer {TOKENS['viewer']}", basic(TOKENS["operator"])):
        code, text = get(f"{base}/metrics", pki, header)
        assert code == 200
        assert "antdt_service_epoch 1.0" in text
    assert get(f"{base}/metrics", pki, pair=pki.issue("dashboard", "viewer"))[0] == 200
    assert get(f"{base}/nothing", pki, f"Bearer {TOKENS['viewer']}")[0] == 404
    plain = base.replace("https", "http")
    with pytest.raises(OSError, match=r".*"):
        urllib.request.urlopen(f"{plain}/healthz", timeout=PATIENCE_S)


def test_one_connection_cannot_take_more_than_its_rate() -> None:
    clock = FakeClock()
    limit = RateLimit(calls_per_s=10, burst=5, clock=clock, max_callers=2)
    assert [limit.admit("a") for _ in range(6)] == [True] * 5 + [False]
    assert limit.admit("b")
    clock.advance(0.2)
    assert [limit.admit("a") for _ in range(3)] == [True, True, False]


def test_of_too_many_callers_the_one_silent_for_longest_is_forgotten() -> None:
    limit = RateLimit(calls_per_s=10, burst=1, clock=FakeClock(), max_callers=2)
    assert [limit.admit(caller) for caller in "aba"] == [True, True, False]
    assert limit.admit("c")  # in the place of b, which spoke before a did
    assert [limit.admit(caller) for caller in "acb"] == [False, False, True]


def test_a_caller_with_many_connections_has_one_rate_for_all_of_them() -> None:
    clock = FakeClock()
    limits = CallLimits(connection_calls_per_s=5, identity_calls_per_s=10, clock=clock)
    told = [limits.refusal(f"connection {i}", "worker 10.0.0.1") for i in range(30)]
    assert told[:20] == [None] * 20
    assert set(told[20:]) == {
        "this caller, over all its connections, makes more than 10 calls a second. Retry after a "
        "pause, and ask for more shards a call."
    }
    assert limits.refusal("connection 0", "worker 10.0.0.2") is None
    clock.advance(0.5)
    found = [limits.refusal("new", "worker 10.0.0.1") is None for _ in range(6)]
    assert found == [True] * 5 + [False]


def test_workers_count_by_address_and_everybody_else_by_credential(
    serve: Serve, pki: Authority, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []

    def refusal(_: CallLimits, connection: str, identity: str) -> None:
        counted.append(identity)

    monkeypatch.setattr(CallLimits, "refusal", refusal)
    server = serve(tokens=tokens, tls_client_ca=pki.ca)
    for role in ("worker", "operator"):
        for _ in range(2):  # a connection each
            status(server, pki.ca, pki.issue(f"{role}0", role), tokens / role)
    worker, operator = "worker worker worker0 ipv4:127.0.0.1", "operator operator operator0"
    assert counted == [worker, worker, operator, operator]


def test_a_runaway_connection_is_told_to_pause_and_its_calls_succeed_later(
    serve: Serve, pki: Authority, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gmeta.antdt.service.shard_server.CallLimits", limits_by_count)
    told: list[str | None] = []
    refusal = CallLimits.refusal

    def heard(*call: Any) -> str | None:
        told.append(refusal(*call))
        return told[-1]

    monkeypatch.setattr(CallLimits, "refusal", heard)
    server = serve(tokens=tokens)
    assert [call_as(server, pki, tokens / "worker", "Status") for _ in range(3)] == ["OK"] * 3
    config = ConnectionConfig(
        server.address, PATIENCE_S, PATIENCE_S, pki.ca, token_file=tokens / "worker"
    )
    connection = ServiceConnection(config)
    for _ in range(20):
        connection.call("Status", pb.StatusRequest)
    connection.close()
    calls = server.edge.metrics.registry.get_sample_value(
        "antdt_calls_total", {"rpc": "Status", "code": "OK"}
    )
    assert calls == 23
    assert any(told)


def test_no_secret_is_logged(
    serve: Serve, pki: Authority, tokens: Path, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    logger = logging.getLogger(LOGGER_NAME)
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.DEBUG, LOGGER_NAME)
    server = serve(tokens=tokens, metrics_listen="127.0.0.1:0")
    with ShardClient(server.address, "rank0", tls_ca=pki.ca, token_file=tokens / "worker"):
        pass
    viewer = TOKENS["viewer"]
    page = f"https://127.0.0.1:{server.metrics_port}/metrics"
    get(f"{page}?token={viewer}", pki, f"Bearer {viewer}")
    (tokens / "worker").write_text("short\n")
    status(server, pki.ca, token=tokens / "viewer")
    logger.removeHandler(caplog.handler)
    lines = [json.dumps(getattr(one, "fields", {})) + one.getMessage() for one in caplog.records]
    written = "\n".join(lines) + "".join(capfd.readouterr())
    assert "serving" in written
    assert not any(token in written for token in [*TOKENS.values(), "short\n", "PRIVATE KEY"])
