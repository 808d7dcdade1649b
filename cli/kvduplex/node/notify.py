"""systemd's readiness protocol: datagrams to the socket in ``NOTIFY_SOCKET`` (man sd_notify, man systemd.service)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Self

__all__ = ["Notifier", "SharedNotifier"]

_MICROSECONDS = 1_000_000
_PATIENCE_S = 5.0
"""Linux queues about ten datagrams a socket; systemd takes them in milliseconds, unless the machine is overloaded."""


class Notifier:
    """Tells systemd how a service is; says nothing when systemd did not start it.

    Args:
        address: Path of the socket, or its abstract name with a leading ``@``; None for silence.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address

    @property
    def address(self) -> str | None:
        """Path of the socket, or None."""
        return self._address

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """The notifier that ``NOTIFY_SOCKET`` names."""
        return cls(environ.get("NOTIFY_SOCKET") or None)

    def ready(self, status: str) -> None:
        """The service does its work now."""
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, text: str) -> None:
        """A line for ``systemctl status``."""
        self._send(f"STATUS={text}")

    def alive(self) -> None:
        """Feed the watchdog."""
        self._send("WATCHDOG=1")

    def stopping(self, status: str) -> None:
        """The service ends, and needs time for it."""
        self._send(f"STOPPING=1\nSTATUS={status}")

    def extend(self, seconds: float) -> None:
        """Starting or stopping takes at least `seconds` more."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * _MICROSECONDS)}")

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        target = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        # Best effort, as systemd's own library does it: a lost datagram must not end an engine.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.settimeout(_PATIENCE_S)
            sock.sendto(message.encode(), target)


class SharedNotifier(Notifier):
    """For one of several programs of a service: the end of one is not the end of the service."""

    def stopping(self, status: str) -> None:
        """Only a line for ``systemctl status``."""
        self.status(status)
