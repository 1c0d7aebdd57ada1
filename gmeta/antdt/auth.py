"""Who may call: TLS for the wire, a shared token for the callers. Both optional; without them
listen on a trusted network only."""

import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import grpc

from gmeta.antdt.errors import AntdtError
from gmeta.errors import UserError

AUTHORIZATION_KEY = "authorization"
_OPEN_PREFIX = "/grpc.health."  # probes carry no token


class CredentialError(AntdtError, UserError):
    """A certificate, key or token file is missing, unreadable or empty."""


def read_token(path: Path) -> str:
    """The token in a file, without the line break. Raises CredentialError."""
    token = _read(path).decode().strip()
    if not token:
        raise CredentialError(
            f"the token file {path} is empty; it must hold one line. Write a long random token to "
            "it."
        )
    return token


def server_credentials(cert: Path | None, key: Path | None, client_ca: Path | None) -> Any:
    """TLS for the server, with client certificates when `client_ca` is given; None without TLS.
    Raises CredentialError."""
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise CredentialError(
            f"TLS needs a certificate and its key; given are cert={cert} and key={key}. Pass "
            "--tls-cert and --tls-key."
        )
    roots = _read(client_ca) if client_ca else None
    return grpc.ssl_server_credentials([(_read(key), _read(cert))], roots, roots is not None)


def client_credentials(ca: Path | None, cert: Path | None, key: Path | None) -> Any:
    """TLS for a client that trusts `ca`; None without TLS. Raises CredentialError."""
    if ca is None:
        return None
    return grpc.ssl_channel_credentials(
        _read(ca), _read(key) if key else None, _read(cert) if cert else None
    )


def _read(path: Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CredentialError(
            f"cannot read {path}: {error.strerror}. Name a readable file."
        ) from error


@final
class TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses every call without the token, health probes apart."""

    def __init__(self, token_file: Path) -> None:
        self._expected = f"Bearer {read_token(token_file)}".encode()
        self._refuse = grpc.unary_unary_rpc_method_handler(_refuse_call)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """See grpc.ServerInterceptor."""
        if details.method.startswith(_OPEN_PREFIX):
            return continuation(details)
        given = dict(details.invocation_metadata).get(AUTHORIZATION_KEY, "")
        if hmac.compare_digest(str(given).encode(), self._expected):
            return continuation(details)
        return self._refuse


def _refuse_call(request: Any, context: Any) -> None:
    context.set_trailing_metadata((("gmeta-reason", "UNAUTHENTICATED"),))
    context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "the call carries no valid token; this service needs one. Pass the token file to the "
        "client.",
    )
