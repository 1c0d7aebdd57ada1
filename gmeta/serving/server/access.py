"""Who may ask a server for what, by the roles of the data-shard service (docs/security.md)."""

import enum
import time
from collections.abc import Iterable
from typing import final

from gmeta.access.auth import Tokens
from gmeta.access.roles import Role, role_of_certificate
from gmeta.serving.server.request_errors import RequestError


class Right(enum.Enum):
    """What a caller asks for, and the roles that may."""

    INFER = frozenset({Role.WORKER, Role.OPERATOR})
    LOOK = frozenset({Role.OPERATOR, Role.VIEWER})
    # Whoever has a role; probes are not checked at all.
    METADATA = frozenset(Role)


@final
class ServerAccess:
    """Judges callers by a bearer token, a client certificate, or both where both are configured."""

    def __init__(self, tokens: Tokens | None, certificates: bool) -> None:
        self._tokens = tokens
        self._certificates = certificates

    def check(
        self,
        right: Right,
        authorization: str,
        uris: Iterable[str] | None,
        valid_until_s: float = float("inf"),
    ) -> None:
        """Raise RequestError unless the caller, with this verified certificate's `uris`, may."""
        roles: list[Role | None] = []
        if self._tokens is not None:
            roles.append(self._tokens.role_of(authorization))
        if self._certificates:
            # A connection may outlive the certificate that its handshake verified.
            is_valid = uris is not None and valid_until_s > time.time()
            roles.append(role_of_certificate(uris or ()) if is_valid else None)
        proven_roles = [role for role in roles if role is not None]
        # A browser or a scraper, which only reads, needs just one of the two.
        if roles and (
            not proven_roles or (right is not Right.LOOK and len(proven_roles) < len(roles))
        ):
            raise RequestError(
                401,
                "the request shows no valid token or client certificate; this server needs one "
                "(both, where it has both). Send Authorization: Bearer TOKEN, or connect with the "
                "certificate",
            )
        # Each must allow it: of two credentials the narrower one counts.
        for role in proven_roles:
            if role not in right.value:
                allowed = ", ".join(sorted(each.value for each in right.value))
                raise RequestError(
                    403,
                    f"the role {role.value} may not do this; {allowed} may. Use the credentials of "
                    "one of them",
                )
