"""CURVE keys for the lease protocol: who may talk to a decode engine, unreadable to others.

Keys live in files made by ``zmq.auth.create_certificates`` and never in a setting, since engines print their settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from kvduplex_transfer.leases.errors import LeaseConfigError

__all__ = ["CurveClient", "CurveServer"]


@dataclass(frozen=True, slots=True)
class CurveServer:
    """Keys of a decode engine.

    Attributes:
        secret_file: Its key pair.
        clients_dir: Public keys of the peers it admits; None admits every peer that knows its public key.
    """

    secret_file: Path
    clients_dir: Path | None = None

    def apply(self, socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator | None:
        """Arm a socket before it binds; the caller stops the authenticator that is returned, if any.

        Raises:
            LeaseConfigError: A file is missing or holds no such key.
        """
        socket.curve_publickey, socket.curve_secretkey = _pair(self.secret_file)
        socket.curve_server = True
        if self.clients_dir is None:
            return None
        if not self.clients_dir.is_dir():
            raise LeaseConfigError(f"lease_curve_clients_dir = {self.clients_dir}: not a folder")
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve(domain="*", location=str(self.clients_dir))
        return authenticator


@dataclass(frozen=True, slots=True)
class CurveClient:
    """Keys of a prefill engine or router.

    Attributes:
        secret_file: Its key pair.
        server_file: The decode engines' public key.
    """

    secret_file: Path
    server_file: Path

    def apply(self, socket: zmq.Socket[Any]) -> None:
        """Arm a socket before it connects.

        Raises:
            LeaseConfigError: A file is missing or holds no such key.
        """
        socket.curve_publickey, socket.curve_secretkey = _pair(self.secret_file)
        socket.curve_serverkey = _load(self.server_file)[0]


def _pair(path: Path) -> tuple[bytes, bytes]:
    public, secret = _load(path)
    if secret is None:
        raise LeaseConfigError(f"CURVE key file {path}: holds no secret key; name the file that ends in .key_secret")
    return public, secret


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise LeaseConfigError(
            f"CURVE key file {path}: {error}; create keys with zmq.auth.create_certificates"
        ) from error
