"""What a cluster costs an hour, asked of the AWS price list."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvduplex.node.aws import explained

if TYPE_CHECKING:
    from types_boto3_pricing import PricingClient

__all__ = ["PRICING_REGION", "Cost", "CostLine", "hourly_price"]

PRICING_REGION = "us-east-1"
"""The price list service is in a few regions only, and knows the prices of all."""


@dataclass(frozen=True, slots=True)
class CostLine:
    """Machines of one type.

    Attributes:
        instance_type: EC2 type.
        count: How many.
        each_usd: On-demand price of one an hour; None when the price list has none.
    """

    instance_type: str
    count: int
    each_usd: float | None


@dataclass(frozen=True, slots=True)
class Cost:
    """On-demand price of the machines; volumes, traffic and requests come on top."""

    lines: tuple[CostLine, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the price of every type is known."""
        return all(line.each_usd is not None for line in self.lines)

    @property
    def hourly_usd(self) -> float:
        """Sum of the known prices."""
        return sum(line.count * (line.each_usd or 0.0) for line in self.lines)

    def describe(self) -> str:
        """A table for people."""
        rows = [_row(line) for line in self.lines]
        total = f"{'in total' if self.is_complete else 'at least':<28}{self.hourly_usd:>12.2f} USD an hour"
        day = f"{'':<28}{self.hourly_usd * 24:>12.2f} USD a day"
        return "\n".join(
            [*rows, total, day, "On-demand price of instances; volumes, traffic and requests come on top."]
        )


def hourly_price(instance_type: str, *, region: str, pricing: PricingClient) -> float | None:
    """On-demand Linux price of one instance in USD an hour; None when the price list has none.

    Raises:
        AwsError: The price list cannot be asked.
    """
    terms = {
        "instanceType": instance_type,
        "regionCode": region,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
    }
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in terms.items()]
    with explained(f"looking up the price of {instance_type}", remedy="Allow pricing:GetProducts."):
        found = pricing.get_products(ServiceCode="AmazonEC2", Filters=filters)["PriceList"]  # type: ignore[arg-type]
    prices = list(_on_demand(found))
    return max(prices) if prices else None


def _on_demand(products: Iterable[str]) -> Iterable[float]:
    for product in products:
        offers: Mapping[str, Any] = json.loads(product)["terms"]
        for offer in offers.get("OnDemand", {}).values():
            for dimension in offer["priceDimensions"].values():
                if (usd := float(dimension["pricePerUnit"].get("USD", "0"))) > 0:
                    yield usd


def _row(line: CostLine) -> str:
    name = f"{line.count} x {line.instance_type}"
    if line.each_usd is None:
        return f"{name:<28}{'price unknown':>12}"
    return f"{name:<28}{line.count * line.each_usd:>12.2f} USD an hour ({line.each_usd:.2f} each)"
