"""Starting what is missing of a cluster: checked, priced, confirmed, and taken back when it does not come up whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvduplex.ec2.cluster import Instance, instances_of, missing_machines
from kvduplex.ec2.errors import CapacityError, DeclinedError, LaunchPreflightError
from kvduplex.ec2.plan import Machine, Place, machines, resource_name
from kvduplex.ec2.preflight import Clients, Facts, inspect, resolve_ami
from kvduplex.ec2.pricing import Cost, CostLine, hourly_price
from kvduplex.ec2.request import Fleet, LaunchRequest
from kvduplex.ec2.resources import ensure_placement_group, ensure_security_group, own_security_group
from kvduplex.node.aws import explained
from kvduplex.node.config import NodeRole
from kvduplex_transfer.interface import Severity

if TYPE_CHECKING:
    from types_boto3_pricing import PricingClient

__all__ = ["Launcher", "Limits"]

_DRY_RUN_PASSED = "DryRunOperation"
_HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be spent without asking.

    Attributes:
        confirm: Asks a person; called with the question.
        max_hourly_usd: Refuse anything dearer.
        accept_unknown_price: Whether a type without a known price may be started at all.
    """

    confirm: Callable[[str], bool]
    max_hourly_usd: float | None = None
    accept_unknown_price: bool = False


class Launcher:
    """Starts a cluster, or what is missing of it.

    Args:
        clients: AWS services of the cluster's region.
        pricing: The price list.
        limits: What may be spent.
        report: Is told what is going on.
        now: Seconds since the epoch.
    """

    def __init__(
        self,
        clients: Clients,
        *,
        pricing: PricingClient,
        limits: Limits,
        report: Callable[[str], None],
        now: Callable[[], float],
    ) -> None:
        self._clients = clients
        self._pricing = pricing
        self._limits = limits
        self._report = report
        self._now = now

    def up(self, request: LaunchRequest, *, dry_run: bool = False) -> tuple[Instance, ...]:
        """Start the machines of `request` that do not run, and return all of them.

        With `dry_run` EC2 judges every request without carrying it out, and nothing is made.

        Raises:
            LaunchPreflightError: AWS would refuse, or the cluster would not work.
            ClusterConflictError: The name is taken by a cluster with other settings.
            DeclinedError: The cost was not confirmed.
            CapacityError: Not every machine could be started; those of this call were terminated again.
        """
        running = instances_of(request.cluster, ec2=self._clients.ec2)
        missing = missing_machines(self._planned(request), running, cluster=request.cluster)
        if not missing:
            self._report(f"cluster {request.cluster} runs already; nothing to do")
            return running
        fleets = _fleets(missing)
        facts = inspect(request, self._clients, fleets=fleets)
        self._judge(facts)
        cost = self._cost(request, fleets)
        self._report(cost.describe())
        if dry_run:
            self._dry_run(request, facts, missing)
            return running
        self._confirm(request, cost)
        self._start(request, facts, missing)
        return instances_of(request.cluster, ec2=self._clients.ec2)

    def _planned(self, request: LaunchRequest) -> tuple[Machine, ...]:
        ami = resolve_ami(request.ami, ssm=self._clients.ssm)
        return machines(
            request, _place(request, Facts(ami, self._root_device(ami), "", "", ()), request.security_groups)
        )

    def _root_device(self, ami: str) -> str:
        with explained(
            f"looking at image {ami}", remedy="Check the id and the region, and that the image is shared with you."
        ):
            return self._clients.ec2.describe_images(ImageIds=[ami])["Images"][0].get("RootDeviceName", "/dev/sda1")

    def _judge(self, facts: Facts) -> None:
        for finding in facts.findings:
            self._report(f"{finding.severity.upper():4} {finding.check}: {finding.seen}; expected {finding.expected}")
        failures = [finding for finding in facts.findings if finding.severity is Severity.FAIL]
        if failures:
            lines = [f"- {f.check}: {f.seen}; expected {f.expected}: {f.why}. To mend it: {f.fix}" for f in failures]
            raise LaunchPreflightError("\n".join(["nothing was started:", *lines]))

    def _cost(self, request: LaunchRequest, fleets: dict[NodeRole, Fleet]) -> Cost:
        counts: dict[str, int] = {}
        for fleet in fleets.values():
            counts[fleet.instance_type] = counts.get(fleet.instance_type, 0) + fleet.count
        prices = {name: hourly_price(name, region=request.region, pricing=self._pricing) for name in counts}
        return Cost(tuple(CostLine(name, count, prices[name]) for name, count in sorted(counts.items())))

    def _confirm(self, request: LaunchRequest, cost: Cost) -> None:
        limit = self._limits.max_hourly_usd
        if limit is not None and cost.hourly_usd > limit:
            raise DeclinedError(
                f"{cost.hourly_usd:.2f} USD an hour is over --max-hourly-usd {limit:g}; nothing was started"
            )
        if not cost.is_complete and not self._limits.accept_unknown_price:
            raise DeclinedError(
                "the price list has no price for a type, see above; look it up, then add --accept-unknown-price. "
                "Nothing was started"
            )
        if not self._limits.confirm(f"Start cluster {request.cluster} in {request.region} at this price?"):
            raise DeclinedError("not confirmed; nothing was started")

    def _dry_run(self, request: LaunchRequest, facts: Facts, missing: Iterable[Machine]) -> None:
        known = own_security_group(request.cluster, facts.vpc, ec2=self._clients.ec2)
        groups = request.security_groups or ((known,) if known else ())
        wanted = {(machine.role, machine.index) for machine in missing}
        for machine in machines(request, _place(request, facts, groups, with_placement=False)):
            if (machine.role, machine.index) in wanted:
                self._judge_by_ec2(machine)
        self._report("dry run: EC2 would have started every machine; nothing was made")

    def _judge_by_ec2(self, machine: Machine) -> None:
        from botocore.exceptions import ClientError  # noqa: PLC0415 - only where boto3 is

        parameters = dict(machine.parameters)
        # Without a group of its own yet, EC2 judges the request with the network's default group.
        interfaces = [{k: v for k, v in i.items() if k != "Groups" or v} for i in parameters["NetworkInterfaces"]]
        try:
            self._clients.ec2.run_instances(**{**parameters, "NetworkInterfaces": interfaces}, DryRun=True)
        except ClientError as error:
            if error.response["Error"]["Code"] != _DRY_RUN_PASSED:
                said = f"{error.response['Error']['Code']}: {error.response['Error'].get('Message', '')}"
                raise LaunchPreflightError(f"EC2 would not start {machine.name}: {said}") from error

    def _start(self, request: LaunchRequest, facts: Facts, missing: Iterable[Machine]) -> None:
        ec2 = self._clients.ec2
        groups = request.security_groups or (ensure_security_group(request.cluster, facts.vpc, ec2=ec2),)
        if _wants_placement_group(request):
            ensure_placement_group(request.cluster, ec2=ec2)
        wanted = {(machine.role, machine.index) for machine in missing}
        started: list[str] = []
        for machine in machines(request, _place(request, facts, groups)):
            if (machine.role, machine.index) in wanted:
                started.append(self._run(request, machine, started))

    def _run(self, request: LaunchRequest, machine: Machine, started: list[str]) -> str:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - only where boto3 is

        name = machine.name
        try:
            found = self._clients.ec2.run_instances(**machine.parameters, ClientToken=self._token(request, machine))
        except (ClientError, BotoCoreError) as error:
            if started:
                self._clients.ec2.terminate_instances(InstanceIds=started)
            raise CapacityError(
                f"{name} ({machine.instance_type}) could not be started: {error}. "
                f"{len(started)} machines of this call were terminated again; try later, another zone, or a reservation"
            ) from error
        instance = found["Instances"][0]["InstanceId"]
        self._report(f"started {name}: {instance}, {machine.instance_type}")
        return instance

    def _token(self, request: LaunchRequest, machine: Machine) -> str:
        """The same for two people who start one cluster at once, another for a later start of the same machine."""
        hour = int(self._now() // _HOUR_S)
        text = f"{request.cluster}/{machine.role}/{machine.index}/{machine.spec}/{hour}/{self._ended(request)}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _ended(self, request: LaunchRequest) -> str:
        # EC2 shows terminated instances for about an hour, and would answer their token with them.
        found = instances_of(request.cluster, ec2=self._clients.ec2, states=("shutting-down", "terminated"))
        return ",".join(instance.id for instance in found)


def _place(request: LaunchRequest, facts: Facts, groups: tuple[str, ...], *, with_placement: bool = True) -> Place:
    placement = resource_name(request.cluster) if with_placement and _wants_placement_group(request) else None
    return Place(facts.ami, facts.root_device, groups, placement)


def _wants_placement_group(request: LaunchRequest) -> bool:
    # A capacity block lies in a placement of its own, and refuses another.
    return not request.capacity_block


def _fleets(missing: Iterable[Machine]) -> dict[NodeRole, Fleet]:
    counts: dict[NodeRole, tuple[str, int]] = {}
    for machine in missing:
        counts[machine.role] = (machine.instance_type, counts.get(machine.role, ("", 0))[1] + 1)
    return {role: Fleet(count=count, instance_type=name) for role, (name, count) in counts.items()}
