"""References and leases in Valkey, shared by routers: each operation is one script, so that it is atomic fleet-wide.

Keys are ``kvduplex:{NAMESPACE}:…``; the braces put all of them into one slot of a clustered server, which scripts over
several keys need. A conversation's key is the digest that scopes it by tenant and model. What is stored is metadata
with a time to live: the server sees neither text nor KV. Times are the server's; routers compare none of their own.

A lease that is to be renewed stands in one sorted set by the time its next renewal is due. Whichever router asks first
for what is due gets it and renews it, so leases outlive the router that made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol
from urllib.parse import quote, unquote

import msgspec
from valkey.asyncio import BlockingConnectionPool, Valkey
from valkey.exceptions import TimeoutError as ValkeyTimeoutError
from valkey.exceptions import ValkeyError

from kvduplex_router.config.state import StateConfig
from kvduplex_router.conversations.reference import Reference

__all__ = ["Due", "Found", "LeaseName", "SharedStore", "StateError", "StateTimeout", "ValkeyStore"]

StateError: Final = (ValkeyError, OSError, TimeoutError)
"""What a server that is gone, slow or broken makes its client raise."""
StateTimeout: Final = (TimeoutError, ValkeyTimeoutError)
"""Of these, what may pass by itself."""

_CONNECTIONS: Final = 32
_VERSION: Final = b"1"
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Reference)

# KEYS: references, the longest match first, then the renewal set. Values are MEMBER \n PAYLOAD, MEMBER empty without a
# lease. Returns index, payload, age in ms, whether the lease was still to be renewed and is not.
_TAKE: Final = """
local now = redis.call('TIME'); now = now[1] * 1000 + math.floor(now[2] / 1000)
local due = KEYS[#KEYS]
for i = 1, #KEYS - 1 do
  local value = redis.call('GET', KEYS[i])
  if value then
    local left = redis.call('PTTL', KEYS[i])
    redis.call('DEL', KEYS[i])
    local cut = string.find(value, '\\n', 1, true) or 0
    local member = string.sub(value, 1, math.max(cut - 1, 0))
    local lost = 0
    if member ~= '' then
      local till = tonumber(string.match(member, '^(%d+)|') or '0')
      if redis.call('ZREM', due, member) == 0 and till > now then lost = 1 end
    end
    return {i - 1, string.sub(value, cut + 1), left, lost}
  end
end
return false
"""

# KEYS: reference, renewal set. ARGV: payload, life in ms, name of the lease or '', ms to renew it for, ms to the first
# renewal, '1' to leave a former reference alone. Returns the lease member of the reference that is not kept.
_PUT: Final = """
local now = redis.call('TIME'); now = now[1] * 1000 + math.floor(now[2] / 1000)
local former = redis.call('GET', KEYS[1])
local gone = ''
if former and ARGV[6] == '1' then
  return ARGV[3] ~= '' and '0|' .. ARGV[3] or ''
end
if former then
  gone = string.sub(former, 1, math.max((string.find(former, '\\n', 1, true) or 0) - 1, 0))
  if gone ~= '' then redis.call('ZREM', KEYS[2], gone) end
end
local member = ''
if ARGV[3] ~= '' then
  member = string.format('%.0f', now + tonumber(ARGV[4])) .. '|' .. ARGV[3]
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[5]), member)
end
redis.call('SET', KEYS[1], member .. '\\n' .. ARGV[1], 'PX', ARGV[2])
return gone
"""

# KEYS: renewal set. ARGV: ms to the next renewal, how many at most. Returns how many the set has, and members that are
# due; what was renewed long enough leaves the set.
_DUE: Final = """
local now = redis.call('TIME'); now = now[1] * 1000 + math.floor(now[2] / 1000)
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[2])
local live = {}
for _, member in ipairs(found) do
  if tonumber(string.match(member, '^(%d+)|') or '0') <= now then
    redis.call('ZREM', KEYS[1], member)
  else
    redis.call('ZADD', KEYS[1], now + tonumber(ARGV[1]), member)
    live[#live + 1] = member
  end
end
return {redis.call('ZCARD', KEYS[1]), live}
"""


class LeaseName(msgspec.Struct, frozen=True):
    """A lease in the renewal set.

    Attributes:
        engine: Name of the decode engine that holds it.
        lease: Its id.
        member: How the set spells it.
    """

    engine: str
    lease: str
    member: bytes

    @classmethod
    def parse(cls, member: bytes) -> LeaseName | None:
        """Read a member of the set; None for the empty one."""
        _, _, name = member.partition(b"|")
        engine, _, lease = name.decode("ascii", "replace").rpartition("|")
        return cls(unquote(engine), lease, member) if lease else None


class Found(msgspec.Struct, frozen=True):
    """A reference taken from the shared store.

    Attributes:
        index: Which of the keys it was under.
        reference: Its `stored_at` means nothing here; the age does.
        age_s: Seconds since it was stored.
        lost: Its lease should have been renewed, and is known to be gone.
    """

    index: int
    reference: Reference
    age_s: float
    lost: bool


class Due(msgspec.Struct, frozen=True):
    """Leases to renew now.

    Attributes:
        leases: Those that fall to the caller.
        total: All that are renewed, by whomever.
    """

    leases: Sequence[LeaseName]
    total: int


class SharedStore(Protocol):
    """References that several routers share; every operation may raise any of `StateError`."""

    async def take(self, keys: Sequence[bytes]) -> Found | None:
        """Remove and return the reference of the first of `keys` that has one; one of all routers gets it."""

    async def put(self, key: bytes, reference: Reference, keep_s: float) -> LeaseName | None:
        """Store a reference and have its lease renewed for `keep_s`; returns the displaced one's lease."""

    async def put_back(self, key: bytes, reference: Reference, keep_s: float, age_s: float) -> LeaseName | None:
        """Store a reference of that age again, unless the key has another; returns its lease when it is not stored."""

    async def due(self, limit: int) -> Due:
        """Leases whose renewal falls to the caller now."""

    async def lost(self, leases: Sequence[LeaseName]) -> None:
        """Engines no longer hold these."""

    async def ping(self) -> None:
        """Return when the server answers."""

    async def close(self) -> None:
        """Drop the connections."""


class ValkeyStore:
    """A `SharedStore` on a Valkey or Redis server; opens no connection until it is used.

    Args:
        config: Where; with a URL.
        password: The server's, when it asks for one.
        max_age_s: Seconds a reference is kept.
        renew_every_s: Seconds between two renewals of a lease.
    """

    def __init__(self, config: StateConfig, *, password: str | None, max_age_s: float, renew_every_s: float) -> None:
        self._prefix = b"kvduplex:{%b}:" % config.namespace.encode()
        self._renewals = self._prefix + b"renew"
        self._life_ms = int(max_age_s * 1000)
        self._every_ms = int(renew_every_s * 1000)
        self._client: Any = _client(config, password)
        self._take = self._client.register_script(_TAKE)
        self._put = self._client.register_script(_PUT)
        self._due = self._client.register_script(_DUE)

    async def take(self, keys: Sequence[bytes]) -> Found | None:
        """See `SharedStore.take`."""
        answer = await self._take(keys=[*map(self._key, keys), self._renewals])
        if answer is None:
            return None
        index, payload, left_ms, lost = answer
        reference = _decoded(payload)
        if reference is None:
            return None
        return Found(index, reference, max(self._life_ms - left_ms, 0) / 1000, bool(lost))

    async def put(self, key: bytes, reference: Reference, keep_s: float) -> LeaseName | None:
        """See `SharedStore.put`."""
        return await self._stored(key, reference, keep_s, self._life_ms, over=True)

    async def put_back(self, key: bytes, reference: Reference, keep_s: float, age_s: float) -> LeaseName | None:
        """See `SharedStore.put_back`."""
        life_ms = max(1, self._life_ms - int(age_s * 1000))
        return await self._stored(key, reference, keep_s, life_ms, over=False)

    async def _stored(
        self, key: bytes, reference: Reference, keep_s: float, life_ms: int, *, over: bool
    ) -> LeaseName | None:
        name = b"" if reference.lease is None else f"{quote(reference.engine, safe=':')}|{reference.lease}".encode()
        payload = _VERSION + _ENCODER.encode(reference)
        args = [payload, life_ms, name, int(keep_s * 1000), self._every_ms, 0 if over else 1]
        answer = await self._put(keys=[self._key(key), self._renewals], args=args)
        return LeaseName.parse(answer)

    async def due(self, limit: int) -> Due:
        """See `SharedStore.due`."""
        total, members = await self._due(keys=[self._renewals], args=[self._every_ms, limit])
        return Due([name for name in map(LeaseName.parse, members) if name is not None], total)

    async def lost(self, leases: Sequence[LeaseName]) -> None:
        """See `SharedStore.lost`."""
        await self._client.zrem(self._renewals, *(lease.member for lease in leases))

    async def ping(self) -> None:
        """See `SharedStore.ping`; asks for what turns need, so that a server without rights for it counts as gone."""
        await self._client.set(self._prefix + b"probe", b"", px=1000)
        await self._due(keys=[self._renewals], args=[self._every_ms, 0])

    async def close(self) -> None:
        """See `SharedStore.close`."""
        await self._client.aclose()

    def _key(self, key: bytes) -> bytes:
        return self._prefix + b"turn:" + key.hex().encode()


def _client(config: StateConfig, password: str | None) -> Any:
    assert config.url is not None  # noqa: S101 - the caller's condition
    options: dict[str, Any] = {
        "max_connections": _CONNECTIONS,
        "timeout": config.timeout_s,
        "socket_timeout": config.timeout_s,
        "socket_connect_timeout": config.timeout_s,
        **({"password": password} if password is not None else {}),
    }
    if config.url.startswith("valkeys"):
        options["ssl_check_hostname"] = True
        if config.ca_file is not None:
            options["ssl_ca_certs"] = str(config.ca_file)
    elif not config.url.startswith("unix"):
        options["socket_keepalive"] = True
    return Valkey.from_pool(BlockingConnectionPool.from_url(config.url, **options))


def _decoded(payload: bytes) -> Reference | None:
    """A stored reference; None when another version of the router wrote it in a form of its own."""
    if payload[:1] != _VERSION:
        return None
    try:
        return _DECODER.decode(payload[1:])
    except msgspec.DecodeError:
        return None
