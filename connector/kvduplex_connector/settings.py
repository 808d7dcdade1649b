"""Settings of the connector, read from ``kv_connector_extra_config`` and checked before the engine starts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

from kvduplex_transfer.leases.curve import CurveClient, CurveServer
from kvduplex_transfer.leases.errors import LeaseConfigError

__all__ = ["LeaseSettings"]

_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "lease_port": (1, 65_535),
    "lease_ttl_s": (0.1, 86_400),
    "decoder_kv_blocks_ttl": (0.1, 86_400),
    "retention_budget": (0.0, 0.95),
    "reclaim_watermark": (0.0, 0.5),
    "kv_recompute_threshold": (0, 1_000_000),
    "claim_timeout_s": (0.001, 30),
    "claim_ttl_s": (2, 600),
    "lease_max_claims": (1, 65_536),
}
_INTEGERS: Final = frozenset({"lease_port", "kv_recompute_threshold", "lease_max_claims"})
_PATHS: Final = frozenset({"lease_curve_secret_file", "lease_curve_server_file", "lease_curve_clients_dir"})
_PORT_MAX: Final = 65_535
_OURS: Final = ("lease_", "claim_", "retention_", "reclaim_")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """Every key the connector reads, with its default. Times in seconds.

    Attributes:
        lease_host: Address a decode engine's lease endpoint binds; ``*`` for all.
        lease_port: Its port, plus the engine's data-parallel rank.
        lease_ttl_s: Life of a lease from a renewal that names no time.
        decoder_kv_blocks_ttl: Longest life of a lease, and its whole life without renewals.
        retention_budget: Share of a decode engine's KV blocks that leases may pin.
        reclaim_watermark: Share of a decode engine's KV blocks kept free by ending held leases.
        kv_recompute_threshold: Fewest tokens worth reading after local hits.
        claim_timeout_s: Longest wait for the answer to a claim.
        claim_ttl_s: Longest time from a claim to the end of its read.
        lease_max_claims: Claims a decode engine keeps open at once.
        lease_peers: ``HOST:PORT`` of the lease endpoints a prefill engine may ask; empty for any.
        lease_curve_secret_file: This engine's CURVE key pair; None for an open protocol.
        lease_curve_server_file: The decode engines' public key, needed by a prefill engine with CURVE.
        lease_curve_clients_dir: Public keys a decode engine admits; None for all who know its own.
    """

    lease_host: str = "127.0.0.1"
    lease_port: int = 5800
    lease_ttl_s: float = 30.0
    decoder_kv_blocks_ttl: float = 480.0
    retention_budget: float = 0.5
    reclaim_watermark: float = 0.02
    kv_recompute_threshold: int = 64
    claim_timeout_s: float = 0.25
    claim_ttl_s: float = 30.0
    lease_max_claims: int = 1024
    lease_peers: frozenset[str] = field(default_factory=frozenset)
    lease_curve_secret_file: Path | None = None
    lease_curve_server_file: Path | None = None
    lease_curve_clients_dir: Path | None = None

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Self:
        """Read ``kv_connector_extra_config``; keys of other parts of the engine are left alone.

        Raises:
            LeaseConfigError: A key that looks like ours is unknown, or a value is wrong.
        """
        known = {entry.name for entry in fields(cls)}
        for key in extra:
            if key not in known and key.startswith(_OURS):
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else f"; known keys: {', '.join(sorted(known))}"
                raise LeaseConfigError(f"kv_connector_extra_config: unknown key {key}{hint}")
        given = {key: _checked(key, extra[key]) for key in known & extra.keys()}
        settings = cls(**given)
        if settings.lease_ttl_s > settings.decoder_kv_blocks_ttl:
            raise LeaseConfigError(
                f"lease_ttl_s = {settings.lease_ttl_s:g}: expected at most decoder_kv_blocks_ttl = "
                f"{settings.decoder_kv_blocks_ttl:g} seconds"
            )
        settings._no_keys_for_an_open_protocol()
        return settings

    def _no_keys_for_an_open_protocol(self) -> None:
        """Without a secret the protocol is open, so other keys would promise what nobody keeps."""
        for key in ("lease_curve_server_file", "lease_curve_clients_dir"):
            if (value := getattr(self, key)) is not None and self.lease_curve_secret_file is None:
                raise LeaseConfigError(f"{key} = '{value}': needs lease_curve_secret_file, this engine's own keys, too")

    def curve_server(self) -> CurveServer | None:
        """Keys of a decode engine, or None."""
        if self.lease_curve_secret_file is None:
            return None
        return CurveServer(self.lease_curve_secret_file, self.lease_curve_clients_dir)

    def curve_client(self) -> CurveClient | None:
        """Keys of a prefill engine, or None.

        Raises:
            LeaseConfigError: Its own keys are set, but not those of the decode engines.
        """
        if self.lease_curve_secret_file is None:
            return None
        if self.lease_curve_server_file is None:
            raise LeaseConfigError("lease_curve_server_file is missing: lease_curve_secret_file is set, so name both")
        return CurveClient(self.lease_curve_secret_file, self.lease_curve_server_file)


def _checked(key: str, value: object) -> Any:
    if key in _RANGES:
        return _number(key, value)
    if key == "lease_peers":
        return _peers(value)
    if not isinstance(value, str) or not value:
        raise LeaseConfigError(f"{key} = {value!r}: expected a text that is not empty")
    return Path(value) if key in _PATHS else value


def _number(key: str, value: object) -> int | float:
    low, high = _RANGES[key]
    whole = key in _INTEGERS
    if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
        if not whole:
            return float(value)
        if isinstance(value, int):
            return value
    raise LeaseConfigError(f"{key} = {value!r}: expected a {'whole ' * whole}number from {low:g} to {high:g}")


def _peers(value: object) -> frozenset[str]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(peer, str) and _is_peer(peer) for peer in value):
        raise LeaseConfigError(f"lease_peers = {value!r}: expected a list of HOST:PORT")
    return frozenset(value)


def _is_peer(value: str) -> bool:
    host, _, port = value.rpartition(":")
    named = bool(host) and not set(host) & set("/ @") and (":" not in host or host.startswith("["))
    return named and port.isascii() and port.isdigit() and 1 <= int(port) <= _PORT_MAX
