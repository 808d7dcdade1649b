"""The file format of a recipe: which model, on which hosts, with which software, and each role's settings."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, Self

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvduplex_transfer.config import parse_options
from kvduplex_transfer.interface import Role

__all__ = ["Direction", "Hosts", "Recipe", "Stack", "Topology"]


class Topology(StrEnum):
    """How engines share the work."""

    DISAGGREGATED = "disaggregated"
    """Prefill engines and decode engines, KV moving between them."""
    REPLICAS = "replicas"
    """Plain engines that each do both; the router keeps conversations where their prefix is."""


class Direction(StrEnum):
    """Which way KV moves."""

    BIDIRECTIONAL = "bidirectional"
    ONE_WAY = "one_way"
    """From prefill to decode only."""
    NONE = "none"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hosts(_Section):
    """Where a recipe runs."""

    instance_types: tuple[str, ...] = ()
    """EC2 types it was written for; empty for any host with enough devices."""
    both_roles_fit: bool = False
    """Whether one such host has devices for prefill and decode together."""


class Stack(_Section):
    """Version ranges of what must be installed beside the engine, as PEP 440 specifiers."""

    vllm: str
    nixl: str | None = None
    vllm_neuron: str | None = None
    neuron_sdk: str | None = None
    """For readers: the SDK release that ships it."""

    @field_validator("vllm", "nixl", "vllm_neuron")
    @classmethod
    def _specifier(cls, value: str | None) -> str | None:
        try:
            SpecifierSet(value or "")
        except InvalidSpecifier as error:
            raise ValueError("is no version specifier; write it like >=0.29,<0.33") from error
        return value

    def requirements(self) -> Mapping[str, SpecifierSet]:
        """Wanted versions by distribution name."""
        wanted = {"vllm": self.vllm, "nixl": self.nixl, "vllm-neuron": self.vllm_neuron}
        return {name: SpecifierSet(value) for name, value in wanted.items() if value is not None}


class Recipe(_Section):
    """One recipe. Satisfies `RecipeLike`."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    summary: str = Field(min_length=1)
    backend: Literal["host", "neuron", "gpu"]
    model: str = Field(min_length=1)
    hosts: Hosts = Hosts()
    stack: Stack
    topology: Topology = Topology.DISAGGREGATED
    direction: Direction = Direction.BIDIRECTIONAL
    evidence: str = Field(min_length=1)
    """Who has run this, and what this project has checked of it."""
    sources: tuple[str, ...] = Field(min_length=1)
    """Where the settings come from."""
    engine: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of both roles."""
    prefill: Mapping[str, Any] = Field(default_factory=dict)
    decode: Mapping[str, Any] = Field(default_factory=dict)

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, where: str) -> Self:
        """Check `values`, read from `where`.

        Raises:
            ConfigError: A key is unknown or a value is out of range; names the place, the key and the remedy.
        """
        return parse_options(cls, values, where=where)

    def options(self, role: Role) -> Mapping[str, Any]:
        """Settings of `role`: those of both roles, with its own on top; mappings inside are merged key by key."""
        own = self.prefill if role is Role.PREFILL else self.decode
        return _merged(self.engine, own)

    def roles(self) -> tuple[Role, ...]:
        """Roles that have engines; replicas count as decode engines."""
        return (Role.DECODE,) if self.topology is Topology.REPLICAS else (Role.PREFILL, Role.DECODE)

    def overridden(self, values: Mapping[str, Any], *, model: str | None = None) -> Self:
        """A copy with `values` on top of both roles' settings, and perhaps another model."""
        changes: dict[str, Any] = {"engine": _merged(self.engine, values)}
        for role in ("prefill", "decode"):
            own = getattr(self, role)
            changes[role] = {key: value for key, value in own.items() if key not in values}
        return self.model_copy(update=changes | ({"model": model} if model else {}))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.topology is Topology.REPLICAS) != (self.direction is Direction.NONE):
            raise ValueError("topology replicas moves no KV: use direction none with it, and only with it")
        if self.topology is Topology.REPLICAS and self.prefill:
            raise ValueError("topology replicas has no prefill engines; move those settings to decode")
        return self


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(below, value) if both and below is not None else value
    return merged
