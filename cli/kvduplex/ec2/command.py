"""``kvduplex launch``: start, look at and end a cluster of prebuilt images."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
import yaml

from kvduplex.console import note, say
from kvduplex.ec2.cluster import Instance, instances_of
from kvduplex.ec2.errors import RequestError
from kvduplex.ec2.finish import leftovers
from kvduplex.ec2.finish import terminate as terminate_cluster
from kvduplex.ec2.logs import machine_logs, named_instance
from kvduplex.ec2.preflight import Clients
from kvduplex.ec2.pricing import PRICING_REGION
from kvduplex.ec2.request import LaunchRequest
from kvduplex.ec2.start import Launcher, Limits
from kvduplex.node.aws import session
from kvduplex_transfer.strictyaml import parse_yaml

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Launch a cluster from the prebuilt image, without CDK."
)

ClusterName = Annotated[str, typer.Argument(help="Name of the cluster.")]
RegionName = Annotated[str, typer.Option("--region", help="AWS region.", envvar="AWS_REGION")]


@app.command()
def up(
    cluster: ClusterName,
    region: RegionName,
    subnet: Annotated[str, typer.Option(help="Private subnet with a way to AWS services: subnet-...")],
    ami: Annotated[str, typer.Option(help="kvduplex image: ami-..., or the SSM parameter that holds one.")],
    instance_profile: Annotated[str, typer.Option(help="Instance profile; docs/launch.md shows its policy.")],
    backend: Annotated[str, typer.Option(help="neuron, gpu or host.")],
    instance_type: Annotated[str, typer.Option(help="EC2 type of the engines, e.g. trn2.48xlarge.")],
    decode_type: Annotated[str | None, typer.Option(help="EC2 type of decode engines, when another.")] = None,
    router_type: Annotated[str, typer.Option(help="EC2 type of routers.")] = "c7i.xlarge",
    prefill: Annotated[int, typer.Option(help="Prefill machines; 0 with a recipe of replicas.", min=0)] = 1,
    decode: Annotated[int, typer.Option(help="Decode machines.")] = 1,
    routers: Annotated[int, typer.Option(help="Router machines.")] = 1,
    recipe: Annotated[str | None, typer.Option(help="Recipe of the backend.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Hub id, or folder on the machines; the recipe's when not given.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Commit or tag of the model.")] = None,
    weights: Annotated[str | None, typer.Option(help="s3://BUCKET/PREFIX to copy the weights from.")] = None,
    security_group: Annotated[list[str] | None, typer.Option(help="Existing group; repeatable.")] = None,
    efa_layout: Annotated[str, typer.Option(help="A (current) or B (older, one address a card).")] = "A",
    reservation: Annotated[str | None, typer.Option(help="Capacity reservation or block: cr-...")] = None,
    capacity_block: Annotated[
        bool, typer.Option("--capacity-block", help="The reservation is a capacity block.")
    ] = False,
    client_keys: Annotated[
        str | None, typer.Option(help="Secret with the clients' keys; opens the router to the subnet.")
    ] = None,
    engine_key: Annotated[str | None, typer.Option(help="Secret with the engines' key.")] = None,
    volume_gib: Annotated[int, typer.Option(help="Root volume of engines.")] = 500,
    options: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of the recipe; repeatable.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Let EC2 judge every request; make nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before spending.")] = False,
    max_hourly_usd: Annotated[float | None, typer.Option(help="Refuse anything dearer an hour.")] = None,
    accept_unknown_price: Annotated[
        bool, typer.Option("--accept-unknown-price", help="Start types the price list lacks.")
    ] = False,
) -> None:
    """Start what is missing of a cluster: checked first, priced, and confirmed."""
    request = LaunchRequest.parse(
        {
            "cluster": cluster,
            "region": region,
            "subnet": subnet,
            "ami": ami,
            "instance_profile": instance_profile,
            "backend": backend,
            "recipe": recipe,
            "model": _model(model, revision, weights),
            "prefill": {"count": prefill, "instance_type": instance_type} if prefill else None,
            "decode": {"count": decode, "instance_type": decode_type or instance_type},
            "router": {"count": routers, "instance_type": router_type},
            "security_groups": tuple(security_group or ()),
            "efa_layout": efa_layout,
            "reservation": reservation,
            "capacity_block": capacity_block,
            "client_keys": client_keys,
            "engine_key": engine_key,
            "volume_gib": volume_gib,
            "options": _settings(options or []),
        }
    )
    aws = session(region)
    limits = Limits(
        confirm=lambda question: yes or typer.confirm(question, err=True),
        max_hourly_usd=max_hourly_usd,
        accept_unknown_price=accept_unknown_price,
    )
    pricing = aws.client("pricing", region_name=PRICING_REGION)
    launcher = Launcher(_clients(region), pricing=pricing, limits=limits, report=note, now=time.time)
    instances = launcher.up(request, dry_run=dry_run)
    if not dry_run:
        say(_table(instances))
        note(_next_steps(cluster, region, instances))


@app.command()
def status(cluster: ClusterName, region: RegionName) -> None:
    """Show the machines of a cluster; exit code 1 when there are none."""
    instances = instances_of(cluster, ec2=_clients(region).ec2)
    if not instances:
        note(f"cluster {cluster}: no machines in {region}")
        raise typer.Exit(1)
    say(_table(instances))
    note(_next_steps(cluster, region, instances))


@app.command()
def logs(
    cluster: ClusterName,
    machine: Annotated[str, typer.Argument(help="Machine, e.g. decode-0.")],
    region: RegionName,
    lines: Annotated[int, typer.Option(help="Last lines of each log.", min=1, max=10_000)] = 100,
) -> None:
    """Print the last lines of a machine's logs, through Systems Manager."""
    clients = _clients(region)
    instance = named_instance(instances_of(cluster, ec2=clients.ec2), machine)
    say(machine_logs(instance, lines=lines, ssm=clients.ssm, ec2=clients.ec2))


@app.command()
def terminate(
    cluster: ClusterName,
    region: RegionName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """End a cluster: its machines and its own groups; then list what is left."""
    ec2 = _clients(region).ec2
    instances = instances_of(cluster, ec2=ec2)
    if instances:
        note(_table(instances))
        if not yes and not typer.confirm(f"Terminate these {len(instances)} machines?", err=True):
            note("nothing was terminated")
            raise typer.Exit(1)
    terminate_cluster(cluster, instances, ec2=ec2)
    left = list(leftovers(cluster, ec2=ec2))
    say("\n".join(["left over, and possibly charged:", *left]) if left else f"cluster {cluster}: nothing is left")
    note("Not touched: capacity reservations and blocks, secrets, images, buckets, log groups.")
    if left:
        raise typer.Exit(1)


def _clients(region: str) -> Clients:
    aws = session(region)
    return Clients(
        ec2=aws.client("ec2"), iam=aws.client("iam"), quotas=aws.client("service-quotas"), ssm=aws.client("ssm")
    )


def _model(model: str | None, revision: str | None, weights: str | None) -> dict[str, Any] | None:
    if model is None:
        if revision or weights:
            raise RequestError("--revision and --weights belong to a model; give --model as well")
        return None
    return {"id": model, "revision": revision, "source": weights}


def _settings(texts: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise RequestError(f"--set {text}: write KEY=VALUE")
        try:
            settings[key] = parse_yaml(value)
        except yaml.YAMLError as error:
            raise RequestError(f"--set {text}: the value is not YAML") from error
    return settings


def _table(instances: tuple[Instance, ...]) -> str:
    rows = [("MACHINE", "INSTANCE", "TYPE", "STATE", "ADDRESS")]
    rows += [(i.name, i.id, i.type, i.state, i.address) for i in instances]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _next_steps(cluster: str, region: str, instances: tuple[Instance, ...]) -> str:
    router = next((instance for instance in instances if instance.role == "router"), None)
    if router is None:
        return "No router runs."
    forward = (
        f"aws ssm start-session --region {region} --target {router.id} --document-name AWS-StartPortForwardingSession "
        "--parameters portNumber=8000,localPortNumber=8000"
    )
    return "\n".join(
        [
            "Engines load weights now, and compile when the recipe is new to them; that may take tens of minutes.",
            f"Their logs:      kvduplex launch logs {cluster} decode-0 --region {region}",
            f"Reach the router: {forward}",
            "Ready when:      curl -s http://127.0.0.1:8000/ready",
            f"End it:          kvduplex launch terminate {cluster} --region {region}",
        ]
    )
