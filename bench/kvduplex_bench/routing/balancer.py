"""What stands before several routers: a load balancer that keeps its connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvduplex_bench.routing.client import Line, Reply, asked_over, message

__all__ = ["Balancer", "Moved"]


@dataclass(slots=True)
class Moved:
    """Requests that went to another router than the first that was tried.

    Attributes:
        refused: Because it took no connection.
        closed: Because it had closed a kept connection and sent no byte of an answer.
    """

    refused: int = 0
    closed: int = 0


class Balancer:
    """Sends requests to routers in turns, over kept connections where there are some.

    A request is sent once more only where a load balancer may: its connection was refused, or it was written on a kept
    connection that turned out to be closed, and not a byte of an answer came. A router that refuses gets nothing until
    `serve` says that its health check passed.

    Args:
        ports: The routers', on loopback.
    """

    def __init__(self, ports: Sequence[int]) -> None:
        self.moved = Moved()
        self._serving = list(ports)
        self._kept: dict[int, list[Line]] = {port: [] for port in ports}
        self._turn = 0

    def serve(self, port: int) -> None:
        """A router takes requests again."""
        if port not in self._serving:
            self._serving.append(port)

    async def ask(self, body: bytes, headers: Mapping[str, str], timeout_s: float) -> Reply:
        """Send a chat request and read its answer; the reply says what went wrong."""
        sent = message(body, headers)
        return await asked_over(lambda: self._exchange(sent), timeout_s)

    def close(self) -> None:
        """Hang up everywhere."""
        for line in (line for lines in self._kept.values() for line in lines):
            line.close()

    async def _exchange(self, sent: bytes) -> Reply:
        while self._serving:
            self._turn += 1
            port = self._serving[self._turn % len(self._serving)]
            line = self._take_kept(port)
            kept = line is not None
            try:
                line = line or await Line.open(port)
            except ConnectionRefusedError:
                self.moved.refused += 1
                self._out(port)
                continue
            reply = await self._over(line, port, sent)
            if kept and reply.error and not reply.heard:
                self.moved.closed += 1
                continue
            return reply
        raise ConnectionRefusedError("no router takes connections")

    async def _over(self, line: Line, port: int, sent: bytes) -> Reply:
        try:
            reply = await line.exchange(sent)
        except BaseException:
            line.close()
            raise
        if line.usable:
            self._kept[port].append(line)
        return reply

    def _take_kept(self, port: int) -> Line | None:
        lines = self._kept[port]
        while lines:
            if (line := lines.pop()).usable:
                return line
        return None

    def _out(self, port: int) -> None:
        if port in self._serving:
            self._serving.remove(port)
