"""What protects a server: TLS, and the proofs that its callers show."""

from dataclasses import dataclass
from pathlib import Path

from gmeta.access.auth import Tokens
from gmeta.access.credentials import ServerTls

NOTHING = "nothing"  # of all options that protect a server


@dataclass(frozen=True, kw_only=True)
class Protection:
    """The files that protect a server; the config of a server extends it."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tokens: Path | None = None

    @property
    def secured(self) -> bool:
        """Return whether the wire is encrypted and every caller must prove who they are."""
        return self.tls_cert is not None and bool(self.tls_client_ca or self.tokens)

    @property
    def protection(self) -> str:
        """Return the options that are set, as on the command line."""
        options = {
            "--tls-cert": self.tls_cert,
            "--tls-key": self.tls_key,
            "--tls-client-ca": self.tls_client_ca,
            "--tokens": self.tokens,
        }
        return " ".join(f"{name} {path}" for name, path in options.items() if path) or NOTHING

    def load_credentials(self) -> tuple[ServerTls | None, Tokens | None]:
        """Return TLS and tokens, each None if it is not set. Raise CredentialError."""
        tls = ServerTls.of(self.tls_cert, self.tls_key, self.tls_client_ca)
        return tls, Tokens(self.tokens) if self.tokens else None
