"""``python -m kvduplex_infra check|cost|leftovers CLUSTER_FILE``: what the account says about a cluster."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from kvduplex.ec2.pricing import PRICING_REGION
from kvduplex.errors import KvduplexError
from kvduplex.node.aws import session
from kvduplex_infra.account.ask import Clients, ask
from kvduplex_infra.account.cost import cost_of
from kvduplex_infra.account.leftovers import leftovers
from kvduplex_infra.cluster import Cluster, load_cluster
from kvduplex_infra.errors import InfraError
from kvduplex_transfer.interface import Severity

_FOUND = 1
_REFUSED = 2


def main() -> int:
    """0: all is well; 1: the account cannot give it, or something is left; 2: it could not be asked."""
    parser = argparse.ArgumentParser(
        prog="python -m kvduplex_infra", description="What the account says about a cluster."
    )
    parser.add_argument("command", choices=sorted(_COMMANDS))
    parser.add_argument("cluster", type=Path, help="cluster file")
    options = parser.parse_args()
    try:
        return _COMMANDS[options.command](load_cluster(options.cluster, now=datetime.now(UTC)))
    except (InfraError, KvduplexError) as error:
        sys.stderr.write(f"{error}\n")
        return _REFUSED


def _check(cluster: Cluster) -> int:
    aws = session(cluster.region)
    clients = Clients(ec2=aws.client("ec2"), quotas=aws.client("service-quotas"), ssm=aws.client("ssm"))
    findings = ask(cluster, clients=clients)
    for finding in findings:
        sys.stdout.write(f"{finding.severity.value:<5} {finding.check}: {finding.seen}; expected {finding.expected}\n")
        if finding.fix:
            sys.stdout.write(f"      {finding.why}. Fix: {finding.fix}\n")
    return _FOUND if any(finding.severity is Severity.FAIL for finding in findings) else 0


def _cost(cluster: Cluster) -> int:
    cost = cost_of(cluster, pricing=session(PRICING_REGION).client("pricing"))
    sys.stdout.write(f"{cost.describe()}\n")
    return 0 if cost.is_complete else _FOUND


def _leftovers(cluster: Cluster) -> int:
    aws = session(cluster.region)
    found = leftovers(
        cluster.name, cloudformation=aws.client("cloudformation"), tagging=aws.client("resourcegroupstaggingapi")
    )
    for leftover in found:
        sys.stdout.write(f"{leftover}\n")
    sys.stdout.write(f"{len(found)} left of {cluster.name} in {cluster.region}\n")
    return _FOUND if found else 0


_COMMANDS = {"check": _check, "cost": _cost, "leftovers": _leftovers}

if __name__ == "__main__":
    sys.exit(main())
