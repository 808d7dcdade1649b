"""Settings of the connector."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvduplex_connector.settings import LeaseSettings
from kvduplex_transfer.leases.errors import LeaseConfigError


def test_every_key_has_a_default_and_other_parts_of_the_engine_keep_theirs() -> None:
    assert LeaseSettings.parse({"backends": ["UCX"], "bidirectional_kv_xfer": True}) == LeaseSettings()


def test_every_key_is_read() -> None:
    given: dict[str, Any] = {
        "lease_host": "*",
        "lease_port": 7000,
        "lease_ttl_s": 5,
        "decoder_kv_blocks_ttl": 60,
        "retention_budget": 0.25,
        "reclaim_watermark": 0.1,
        "kv_recompute_threshold": 128,
        "claim_timeout_s": 0.5,
        "claim_ttl_s": 10,
        "lease_max_claims": 5,
        "lease_peers": ["10.0.0.1:5800"],
        "lease_curve_secret_file": "a",
        "lease_curve_server_file": "b",
        "lease_curve_clients_dir": "c",
    }
    settings = LeaseSettings.parse(given)
    assert given.keys() == {entry.name for entry in fields(LeaseSettings)}
    assert settings.lease_peers == {"10.0.0.1:5800"}
    assert settings.lease_curve_clients_dir == Path("c")
    for key in given.keys() - {"lease_peers", "lease_curve_secret_file"}:
        assert getattr(settings, key) != getattr(LeaseSettings(), key)


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("lease_port", 0, "from 1 to 65535"),
        ("lease_port", 5800.5, "whole number"),
        ("lease_ttl_s", -1, "from 0.1 to 86400"),
        ("lease_ttl_s", float("nan"), "from 0.1"),
        ("lease_ttl_s", "30", "number"),
        ("retention_budget", 1.5, "from 0 to 0.95"),
        ("reclaim_watermark", True, "number from 0 to 0.5"),
        ("kv_recompute_threshold", -64, "whole number from 0"),
        ("claim_timeout_s", 0, "from 0.001 to 30"),
        ("claim_ttl_s", 1, "from 2 to 600"),
        ("lease_host", "", "text that is not empty"),
        ("lease_peers", "10.0.0.1:5800", "list of HOST:PORT"),
        ("lease_peers", ["10.0.0.1"], "list of HOST:PORT"),
        ("lease_peers", ["tcp://10.0.0.1:5900"], "list of HOST:PORT"),
        ("lease_peers", ["10.0.0.1:0"], "list of HOST:PORT"),
        ("lease_peers", ["fe80::1:5900"], "list of HOST:PORT"),
        ("lease_curve_server_file", "d.key", "needs lease_curve_secret_file"),
        ("lease_curve_clients_dir", "keys", "needs lease_curve_secret_file"),
        ("lease_prot", 5800, "did you mean lease_port"),
        ("retention_of_everything_for_ever", 1, "known keys: claim_timeout_s"),
    ],
)
def test_wrong_values_are_refused_with_key_value_and_range(key: str, value: object, hint: str) -> None:
    with pytest.raises(LeaseConfigError, match=key) as caught:
        LeaseSettings.parse({key: value})
    assert hint in str(caught.value)


def test_a_renewal_may_not_outlive_the_lease() -> None:
    with pytest.raises(LeaseConfigError, match="lease_ttl_s = 600: expected at most decoder_kv_blocks_ttl = 480"):
        LeaseSettings.parse({"lease_ttl_s": 600})


def test_half_a_set_of_keys_is_refused() -> None:
    settings = LeaseSettings.parse({"lease_curve_secret_file": "a"})
    with pytest.raises(LeaseConfigError, match="lease_curve_server_file is missing"):
        settings.curve_client()
    assert settings.curve_server() is not None
    assert LeaseSettings().curve_client() is None
    assert LeaseSettings().curve_server() is None
