"""Real clusters, started once a run through the command line that users type."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest
from tests.e2e.rig import Client, Rig

from kvduplex_bench.cluster import free_ports, started


@pytest.fixture(scope="session", params=["leased", "stock"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """One prefill and one decode engine behind the router; the prefill engine keeps no prefix cache.

    Without that cache every token that was not computed must have come from the decode engine, and the prefill engine
    asked directly, without transfer parameters, is the plain engine that replies are compared with.
    """
    (port,) = free_ports(1)
    arguments = ["--port", str(port), "--connector", request.param, "--no-prefill-prefix-cache"]
    with started(arguments) as cluster:
        with urllib.request.urlopen(f"{cluster.url}/v1/models", timeout=30) as reply:
            model = json.loads(reply.read())["data"][0]["id"]
        yield Rig(cluster, request.param, Client(cluster.url, model), Client(cluster.prefill[0], model))
