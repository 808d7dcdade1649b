"""A log file copied to another place while others append to it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from kvduplex.node.relay import Relay, relaying


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "router.log"


def size_of(path: Path) -> int:
    return path.stat().st_size


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_what_is_added_is_copied_once(log: Path) -> None:
    copy = io.BytesIO()
    relay = Relay(log, to=copy)
    relay.copy()
    append(log, "one\n")
    relay.copy()
    append(log, "two\n")
    relay.copy()
    relay.copy()
    assert copy.getvalue() == b"one\ntwo\n"


def test_a_file_that_takes_its_place_is_read_from_its_beginning(log: Path) -> None:
    copy = io.BytesIO()
    relay = Relay(log, to=copy)
    append(log, "a long line of the first\n")
    relay.copy()
    log.rename(log.with_suffix(".1"))
    append(log, "second\n")
    relay.copy()
    assert copy.getvalue() == b"a long line of the first\nsecond\n"


def test_a_file_is_cut_once_it_is_long_and_writers_go_on(log: Path) -> None:
    copy = io.BytesIO()
    relay = Relay(log, to=copy, cut_at_bytes=10)
    with log.open("ab") as writer:
        for number in range(100):
            writer.write(b"%03d\n" % number)
            writer.flush()
            relay.copy()
            assert log.stat().st_size < 10
    assert copy.getvalue() == b"".join(b"%03d\n" % number for number in range(100))


async def test_the_rest_is_copied_when_the_program_has_ended(log: Path) -> None:
    copy = io.BytesIO()
    async with relaying(log, to=copy):
        append(log, "last words\n")
    assert copy.getvalue() == b"last words\n"


async def test_nothing_is_copied_unless_it_is_asked_for(log: Path) -> None:
    copy = io.BytesIO()
    async with relaying(log, to=copy, when=False):
        append(log, "kept\n")
    assert copy.getvalue() == b""
    assert size_of(log) == 5
