"""Who reaches the cluster's front door, and with which keys."""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvduplex_infra.cluster.section import Arn, Section

__all__ = ["Access", "Keys", "Network"]


class Access(Section):
    """The load balancer's side towards clients."""

    mode: Literal["internal", "public"] = "internal"
    allowed_cidrs: tuple[IPv4Network, ...] = ()
    """Networks of the clients; internal access without any means the cluster's own network."""
    certificate_arn: Arn | None = None
    """ACM certificate; the listener speaks HTTPS with it, plain HTTP inside the network without."""

    @model_validator(mode="after")
    def _public_is_guarded(self) -> Self:
        if self.mode == "internal":
            return self
        if self.certificate_arn is None:
            raise ValueError("mode public sends keys over the internet: give certificate_arn (ACM), or mode: internal")
        if not self.allowed_cidrs:
            raise ValueError("mode public needs allowed_cidrs, the networks of your clients; or mode: internal")
        return self

    @model_validator(mode="after")
    def _not_everyone(self) -> Self:
        if wide := [str(cidr) for cidr in self.allowed_cidrs if cidr.prefixlen == 0]:
            raise ValueError(
                f"allowed_cidrs: {wide[0]} lets everyone in; name your clients' networks, or put a front of your own "
                "(CloudFront, API Gateway) before an internal cluster"
            )
        return self


class Keys(Section):
    """API keys, by where they are kept; never the keys themselves."""

    clients: Literal["generate", "none"] | Arn = "generate"
    """Keys that clients present: a generated secret, or the ARN of one of yours, a key a line."""
    engines: Literal["generate"] | Arn = "generate"
    """The key that the router presents to engines."""


class Network(Section):
    """The network that is made for the cluster."""

    cidr: Annotated[IPv4Network, Field(strict=False)] = IPv4Network("10.42.0.0/16")
    internet: Literal["none", "nat"] = "none"
    """Whether machines reach the internet outwards, e.g. to fetch weights from a hub; nothing comes in either way."""
    endpoints: bool = True
    """Interface endpoints, so that AWS services are reached without the internet; needed with ``internet: none``."""

    @model_validator(mode="after")
    def _services_are_reached(self) -> Self:
        if self.internet == "none" and not self.endpoints:
            raise ValueError(
                "endpoints: false with internet: none leaves machines without Session Manager, keys and logs; "
                "set endpoints: true or internet: nat"
            )
        if not 16 <= self.cidr.prefixlen <= 22:  # noqa: PLR2004 (a VPC is at most /16; four subnets need /22)
            raise ValueError(f"cidr: {self.cidr} must be between /16 and /22, to hold a subnet a zone and use")
        return self
