"""Reading and subtracting metrics pages."""

from __future__ import annotations

import pytest

from kvduplex_bench.cluster import free_ports
from kvduplex_bench.errors import UnreachableError
from kvduplex_bench.scrape import parse, scrape

PAGE = """\
# HELP vllm:prompt_tokens_by_source_total Prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 10.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 4.0
vllm:prompt_tokens_by_source_total{engine="1",source="external_kv_transfer"} 3.0
"""
NAME = "vllm:prompt_tokens_by_source_total"


def test_total_sums_over_the_labels_that_are_not_named() -> None:
    reading = parse(PAGE)
    assert reading.total(NAME, source="external_kv_transfer") == 7
    assert reading.total(NAME, source="external_kv_transfer", engine="1") == 3
    assert reading.total(NAME) == 17
    assert reading.total("absent") == 0


def test_difference_counts_new_samples_from_zero() -> None:
    later = parse(PAGE.replace(" 4.0", " 9.0") + f'{NAME}{{engine="2",source="external_kv_transfer"}} 2.0\n')
    assert later.since(parse(PAGE)).total(NAME, source="external_kv_transfer") == 7


def test_nobody_listening_is_a_clear_error() -> None:
    (port,) = free_ports(1)
    with pytest.raises(UnreachableError, match=rf"127\.0\.0\.1:{port}/metrics could not be read"):
        scrape(f"http://127.0.0.1:{port}")
