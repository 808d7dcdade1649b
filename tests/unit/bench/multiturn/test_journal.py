"""Records: torn lines, full disks, other runs, and going on."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvduplex_bench.errors import BenchError
from kvduplex_bench.multiturn.journal import FORMAT, Journal, read_lines


def opened(path: Path, fingerprint: str = "f") -> Journal:
    journal = Journal.open(path, fingerprint=fingerprint)
    journal.write("run", format=FORMAT, fingerprint=fingerprint)
    return journal


def test_a_second_sitting_knows_what_the_first_did(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.jsonl"
    first = opened(path)
    first.write("segment", segment="a")
    first.write("turn", segment="b")
    first.close()
    second = Journal.open(path, fingerprint="f")
    assert (second.done, second.sittings, second.complete) == ({"a"}, 1, False)
    second.write("end", complete=True)
    second.close()
    assert [line["kind"] for line in read_lines(path)] == ["run", "segment", "turn", "end"]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_cut_and_gone_on_after(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "run.jsonl"
    journal = opened(path)
    journal.write("segment", segment="a")
    journal.write("segment", segment="torn")
    journal.close()
    path.write_bytes(path.read_bytes()[:-cut])
    assert [line.get("segment") for line in read_lines(path)] == [None, "a"]
    again = Journal.open(path, fingerprint="f")
    assert again.done == {"a"}
    again.write("segment", segment="b")
    again.close()
    assert [line.get("segment") for line in read_lines(path)] == [None, "a", "b"]


def test_a_record_of_another_run_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = opened(path)
    journal.write("turn", segment="a")
    journal.close()
    before = path.read_bytes()
    with pytest.raises(BenchError, match="holds a run of another workload"):
        Journal.open(path, fingerprint="g")
    assert path.read_bytes() == before


def test_a_run_that_measured_nothing_is_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = opened(path)
    journal.write("end", complete=False)
    journal.close()
    other = opened(path, "g")
    other.close()
    assert (other.sittings, [line["fingerprint"] for line in read_lines(path)]) == (0, ["g"])


@pytest.mark.parametrize("content", [b"notes without an end of line", b'{"kind": "x"}\nand more', b"\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(BenchError, match="is no record of a run"):
        Journal.open(path, fingerprint="f")
    assert path.read_bytes() == content


def test_a_full_disk_is_said_with_the_way_on() -> None:
    journal = Journal.open(Path("/dev/full"), fingerprint="f")
    with pytest.raises(BenchError, match=r"No space left on device.*the same command again"):
        journal.write("run", format=FORMAT, fingerprint="f")
    journal.close()


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="cannot be written"):
        Journal.open(tmp_path / "file" / "run.jsonl", fingerprint="f")


@pytest.mark.parametrize("content", ["no json\n", "[1]\n", '{"a": 1}\n'])
def test_a_file_that_is_no_record_is_named_with_the_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x"
    path.write_text(content)
    with pytest.raises(BenchError, match="x:1: not "):
        list(read_lines(path))
