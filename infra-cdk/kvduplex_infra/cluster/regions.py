"""Which zones a region has and which accelerated types it offers, as far as public pages say.

Sources: EC2 user guide, "Capacity Blocks for ML" (regions of p5, p5e, p5en, trn1, trn2) and "Instance topology"
(trn1 in us-east-2); the EC2 announcements of trn1 (us-east-1, us-west-2) and trn1n; EC2's on-demand price list
(p5en in us-east-1). AWS adds regions without notice, so a missing entry is no proof: `unlisted_offering` in the
cluster file overrules this table. Zone letters differ between accounts; capacity in a zone is known to EC2 alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["OFFERINGS", "ZONES", "regions_offering"]

ZONES: Mapping[str, str] = MappingProxyType(
    {
        "us-east-1": "abcdef",
        "us-east-2": "abc",
        "us-west-2": "abcd",
        "ap-northeast-1": "acd",
        "ap-southeast-4": "abc",
        "eu-central-1": "abc",
        "eu-north-1": "abc",
        "eu-west-1": "abc",
    }
)
"""Letters of a region's zones."""

OFFERINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "trn1.32xlarge": ("us-east-1", "us-east-2", "us-west-2", "ap-southeast-4"),
        "trn1n.32xlarge": ("us-east-1", "us-east-2", "us-west-2"),
        "trn2.48xlarge": ("us-east-2",),
        "trn2u.48xlarge": ("us-east-2",),
        "p5.48xlarge": ("us-east-1", "us-east-2", "us-west-2", "ap-northeast-1"),
        "p5e.48xlarge": ("us-east-2",),
        "p5en.48xlarge": ("us-east-1", "us-east-2"),
    }
)
"""Regions by accelerated type; types not named here are taken to be everywhere."""


def regions_offering(instance_type: str) -> tuple[str, ...]:
    """Regions that list the type; every region of the table for types that are everywhere."""
    return OFFERINGS.get(instance_type, tuple(ZONES))
