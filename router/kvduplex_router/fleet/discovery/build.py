"""Makes the sources that the configuration names."""

from __future__ import annotations

from collections.abc import Sequence

from kvduplex_router.config import DiscoveryConfig
from kvduplex_router.fleet.discovery.dns import DnsNames
from kvduplex_router.fleet.discovery.ec2 import Ec2Instances
from kvduplex_router.fleet.discovery.file import FileSource
from kvduplex_router.fleet.discovery.source import Source
from kvduplex_router.fleet.discovery.srv import SrvNames

__all__ = ["build_sources"]


def build_sources(config: DiscoveryConfig) -> Sequence[Source]:
    """The sources; nothing is looked at yet.

    Raises:
        ConfigError: What a source needs is missing.
    """
    patience = config.missing_after
    files = [] if config.file is None else [FileSource(config.file, interval_s=config.file_interval_s)]
    kinds = [(SrvNames if each.srv else DnsNames, each) for each in config.dns]
    names = [kind(each, interval_s=config.dns_interval_s, missing_after=patience) for kind, each in kinds]
    machines = [Ec2Instances(each, interval_s=config.ec2_interval_s, missing_after=patience) for each in config.ec2]
    return [*files, *names, *machines]
