"""What stands in front of every route: keys for clients, the admin key for operators."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import sha256
from typing import Final

from kvduplex_router.api.auth import Authenticator, Principal
from kvduplex_router.api.reply import Reply, Scope, Send, send_error
from kvduplex_router.errors import AuthenticationError, NotFoundError, RouterError
from kvduplex_router.requests.apis.messages import MESSAGES
from kvduplex_router.requests.apis.openai_errors import OPENAI_ERRORS

__all__ = ["PRINCIPAL", "PROBES", "Guard"]

PRINCIPAL: Final = "kvduplex.principal"
"""Key of the ASGI scope under which the caller is found."""

PROBES: Final = frozenset({"/health", "/ready", "/ping"})
"""Paths that machines ask whether the router serves: open to everybody, by GET and by HEAD."""
_OPERATORS: Final = ("/admin", "/metrics", "/openapi.json", "/dashboard")
_PAGE: Final = "/dashboard"
"""Holds nothing by itself, and asks for the key."""


class Guard:
    """Lets requests through, or refuses them.

    Args:
        authenticator: Checks clients' keys.
        admin_key: The operators' key; without one ``/admin`` does not exist, and ``/metrics`` and ``/dashboard``
            are open.
        operators: Whether operators' paths are served on this listener.
        clients: Whether all others are.
    """

    def __init__(
        self, authenticator: Authenticator, *, admin_key: str | None, operators: bool = True, clients: bool = True
    ) -> None:
        self._authenticator = authenticator
        self._admin = None if admin_key is None else sha256(admin_key.encode()).digest()
        self._operators = operators
        self._clients = clients

    def admit(self, path: str, headers: Mapping[bytes, bytes]) -> Principal | None:
        """The caller; None on paths that know none.

        Raises:
            AuthenticationError: The key is missing or not known.
            RateLimitedError: The key's rate is used up.
            NotFoundError: The path is not served here.
        """
        if path in PROBES:
            return None
        if path.startswith(_OPERATORS):
            self._admit_operator(path, headers)
            return None
        if not self._clients:
            raise NotFoundError(f"{path} is not served here")
        return self._authenticator.authenticate(headers)

    async def refuse(self, error: RouterError, scope: Scope, send: Send) -> None:
        """Answer a request that was not let through."""
        style = MESSAGES.errors if scope["path"].startswith(MESSAGES.path) else OPENAI_ERRORS
        headers = {"www-authenticate": "Bearer"} if isinstance(error, AuthenticationError) else {}
        await send_error(Reply(send), error, style, headers)

    def _admit_operator(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        if not self._operators or (self._admin is None and path.startswith("/admin")):
            raise NotFoundError(f"{path} is not served here")
        if self._admin is None or path == _PAGE:
            return
        given = headers.get(b"authorization", b"").partition(b" ")[2].strip()
        if not hmac.compare_digest(sha256(given).digest(), self._admin):
            raise AuthenticationError("this path asks for the admin key; send 'Authorization: Bearer ADMIN_KEY'")
