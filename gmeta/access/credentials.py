"""Secrets and certificates in files: read, checked, and read again after they are replaced."""

import functools
import ipaddress
import logging
import re
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar, final

import grpc

from gmeta.access.errors import AntdtError
from gmeta.access.log import event
from gmeta.errors import UserError

Value = TypeVar("Value")
_TOKEN = re.compile(r"[!-~]+")  # what an HTTP header may hold


# No message, log line or config ever holds a secret: they name the path of its file.
class CredentialError(AntdtError, UserError):
    """A certificate, key or token file is missing, unreadable, empty or does not fit."""


def read_file(path: Path) -> bytes:
    """Return the content of a credential file. Raise CredentialError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CredentialError(
            f"cannot read {path}: {error.strerror}. Name a readable file."
        ) from error


def read_tokens(path: Path) -> list[str]:
    """Return the tokens in a file, one a line. Raise CredentialError."""
    try:
        lines = [line.strip() for line in read_file(path).decode().splitlines()]
    except UnicodeDecodeError as error:
        raise CredentialError(
            f"the token file {path} is no text; it must hold one token a line. Write a long random "
            "token to it."
        ) from error
    # Several while an old token is being replaced.
    tokens = [line for line in lines if line]
    if not tokens:
        raise CredentialError(
            f"the token file {path} is empty; it must hold one line. Write a long random token to "
            "it."
        )
    if not all(_TOKEN.fullmatch(token) for token in tokens):
        raise CredentialError(
            f"a token in {path} has a character that no call can carry; allowed are visible ASCII "
            "characters without spaces. Make one with: openssl rand -hex 32"
        )
    return tokens


# A connection shows the same certificate at each of its calls: it is parsed once.
@functools.lru_cache(maxsize=1024)
def end_of_certificate(pem: bytes) -> float:
    """Return when a verified certificate expires, in seconds since 1970."""
    # The standard library reads no certificate that it has not verified itself. This parses RFC
    # 5280, section 4.1, as far as `notAfter`.
    ((_, certificate),) = _parse_der(ssl.PEM_cert_to_DER_cert(pem.decode()))
    # 0xA0 is the version, which may be absent (section 4.1.2.1).
    fields = [value for tag, value in _parse_der(_parse_der(certificate)[0][1]) if tag != 0xA0]
    _, (tag, text) = _parse_der(fields[3])  # after serial number, algorithm and issuer
    # 0x17 is UTCTime, for dates before 2050 (section 4.1.2.5.1).
    form = "%y%m%d%H%M%SZ" if tag == 0x17 else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode(), form).replace(tzinfo=UTC).timestamp()


def _parse_der(data: bytes) -> list[tuple[int, bytes]]:
    """Return (tag, content) of consecutive DER values."""
    values = []
    while data:
        length, begin = data[1], 2
        if length & 0x80:  # the length of the length
            begin = 2 + (length & 0x7F)
            length = int.from_bytes(data[2:begin])
        values.append((data[0], data[begin : begin + length]))
        data = data[begin + length :]
    return values


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@final
class WatchedFiles:
    """Notices that one of some files was replaced or rewritten."""

    def __init__(self, paths: Sequence[Path | None]) -> None:
        self._paths = [path for path in paths if path is not None]
        self._lock = threading.Lock()
        self._seen = self._stat_all()

    def have_changed(self) -> bool:
        """Return whether a file has changed since the last call."""
        # Of threads that look at once, one sees the change and reads the files.
        with self._lock:
            now = self._stat_all()
            different = now != self._seen
            self._seen = now
            return different

    def _stat_all(self) -> list[tuple[int, int, int] | None]:
        return [_stat_stamp(path) for path in self._paths]


@final
class ReloadedValue(Generic[Value]):
    """What `read` makes of some files, read again after one of them was replaced."""

    def __init__(
        self, paths: Sequence[Path | None], read: Callable[[], Value], failure: str
    ) -> None:
        """Read the files. Raise CredentialError."""
        self._files = WatchedFiles(paths)
        self._read = read
        self._failed = failure
        self.value = read()

    def refresh(self) -> bool:
        """Return whether the value was replaced by this call."""
        if not self._files.have_changed():
            return False
        try:
            self.value = self._read()
        except CredentialError as error:
            # The old value stays: a file half replaced must not lock everybody out.
            event(logging.ERROR, self._failed, message=str(error))
            return False
        return True


def _stat_stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    # Inode and size too: a file replaced within one tick of the clock keeps the time. `stat`
    # follows the symbolic links by which Kubernetes swaps a mounted Secret.
    return status.st_mtime_ns, status.st_ino, status.st_size


@dataclass(frozen=True)
class ServerTls:
    """The server's certificate and key, and the authority that signs its callers' certificates."""

    cert: Path
    key: Path
    client_ca: Path | None

    @staticmethod
    def of(cert: Path | None, key: Path | None, client_ca: Path | None) -> "ServerTls | None":
        """Return the three files, or None without TLS. Raise CredentialError for half a pair."""
        if cert is None and key is None and client_ca is None:
            return None
        if cert is None or key is None:
            options = {"--tls-cert": cert, "--tls-key": key}
            missing = " and ".join(name for name, path in options.items() if path is None)
            raise CredentialError(
                f"TLS needs a certificate and its key; not given: {missing}. Pass both."
            )
        return ServerTls(cert, key, client_ca)

    @property
    def files(self) -> list[Path]:
        """Return the two or three files."""
        return [self.cert, self.key, *([self.client_ca] if self.client_ca else [])]

    def context(self) -> ssl.SSLContext:
        """Return the context for HTTP over TLS. Raise CredentialError for unusable files."""
        for path in self.files:
            read_file(path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # An encrypted key must fail here, not ask a terminal for its passphrase.
            context.load_cert_chain(self.cert, self.key, password="")
            if self.client_ca:
                context.load_verify_locations(self.client_ca)
                # Not CERT_REQUIRED: a probe needs no proof, and a token is a proof too.
                context.verify_mode = ssl.CERT_OPTIONAL
        except (ssl.SSLError, ValueError) as error:
            raise CredentialError(
                f"the certificate {self.cert}, its key {self.key} or the authority "
                f"{self.client_ca} cannot be used: {error}. They must be PEM, and the key the "
                "certificate's own and not encrypted."
            ) from error
        return context


def take_port(server: Any, address: str, tls: ServerTls | None) -> int:
    """Bind a gRPC server to an address; return the port. Raise CredentialError or RuntimeError."""
    if tls is None:
        return int(server.add_insecure_port(address))

    def read() -> Any:
        tls.context()  # for its error alone
        pair = (read_file(tls.key), read_file(tls.cert))
        roots = read_file(tls.client_ca) if tls.client_ca else None
        return grpc.ssl_server_certificate_configuration([pair], roots)

    # gRPC asks `fetch` at each new connection, so replaced files take effect at once.
    configuration = ReloadedValue(tls.files, read, "certificate_not_rotated")

    def fetch() -> Any:
        # None tells gRPC to go on with what it has.
        if not configuration.refresh():
            return None
        event(logging.INFO, "certificate_rotated", cert=str(tls.cert))
        return configuration.value

    is_shown = tls.client_ca is not None
    credentials = grpc.dynamic_ssl_server_credentials(configuration.value, fetch, is_shown)
    return int(server.add_secure_port(address, credentials))


def client_credentials(ca: Path | None, cert: Path | None, key: Path | None) -> Any:
    """Return a client's TLS, or None without `ca`. Raise CredentialError."""
    if ca is None:
        if cert is not None or key is not None:
            raise CredentialError(
                f"a client certificate ({cert or key}) needs TLS, and no certificate authority is "
                "given. Name the file with the service's: --tls-ca (in Python, tls_ca)."
            )
        return None
    if (cert is None) != (key is None):
        raise CredentialError(
            f"a client certificate needs its key; only {cert or key} is given. Pass both, "
            "--tls-cert and --tls-key (in Python, tls_cert and tls_key), or neither."
        )
    return grpc.ssl_channel_credentials(
        read_file(ca), read_file(key) if key else None, read_file(cert) if cert else None
    )


@final
class Bearer:
    """The caller's token as metadata of each call, read again after its file is replaced."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raise CredentialError."""
        self._token = ReloadedValue([path], lambda: read_tokens(path)[0], "token_not_rotated")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of the next call; an unreadable file leaves the old token."""
        self._token.refresh()
        return (("authorization", f"Bearer {self._token.value}"),)
