"""The ``routing`` section: which engine gets a request, and by which of the plans."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from kvduplex_router.config.sections import Section

__all__ = ["ClassConfig", "EventsConfig", "MatchConfig", "Plan", "Policy", "RoutingConfig", "WeightsConfig"]


class Policy(StrEnum):
    """How an engine is picked among those that could serve a request."""

    LEAST_IN_FLIGHT = "least_in_flight"
    ROUND_ROBIN = "round_robin"
    SESSION = "session"
    PREFIX = "prefix"
    KV_EVENTS = "kv_events"


class Plan(StrEnum):
    """Ways to serve a turn on prefill and decode engines."""

    CONTINUE = "continue"
    PULL = "pull"
    RECOMPUTE = "recompute"
    AGGREGATE = "aggregate"


Weight = Annotated[float, Field(ge=0, le=100)]
Place = Literal["system", "few_shot", "previous_turn"]


class WeightsConfig(Section):
    """What counts how much.

    With equal `overlap` and `load` the engine with the earliest answer is picked. That is best for one request and
    bad for all: what is computed again holds up everybody behind it, and drives what others have cached out. So
    `overlap` counts more.

    Attributes:
        overlap: Time saved by prompt tokens that an engine holds already.
        load: Time a request would wait for what is ahead of it, and by which what is beside it delays the answer.
        session: Being the engine that the session is hashed to.
        home: Being the engine that the prompt's beginning is hashed to.
    """

    overlap: Weight = 3.0
    load: Weight = 1.0
    session: Weight = 0.05
    home: Weight = 0.05


class MatchConfig(Section):
    """Which requests belong to a class; all that is given must hold.

    Attributes:
        model: Model that the request names.
        tenant: Tenant of the API key.
        api: ``chat``, ``completions``, ``responses`` or ``messages``.
        tools: Whether tools are offered.
        stream: Whether a stream is asked for.
    """

    model: str | None = None
    tenant: str | None = None
    api: Literal["chat", "completions", "responses", "messages"] | None = None
    tools: bool | None = None
    stream: bool | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError(
                f"an empty rule matches everything; give one of {', '.join(sorted(type(self).model_fields))}"
            )
        return self


class ClassConfig(Section):
    """A workload class with routing settings of its own.

    Attributes:
        name: As in header ``X-Kvduplex-Class`` and in metrics.
        policy: Its policy; that of the section when not given.
        weights: Its weights; those of the section when not given.
        boundary: How far into a prompt requests are held to begin alike: a place, or a number of tokens.
        unique: Its prompts share nothing, so none is looked for.
        match: Requests that belong to it without naming it.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
    policy: Policy | None = None
    weights: WeightsConfig | None = None
    boundary: Place | Annotated[int, Field(ge=1)] = "previous_turn"
    unique: bool = False
    match: tuple[MatchConfig, ...] = ()


class EventsConfig(Section):
    """The index of engines' KV events.

    Attributes:
        max_blocks: Different blocks kept; about 110 bytes each with 256 engines, 60 with 64.
        max_engines: Engines with events.
        learned_units: Units of 64 tokens remembered of what was sent where.
        learned_engine_tokens: Of these, tokens per engine; about what its cache holds.
    """

    max_blocks: int = Field(default=2_000_000, ge=1_000, le=200_000_000)
    max_engines: int = Field(default=256, ge=1, le=4_096)
    learned_units: int = Field(default=500_000, ge=1_000, le=100_000_000)
    learned_engine_tokens: int = Field(default=1_000_000, ge=10_000)


class RoutingConfig(Section):
    """Policies, workload classes and plans.

    Attributes:
        policy: For plain replicas and prefill engines; when not given, ``prefix`` for the former and
            ``least_in_flight`` for the latter, which have the decode engines' KV to draw on.
        tokenizer: The served model's folder or its tokenizer.json; prompts are estimated without it.
        weights: For requests of no class.
        boundary: For requests of no class, see `ClassConfig`.
        classes: Workload classes; the first that matches counts, unless a header names one.
        min_tokens: Shorter prompts are not looked up.
        bounded_load: A session's engine is passed over while its requests exceed this times the mean.
        saturated_kv: KV use, 0 to 1, from which an engine gets only what no other can take.
        saturated_waiting: Requests waiting in an engine from which the same holds.
        plans: What may be chosen by price for a turn that can be split; one that cannot goes to one engine anyway.
        continue_max_tokens: Prompt tokens that a decode engine may have to compute itself in plan ``continue``.
        interference: What a second of stalled decoding costs others, in seconds of the turn being planned.
        token_cache_bytes: Bound on the tokens kept of earlier prompts.
        receipts: Turns kept for ``/admin/receipts``.
        events: The index.
    """

    policy: Policy | None = None
    tokenizer: Path | None = None
    weights: WeightsConfig = WeightsConfig()
    boundary: Place | Annotated[int, Field(ge=1)] = "previous_turn"
    classes: tuple[ClassConfig, ...] = ()
    min_tokens: int = Field(default=200, ge=0)
    bounded_load: float = Field(default=1.25, ge=1, le=100)
    saturated_kv: float = Field(default=0.97, gt=0, le=1)
    saturated_waiting: int = Field(default=16, ge=1)
    plans: tuple[Plan, ...] = (Plan.PULL, Plan.RECOMPUTE)
    continue_max_tokens: int = Field(default=1_024, ge=0)
    interference: float = Field(default=0.25, ge=0, le=100)
    token_cache_bytes: int = Field(default=256 * 1024 * 1024, ge=1024 * 1024)
    receipts: int = Field(default=1_024, ge=0, le=1_000_000)
    events: EventsConfig = EventsConfig()

    @field_validator("plans")
    @classmethod
    def _plans(cls, value: tuple[Plan, ...]) -> tuple[Plan, ...]:
        if Plan.RECOMPUTE not in value:
            raise ValueError("'recompute' is missing: it is what is left when nothing else can be done")
        return value

    @field_validator("classes")
    @classmethod
    def _names(cls, value: tuple[ClassConfig, ...]) -> tuple[ClassConfig, ...]:
        names = [each.name for each in value]
        for name in names:
            if names.count(name) > 1 or name == "default":
                raise ValueError(f"name '{name}' is taken; every class has a name of its own, and 'default' is not one")
        return value

    def uses(self, policy: Policy) -> bool:
        """Whether any class is routed by a policy."""
        return policy in (self.policy, *(each.policy for each in self.classes))
