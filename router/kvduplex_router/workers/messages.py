"""What workers and the hub say to each other; processes of one router and one version, on one machine."""

from __future__ import annotations

from typing import Final

import msgspec

from kvduplex_router.api.view import Topic
from kvduplex_router.conversations.ledger import Taken
from kvduplex_router.conversations.reference import Reference
from kvduplex_router.fleet.members import Member, Roster

__all__ = [
    "Admit",
    "Collect",
    "Collected",
    "Dismiss",
    "Done",
    "Drain",
    "Enrol",
    "FromHub",
    "FromWorker",
    "Put",
    "PutBack",
    "Release",
    "Scrape",
    "Scraped",
    "Take",
    "Took",
    "decode_from_hub",
    "decode_from_worker",
    "encode",
]


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


class Take(_Message, frozen=True, tag="take"):
    """Take a reference; answered by `Took`."""

    number: int
    keys: list[bytes]


class Put(_Message, frozen=True, tag="put"):
    """Store a reference."""

    key: bytes
    reference: Reference
    keep_s: float


class PutBack(_Message, frozen=True, tag="put_back"):
    """Store a reference again that was not used."""

    key: bytes
    reference: Reference
    keep_s: float


class Release(_Message, frozen=True, tag="release"):
    """Give a lease back."""

    engine: str
    lease: str


class Collect(_Message, frozen=True, tag="collect"):
    """Ask what all workers say of a topic; answered by `Collected`."""

    number: int
    topic: Topic
    most: int


class Scraped(_Message, frozen=True, tag="scraped"):
    """What a worker says itself, in answer to `Scrape`."""

    number: int
    text: bytes


class Drain(_Message, frozen=True, tag="drain"):
    """Stop or resume sending to an engine; the hub tells all workers."""

    engine: str
    draining: bool


class Took(_Message, frozen=True, tag="took"):
    """Answer to `Take`."""

    number: int
    taken: Taken | None


class Collected(_Message, frozen=True, tag="collected"):
    """Answer to `Collect`: one text of each worker that answered; of metrics one of all."""

    number: int
    texts: list[bytes]


class Scrape(_Message, frozen=True, tag="scrape"):
    """Ask a worker what it says of a topic."""

    number: int
    topic: Topic
    most: int


class Admit(_Message, frozen=True, tag="admit"):
    """Add an engine; answered by `Done` once the sender has been told the new roster."""

    number: int
    member: Member


class Dismiss(_Message, frozen=True, tag="dismiss"):
    """Take an engine out; answered likewise."""

    number: int
    name: str


class Done(_Message, frozen=True, tag="done"):
    """Answer to `Admit` and `Dismiss`: why it was not done, or None."""

    number: int
    refusal: str | None


class Enrol(_Message, frozen=True, tag="enrol"):
    """Who belongs to the fleet now."""

    roster: Roster


FromWorker = Take | Put | PutBack | Release | Collect | Scraped | Drain | Admit | Dismiss
FromHub = Took | Collected | Scrape | Drain | Done | Enrol

_ENCODER: Final = msgspec.msgpack.Encoder()
_FROM_WORKER: Final = msgspec.msgpack.Decoder(FromWorker)
_FROM_HUB: Final = msgspec.msgpack.Decoder(FromHub)


def encode(message: FromWorker | FromHub) -> bytes:
    """A message with its length in front."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(4, "big") + body


def decode_from_worker(body: bytes) -> FromWorker:
    """A message of a worker."""
    return _FROM_WORKER.decode(body)


def decode_from_hub(body: bytes) -> FromHub:
    """A message of the hub."""
    return _FROM_HUB.decode(body)
