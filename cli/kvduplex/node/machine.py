"""This machine as its services see it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvduplex.node.config import KeySource, NodeConfig, NodeRole
from kvduplex.node.engine import LOOPBACK
from kvduplex.node.manifest import ImageManifest
from kvduplex.node.metadata import InstanceMetadata
from kvduplex.node.notify import Notifier
from kvduplex.node.secrets import read_secret, single_key

if TYPE_CHECKING:
    import boto3

__all__ = ["Machine", "stop_event", "write_private"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine and what runs on it.

    Attributes:
        config: The node file.
        manifest: What its image was made of.
        environ: Environment of the service.
        metadata: The instance metadata service.
        aws: Opens a boto3 session; called only when AWS is needed.
        notifier: Who is told how the service is.
        runtime: Folder of this service's own, gone after it.
        cache: Folder for what is worth keeping between starts.
        report: Is told what is going on.
    """

    config: NodeConfig
    manifest: ImageManifest
    environ: Mapping[str, str]
    metadata: InstanceMetadata
    aws: Callable[[], boto3.Session]
    notifier: Notifier
    runtime: Path
    cache: Path
    report: Callable[[str], None]

    def address(self) -> str:
        """Where peers reach this machine.

        Raises:
            MetadataServiceError: It has to be asked for, and nobody answers.
        """
        if self.config.role is NodeRole.ALL:
            return LOOPBACK
        return self.config.engine.advertised_host or self.metadata.private_address()

    def engine_key(self) -> str | None:
        """The key of the engines, when there is one.

        Raises:
            SecretError: It cannot be read.
        """
        return self._single_key(self.config.keys.engines)

    def state_password(self) -> str | None:
        """The password of the store that routers share, when there is one.

        Raises:
            SecretError: It cannot be read.
        """
        return self._single_key(self.config.state.password)

    def _single_key(self, source: KeySource | None) -> str | None:
        if source is None:
            return None
        text = read_secret(source, client=lambda: self.aws().client("secretsmanager"))
        return single_key(text, where=source.secret or source.file or "")


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    part.replace(path)


def stop_event() -> asyncio.Event:
    """An event of the running loop that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
