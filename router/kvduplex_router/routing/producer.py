"""Works the facts of a request out: its class, its session, its prompt, and which engines hold how much of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import msgspec

from kvduplex_router.config import Policy, RoutingConfig
from kvduplex_router.errors import BadRequestError
from kvduplex_router.events.index import BlockIndex
from kvduplex_router.events.trust import Trust
from kvduplex_router.requests.body import Body
from kvduplex_router.requests.kinds import ApiKind
from kvduplex_router.routing.classes import Aspects, Classifier, Workload
from kvduplex_router.routing.desk import Desks
from kvduplex_router.routing.facts import Facts
from kvduplex_router.routing.learned import UNIT, LearnedPrefixes
from kvduplex_router.routing.rendezvous import key64
from kvduplex_router.tokens.prompt import Prompt
from kvduplex_router.tokens.tokeniser import Tokeniser

__all__ = ["FactProducer", "session_key"]

_log = logging.getLogger("kvduplex.router.routing")
_MESSAGES: Final = msgspec.json.Decoder(list[msgspec.Raw])
_LEADING: Final = (b'"system"', b'"developer"')
_HEAD_MAX: Final = 8
_TOKEN_BYTES: Final = 4
_UNCOUNTED: Final = frozenset({Policy.LEAST_IN_FLIGHT, Policy.ROUND_ROBIN, Policy.SESSION})


class FactProducer:
    """See the module.

    Args:
        config: The section.
        tokeniser: Makes prompts.
        index: Blocks that engines said they hold.
        learned: Prompts that were sent to engines.
        recent: The last of those, for which events may not have come yet.
        desks: Figures of engines.
        disaggregated: Whether turns are split over prefill and decode engines; then prompts are counted whatever the
            policy, for plans to be priced.
    """

    def __init__(
        self,
        config: RoutingConfig,
        *,
        tokeniser: Tokeniser,
        index: BlockIndex,
        learned: LearnedPrefixes,
        recent: LearnedPrefixes,
        desks: Desks,
        disaggregated: Callable[[], bool],
    ) -> None:
        self._whole = Classifier(config, Policy.PREFIX)
        self._split = Classifier(config, Policy.LEAST_IN_FLIGHT)
        self._disaggregated = disaggregated
        self._min_tokens = config.min_tokens
        self._tokeniser = tokeniser
        self._index = index
        self._learned = learned
        self._recent = recent
        self._desks = desks

    async def facts(
        self, kind: ApiKind, body: Body, *, tenant: str, conversation_id: str | None, named: str | None
    ) -> Facts:
        """Facts of a request; its prompt is counted only where something depends on it.

        Args:
            kind: Its API.
            body: Its body.
            tenant: Whose it is.
            conversation_id: The client's name for the conversation.
            named: The class that a header names.
        """
        classifier = self._split if self._disaggregated() else self._whole
        workload = classifier.default
        try:
            workload = classifier.classify(named, lambda: _aspects(kind, body, tenant))
            return await self._found(workload, kind, body, tenant=tenant, conversation_id=conversation_id)
        except BadRequestError:  # a member that is not JSON: the engine says so
            return Facts(workload)
        except Exception as error:  # noqa: BLE001 - a request boundary: no turn fails for want of facts
            # What an error says could hold text of the request, so only its kind is logged.
            _log.error("facts of a request could not be worked out, so load alone counts: %s", type(error).__name__)
            return Facts(workload)

    async def _found(
        self, workload: Workload, kind: ApiKind, body: Body, *, tenant: str, conversation_id: str | None
    ) -> Facts:
        policy = workload.policy
        session = None
        if policy is not Policy.LEAST_IN_FLIGHT and policy is not Policy.ROUND_ROBIN and not workload.unique:
            session = session_key(kind, body, tenant=tenant, conversation_id=conversation_id)
        if policy in _UNCOUNTED and not (self._tokeniser.exact and self._disaggregated()):
            return Facts(workload, session=session)
        return self._counted(workload, await self._tokeniser.prompt(kind, body), session)

    def counted(self, prompt: Prompt, session: int | None, named: str | None) -> Facts:
        """Facts of a prompt of a class, as if a request had come with it.

        Args:
            prompt: The prompt.
            session: Key of its session.
            named: The class that a header would name.
        """
        return self._counted(self._whole.classify(named, _no_aspects), prompt, session)

    def _counted(self, workload: Workload, prompt: Prompt, session: int | None) -> Facts:
        if workload.policy in _UNCOUNTED:
            return Facts(workload, prompt=prompt, session=session)
        if workload.unique or prompt.count < self._min_tokens:
            return Facts(workload, prompt=prompt)
        return self.looked_up(workload, prompt, session)

    @property
    def default(self) -> Workload:
        """The class of requests that belong to none."""
        return self._whole.default

    def looked_up(self, workload: Workload, prompt: Prompt, session: int | None) -> Facts:
        """Facts of a prompt, with what engines hold of it."""
        cut = _cut(workload, prompt)
        units = prompt.chain(UNIT, scope=f"{prompt.source.value} {prompt.model}")[: cut // UNIT]
        facts = Facts(
            workload,
            prompt=prompt,
            session=session,
            home=_home(workload, prompt, cut),
            units=units,
        )
        if workload.policy is not Policy.KV_EVENTS or not prompt.exact or not self._desks.all_trusted:
            facts.remembered = {name: count * UNIT for name, count in self._learned.overlaps(units).items()}
        facts.overlaps = self._overlaps(facts, prompt)
        return facts

    def _overlaps(self, facts: Facts, prompt: Prompt) -> dict[str, int]:
        """What engines hold: by their events where those are believed, else by memory as far as it proved right."""
        most = max(0, prompt.count - 1)  # the last token is always computed
        found: dict[str, int] = {}
        indexed = self._indexed(prompt) if facts.workload.policy is Policy.KV_EVENTS and prompt.exact else None
        recent = {} if indexed is None else self._recent.overlaps(facts.units)
        for name, remembered in facts.remembered.items():
            desk = self._desks.find(name)
            if desk is None:
                continue
            if indexed is None or desk.trust.state is not Trust.TRUSTED:
                found[name] = min(most, int(remembered * desk.belief))
        for name, tokens in (indexed or {}).items():
            found[name] = min(most, max(tokens, found.get(name, 0)))
        for name, count in recent.items():
            found[name] = min(most, max(count * UNIT, found.get(name, 0)))
        return found

    def _indexed(self, prompt: Prompt) -> dict[str, int]:
        index = self._index
        adapter = prompt.model if prompt.model in index.adapters else None
        found: dict[str, int] = {}
        for size in index.block_sizes:
            for name, blocks in index.overlaps(prompt.chain(size, adapter)).items():
                if index.block_size(name) == size:
                    found[name] = blocks * size
        return found


def session_key(kind: ApiKind, body: Body, *, tenant: str, conversation_id: str | None) -> int | None:
    """The key of a request's session: the conversation's id, the user's, or how the conversation began."""
    model = body.raw("model")
    if conversation_id is not None:
        return key64(b"id", tenant.encode(), model, conversation_id.encode("utf-8", "surrogatepass"))
    user = body.text("user")
    if user:
        return key64(b"user", tenant.encode(), model, user.encode("utf-8", "surrogatepass"))
    raw = body.raw(kind.history)
    if not raw.startswith(b"["):
        return None
    try:
        messages = _MESSAGES.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    head: list[bytes] = []
    for message in messages[:_HEAD_MAX]:
        head.append(bytes(message))
        if not any(mark in head[-1] for mark in _LEADING):
            break
    return key64(b"head", tenant.encode(), model, body.raw("system"), *head) if head else None


def _cut(workload: Workload, prompt: Prompt) -> int:
    """Tokens up to the class's boundary; the whole prompt where the boundary is the end of what came before."""
    boundary = workload.boundary
    if isinstance(boundary, int):
        return min(boundary, prompt.count)
    if boundary == "previous_turn":
        return prompt.count
    found = prompt.boundary(boundary)
    return found or prompt.count


def _home(workload: Workload, prompt: Prompt, cut: int) -> int | None:
    if workload.boundary == "previous_turn" or cut < UNIT:
        return None
    return key64(b"home", prompt.model.encode("utf-8", "surrogatepass"), prompt.tokens[: cut * _TOKEN_BYTES])


def _no_aspects() -> Aspects:
    return Aspects("", None, "", stream=True, tools=False)


def _aspects(kind: ApiKind, body: Body, tenant: str) -> Aspects:
    return Aspects(
        kind.name, body.text("model"), tenant, stream=bool(body.get("stream")), tools=bool(body.get("tools"))
    )
