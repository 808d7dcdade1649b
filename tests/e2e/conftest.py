"""Real clusters, started once a module through the command line that users type."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator

import pytest
from tests.e2e.rig import SHORT_TTL_S, Client, Rig

from kvduplex_bench.cluster import free_ports, started

# A lease may not be longer than blocks are kept, so both are shortened.
SHORT_LEASE = ("--set", f"decode.lease_ttl_s={SHORT_TTL_S}", "--set", f"prefill.lease_ttl_s={SHORT_TTL_S}")


@contextlib.contextmanager
def running(connector: str, *more: str) -> Iterator[Rig]:
    """A cluster behind a router, for the length of the block."""
    (port,) = free_ports(1)
    with started(["--port", str(port), "--connector", connector, "--no-prefill-prefix-cache", *more]) as cluster:
        with urllib.request.urlopen(f"{cluster.url}/v1/models", timeout=30) as reply:
            model = json.loads(reply.read())["data"][0]["id"]
        yield Rig(cluster, connector, Client(cluster.url, model), Client(cluster.prefill[0], model))


@pytest.fixture(scope="module", params=["leased", "stock"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """One prefill and one decode engine behind the router; the prefill engine keeps no prefix cache.

    Without that cache every token that was not computed must have come from the decode engine, and the prefill engine
    asked directly, without transfer parameters, is the plain engine that replies are compared with.
    """
    with running(request.param) as one:
        yield one


@pytest.fixture(scope="module", params=["leased", "stock"])
def forgetful(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """The same, with decode engines that keep blocks for a few seconds only."""
    with running(request.param, "--set", f"decode.decoder_kv_blocks_ttl={SHORT_TTL_S}", *SHORT_LEASE) as one:
        yield one
