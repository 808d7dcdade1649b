"""The compact table against a dictionary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_router.events.table import TableFullError, WordTable

# Few distinct low bits, so that clusters form, wrap around the table's end and are closed again.
KEYS = st.builds(lambda low, high: (high << 40) | low, st.sampled_from([1, 2, 3, 60, 61, 62, 63]), st.integers(0, 9))
STEPS = st.lists(
    st.tuples(st.sampled_from(["set", "clear", "pop", "put_new"]), KEYS, st.integers(0, 63), st.integers(0, 1)),
    max_size=200,
)


@given(STEPS)
def test_it_answers_like_a_dictionary(steps: list[tuple[str, int, int, int]]) -> None:
    table, model = WordTable(words=2), dict[int, list[int]]()
    for step, key, bit, word in steps:
        match step:
            case "set":
                table.set_bits(key, 1 << bit, word)
                model.setdefault(key, [0, 0])[word] |= 1 << bit
            case "clear":
                table.clear_bits(key, 1 << bit, word)
                if key in model:
                    model[key][word] &= ~(1 << bit)
                    if not any(model[key]):
                        del model[key]
            case "pop":
                assert table.pop(key) == model.pop(key, [None])[0]
            case _:
                assert table.put_new(key, bit) is (key not in model)
                model.setdefault(key, [bit, 0])
    assert len(table) == len(model)
    for key, (low, high) in model.items():
        assert table.row(key) == low | high << 64
        assert (table.get(key, 0), table.get(key, 1)) == (low, high)
    assert sorted(table.values()) == sorted(low for low, _ in model.values())
    assert table.get(12345) is None
    assert table.row(12345) == 0


def test_growing_keeps_every_entry() -> None:
    table = WordTable()
    for i in range(1, 5_000):
        table.put(i * 0x9E3779B97F4A7C15 % 2**64, i)
    assert len(table) == 4_999
    assert all(table.get(i * 0x9E3779B97F4A7C15 % 2**64) == i for i in range(1, 5_000))


def test_a_fixed_table_refuses_what_is_too_much_and_takes_it_once_there_is_room() -> None:
    table = WordTable(10, fixed=True)
    for key in range(1, 11):
        table.put(key, key)
    with pytest.raises(TableFullError):
        table.put(11, 11)
    table.put(10, 99)
    assert table.pop(3) == 3
    table.put(11, 11)
    assert len(table) == 10
