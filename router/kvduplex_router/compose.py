"""Puts a router together from its configuration; nothing else constructs collaborators."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI

from kvduplex_router.api.admin import admin_router
from kvduplex_router.api.app import Front, build_app
from kvduplex_router.api.auth import env_secret, load_authenticator
from kvduplex_router.api.guard import Guard
from kvduplex_router.api.hits import HitRates, hits_router
from kvduplex_router.api.operations import operations_router
from kvduplex_router.api.passthrough import Passthrough
from kvduplex_router.api.protocol import client_protocol
from kvduplex_router.api.receipts import receipts_router
from kvduplex_router.api.turns import TurnEndpoint
from kvduplex_router.api.view import FleetView, LocalView, Tellers, Topic
from kvduplex_router.clock import Clock
from kvduplex_router.config import AuthConfig, Reuse, RouterConfig
from kvduplex_router.conversations.conversations import Conversations
from kvduplex_router.conversations.endpoints import LedgerTarget
from kvduplex_router.conversations.leases import LeaseKeeper, LeaseService
from kvduplex_router.conversations.ledger import Ledger, LocalLedger, OwnLedger
from kvduplex_router.conversations.shared import SharedLedger
from kvduplex_router.conversations.store import MemoryStore
from kvduplex_router.conversations.valkey import ValkeyStore
from kvduplex_router.dashboard.feed import Feed
from kvduplex_router.dashboard.routes import dashboard_router
from kvduplex_router.fleet.discovery.build import build_sources
from kvduplex_router.fleet.discovery.watch import Discovery
from kvduplex_router.fleet.engine import EngineRole
from kvduplex_router.fleet.fleet import EngineMaker, Fleet
from kvduplex_router.fleet.health import HealthProber
from kvduplex_router.fleet.members import CONFIG, FleetTarget, Member, Members, Target, configured
from kvduplex_router.http.request import forwardable
from kvduplex_router.http.watchdog import Watchdog
from kvduplex_router.pd.attempts import Accounts
from kvduplex_router.pd.decode import AnswerHop
from kvduplex_router.pd.planner import Planner
from kvduplex_router.pd.prefill import PrefillHop
from kvduplex_router.pd.receipts import ReceiptRing
from kvduplex_router.pd.turn import TurnPolicy, TurnRunner
from kvduplex_router.pd.unread import UnreadBlocks
from kvduplex_router.pd.whole import WholeTurn
from kvduplex_router.requests import apis
from kvduplex_router.routing.admission import Admission
from kvduplex_router.routing.service import RoutingService
from kvduplex_router.telemetry.families import FamilyCollector
from kvduplex_router.telemetry.hits import HitDoctor
from kvduplex_router.telemetry.metrics import Metrics
from kvduplex_router.telemetry.tracing import open_tracing
from kvduplex_transfer.leases.client import AsyncLeaseClient

__all__ = ["LedgerService", "Router", "compose", "compose_ledger", "compose_members"]


@dataclass(frozen=True, slots=True)
class Router:
    """A router ready to be served.

    Attributes:
        asgi: The application to serve.
        admin: The one to serve on the operators' own listener, when there is one.
        app: The FastAPI application inside it.
        fleet: Its engines.
        members: Who belongs to them.
        metrics: Its instruments.
        prober: Who probes the engines.
        feed: What watchers are sent; to be closed when the router is told to stop, for its streams never end.
        protocol: uvicorn's ``http`` setting.
    """

    asgi: Front
    admin: Front | None
    app: FastAPI
    fleet: Fleet
    members: Members
    metrics: Metrics
    tellers: Tellers
    prober: HealthProber
    feed: Feed
    protocol: Any


def compose(
    config: RouterConfig,
    *,
    clock: Clock = time.monotonic,
    lease_service: Callable[[str], LeaseService] = AsyncLeaseClient,
    ledger: Ledger | None = None,
    fleet_view: FleetView | None = None,
) -> Router:
    """Build a router; must run inside the event loop that will serve it.

    Args:
        config: Validated configuration.
        clock: Monotonic seconds for all logic above the sockets.
        lease_service: Opens a decode engine's lease endpoint, ``tcp://HOST:PORT``.
        ledger: Where references are kept, when that is not this process.
        fleet_view: What operators see and change, when that is more than this process.
    """
    watchdog = Watchdog()
    engine_headers = _engine_headers(config.auth)
    admin_key = None if config.admin.key_env is None else env_secret("admin.key_env", config.admin.key_env)
    fleet = Fleet()
    target = FleetTarget(fleet, EngineMaker(config, watchdog=watchdog, clock=clock))
    members, discovery = compose_members(config, target)
    settings = config.conversations
    local = None if ledger else compose_ledger(config, clock=clock, lease_service=lease_service, fleet=fleet)
    kept = local.ledger if local is not None else ledger
    assert kept is not None  # noqa: S101 - one of the two
    conversations = Conversations(fleet=fleet, ledger=kept, reuse=config.reuse, config=settings, clock=clock)
    routing = RoutingService(config.routing, fleet, clock=clock)
    admission = Admission(
        routing.picker, queued=config.limits.queued, queue_s=config.limits.queue_s, reserve=routing.reserve
    )
    endpoints: dict[str, TurnEndpoint] = {}

    def gauges() -> dict[str, float]:
        return {
            "turns_in_flight": sum(endpoint.in_flight for endpoint in endpoints.values()),
            "queued": admission.queued,
            **(local.ledger.counts_now() if local is not None else {}),
        }

    metrics = Metrics(fleet, gauges)
    doctor, tracing = HitDoctor(clock), open_tracing(config.telemetry)
    accounts = Accounts(metrics, doctor)
    answer = AnswerHop(
        clock=clock,
        answer_limit=config.limits.answer_bytes,
        frame_limit=config.limits.frame_bytes,
        metrics=metrics,
    )
    runner = TurnRunner(
        fleet=fleet,
        admission=admission,
        conversations=conversations,
        prefill=PrefillHop(
            clock=clock, answer_limit=config.limits.answer_bytes, keep_forcing=config.forced_output_on_prefill
        ),
        answer=answer,
        whole=WholeTurn(fleet=fleet, admission=admission, answer=answer, accounts=accounts, routing=routing),
        accounts=accounts,
        metrics=metrics,
        policy=TurnPolicy(config.on_no_prefill, config.retries, settings.prefill_ttl_s, settings.lease_ttl_s),
        clock=clock,
        routing=routing,
        planner=Planner(config.routing, routing),
        unread=UnreadBlocks(metrics=metrics, clock=clock),
    )
    receipts = ReceiptRing(config.routing.receipts)
    tellers = _tellers(metrics, doctor, receipts)
    metrics.registry.register(FamilyCollector(routing.families, receipts.families, doctor.families, members.families))
    for kind in apis.ALL:
        endpoints[kind.path] = TurnEndpoint(
            kind,
            runner=runner,
            metrics=metrics,
            watchdog=watchdog,
            config=config,
            engine_headers=engine_headers,
            receipts=receipts,
            tracing=tracing,
        )
    prober = HealthProber(fleet, config.health, clock=clock, headers=engine_headers)
    prober.on_up = admission.seat_free

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        own = () if local is None else (local.run, discovery.run)
        if local is not None:
            await discovery.look_once()
        try:
            async with _running(prober.run, routing.run, runner.run_beside, *own):
                yield
                await feed.close()
        finally:
            fleet.close()
            watchdog.close()
            if tracing is not None:
                await tracing.close()

    protocol = client_protocol(watchdog, header_s=config.timeouts.header_s)
    passthrough = Passthrough(
        fleet=fleet,
        admission=admission,
        metrics=metrics,
        watchdog=watchdog,
        config=config,
        engine_headers=engine_headers,
    )
    view = fleet_view or LocalView(tellers, members)
    rates = HitRates(view, fleet)
    feed = Feed(fleet, view.metrics, clock=clock, version=_version(), troubles=rates.troubles)
    routers = (
        operations_router(fleet, view, version=_version(), engine_headers=engine_headers),
        admin_router(fleet, members, view), receipts_router(view), hits_router(rates, workers=config.workers),
        dashboard_router(feed),
    )  # fmt: skip
    app = build_app(endpoints=endpoints, routers=routers, lifespan=lifespan, version=_version())
    authenticator = load_authenticator(config.auth, clock=clock, workers=config.workers)
    front, admin = (
        Front(app, endpoints=endpoints, passthrough=passthrough, guard=guard, metrics=metrics)
        for guard in (
            Guard(authenticator, admin_key=admin_key, operators=config.admin.listen is None),
            Guard(authenticator, admin_key=admin_key, clients=False),
        )
    )
    return Router(
        front, admin if config.admin.listen is not None else None, app, fleet, members, metrics, tellers, prober, feed,
        protocol,
    )  # fmt: skip


def _tellers(metrics: Metrics, doctor: HitDoctor, receipts: ReceiptRing) -> Tellers:
    """What this process says of itself."""
    return {
        Topic.METRICS: lambda _most: metrics.render(),
        Topic.HITS: lambda _most: doctor.told(),
        Topic.RECEIPTS: receipts.told,
    }


@contextlib.asynccontextmanager
async def _running(*work: Callable[[], Coroutine[None, None, None]]) -> AsyncIterator[None]:
    """Run these in the background."""
    tasks = [asyncio.create_task(each()) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class LedgerService:
    """A ledger and the work that keeps it true.

    Attributes:
        ledger: What turns ask.
        keeper: Who renews leases.
        local: What of it is in this process.
        shared: What of it other routers see, when there are others.
    """

    ledger: OwnLedger
    keeper: LeaseKeeper
    local: LocalLedger
    shared: SharedLedger | None = None

    async def run(self) -> None:
        """Renew, release and sweep until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.keeper.run())
            group.create_task(self.local.sweep_forever())
            if self.shared is not None:
                group.create_task(self.shared.run())


def compose_ledger(
    config: RouterConfig,
    *,
    clock: Clock = time.monotonic,
    lease_service: Callable[[str], LeaseService] = AsyncLeaseClient,
    fleet: Fleet | None = None,
) -> LedgerService:
    """Build the ledger of a router, which follows `fleet`; must run inside the event loop that will use it."""
    settings = config.conversations
    keeper = LeaseKeeper(ttl_s=settings.lease_ttl_s, clock=clock, connect=lease_service)
    store = MemoryStore(
        max_count=settings.max_count,
        max_bytes=settings.max_bytes,
        max_age_s=settings.decoder_kv_blocks_ttl_s,
        clock=clock,
    )
    local = LocalLedger(store=store, keeper=keeper)
    target = LedgerTarget(config, local)
    if fleet is not None:
        target.follow(fleet)
    else:
        for member in configured(config):
            target.join(CONFIG, member)
    if config.state.url is None:
        return LedgerService(local, keeper, local)
    shared = _shared_ledger(config, config.state.url, local, clock)
    keeper.also_renew(shared)
    return LedgerService(shared, keeper, local, shared)


def _shared_ledger(config: RouterConfig, url: str, local: LocalLedger, clock: Clock) -> SharedLedger:
    state, settings = config.state, config.conversations
    password = None if state.password_env is None else env_secret("state.password_env", state.password_env)
    store = ValkeyStore(
        state,
        password=password,
        max_age_s=settings.decoder_kv_blocks_ttl_s,
        renew_every_s=settings.lease_ttl_s / 3,
    )
    return SharedLedger(
        store, local, clock=clock, timeout_s=state.timeout_s, retry_s=state.retry_s, where=url.rpartition("@")[2]
    )


def compose_members(config: RouterConfig, target: Target) -> tuple[Members, Discovery]:
    """Build the list of who belongs to the fleet, and what looks for more; nothing is looked at yet."""

    def check(member: Member) -> str | None:
        if config.reuse is Reuse.LEASED and member.role is EngineRole.DECODE and member.config.lease is None:
            return "reuse is 'leased' and it has no lease endpoint; write URL#lease=HOST:PORT"
        return None

    members = Members(target, check=check)
    members.update(CONFIG, configured(config))
    settings = config.discovery
    return members, Discovery(build_sources(settings), members, timeout_s=settings.timeout_s)


def _engine_headers(config: AuthConfig) -> bytes:
    """Header lines that every request to an engine carries."""
    if config.engine_key_env is None:
        return b""
    key = env_secret("auth.engine_key_env", config.engine_key_env)
    return forwardable([(b"authorization", b"Bearer " + key.encode())])


def _version() -> str:
    try:
        return version("kvduplex")
    except PackageNotFoundError:
        return "0"
