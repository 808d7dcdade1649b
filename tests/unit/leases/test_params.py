"""The shapes that travel in kv_transfer_params."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvduplex_transfer.leases.errors import InvalidLeaseError
from kvduplex_transfer.leases.params import (
    CLAIM_KEY,
    LEASE_ID_MAX_LENGTH,
    RETENTION_KEY,
    ClaimOffer,
    Retention,
    check_lease_id,
    new_lease_id,
    prefill_params,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
IDS = st.from_regex(r"[A-Za-z0-9._:\-]{1,128}", fullmatch=True)


@given(IDS, st.none() | st.floats(min_value=0.001, max_value=86_400.0))
def test_retention_survives_json(lease_id: str, ttl_s: float | None) -> None:
    retention = Retention(lease_id, ttl_s)
    assert Retention.parse(json.loads(json.dumps(retention.to_params()))) == retention


def test_retention_of_nothing_is_its_own_shape() -> None:
    assert Retention.none().to_params() == {RETENTION_KEY: {"retain": False}}
    assert Retention.parse({RETENTION_KEY: {"retain": False, "id": "x"}}) == Retention.none()


@given(IDS)
def test_claim_offer_survives_json_and_is_a_prefill_request(lease_id: str) -> None:
    offer = ClaimOffer(lease_id, "tcp://10.0.0.7:5801")
    params = json.loads(json.dumps(offer.to_params()))
    assert ClaimOffer.parse(params) == offer
    assert params.items() >= prefill_params().items()


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {RETENTION_KEY: None, CLAIM_KEY: None}])
def test_absent_entries_are_none(params: dict[str, Any] | None) -> None:
    assert Retention.parse(params) is None
    assert ClaimOffer.parse(params) is None


@pytest.mark.parametrize("value", ["", "a b", "a\n", "ü", "x" * (LEASE_ID_MAX_LENGTH + 1), 7, None, ["a"], {"a": 1}])
def test_bad_ids_are_named(value: object) -> None:
    with pytest.raises(InvalidLeaseError, match=r"^lease id .*expected 1 to 128"):
        check_lease_id(value)


def test_a_huge_id_is_not_echoed_in_full() -> None:
    with pytest.raises(InvalidLeaseError) as caught:
        check_lease_id("x" * 10_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf"), 86_401, True, "30", []])
def test_bad_durations_are_refused(ttl_s: Any) -> None:
    with pytest.raises(InvalidLeaseError, match="ttl_s"):
        Retention.parse({RETENTION_KEY: {"id": "a", "ttl_s": ttl_s}})


@pytest.mark.parametrize(
    "endpoint",
    ["", "10.0.0.1:5", "tcp://h", "tcp://h:0", "tcp://h:65536", "ipc:///tmp/x", "tcp://h:1/x", "tcp://a@h:1", None, 4],
)
def test_bad_endpoints_are_refused(endpoint: Any) -> None:
    with pytest.raises(InvalidLeaseError, match="endpoint"):
        ClaimOffer.parse({CLAIM_KEY: {"id": "a", "endpoint": endpoint}})


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5800", "tcp://[::1]:5800", "tcp://d-0.svc.local:1"])
def test_good_endpoints_pass(endpoint: str) -> None:
    assert ClaimOffer("a", endpoint).endpoint == endpoint


@given(JSON, JSON)
def test_foreign_json_is_refused_or_read_never_a_crash(retention: Any, claim: Any) -> None:
    params = {RETENTION_KEY: retention, CLAIM_KEY: claim}
    for shape in (Retention, ClaimOffer):
        try:
            parsed = shape.parse(params)
        except InvalidLeaseError:
            continue
        assert parsed is None or isinstance(parsed, shape)


def test_new_ids_are_valid_and_differ() -> None:
    ids = {new_lease_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(check_lease_id(lease_id) == lease_id for lease_id in ids)
