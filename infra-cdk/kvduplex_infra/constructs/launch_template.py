"""The launch template of a role: interfaces, image, disks, metadata service, capacity."""

from __future__ import annotations

from collections.abc import Sequence

from aws_cdk import CfnTag, Fn
from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from kvduplex_infra.cluster.capacity import Capacity, CapacityBlock, OnDemand
from kvduplex_transfer.hostchecks.efa_layout import InterfaceType, NetworkInterface

__all__ = ["launch_template"]

_ROOT_DEVICE = "/dev/sda1"
"""Root device of the Ubuntu images that the kvduplex images are made from."""
_LEAST_IOPS = 3000
_Data = ec2.CfnLaunchTemplate


def launch_template(
    scope: Construct,
    construct_id: str,
    *,
    image_id: str,
    instance_type: str,
    profile_arn: str,
    user_data: str,
    interfaces: Sequence[NetworkInterface],
    primary_groups: Sequence[str],
    other_groups: Sequence[str],
    volume_gib: int,
    volume_mibps: int,
    tags: dict[str, str],
    capacity: Capacity,
    placement_group: str | None,
) -> ec2.CfnLaunchTemplate:
    """Make a template; L1, because CDK's own class knows no network interfaces.

    Args:
        scope: Parent.
        construct_id: Id under it.
        image_id: AMI id, or a reference that CloudFormation resolves.
        instance_type: EC2 type.
        profile_arn: Instance profile.
        user_data: Text, not yet in base64.
        interfaces: Primary first.
        primary_groups: Security groups of the primary interface.
        other_groups: Security groups of all others.
        volume_gib: Root volume.
        volume_mibps: Its throughput in MiB/s.
        tags: Tags of instances, volumes and interfaces.
        capacity: Where instances come from.
        placement_group: Cluster placement group, or None.
    """
    return ec2.CfnLaunchTemplate(
        scope,
        construct_id,
        launch_template_data=_Data.LaunchTemplateDataProperty(
            image_id=image_id,
            instance_type=instance_type,
            iam_instance_profile=_Data.IamInstanceProfileProperty(arn=profile_arn),
            user_data=Fn.base64(user_data),
            network_interfaces=[
                _interface(i, primary_groups if n == 0 else other_groups, alone=len(interfaces) == 1)
                for n, i in enumerate(interfaces)
            ],
            block_device_mappings=[_root_volume(volume_gib, volume_mibps)],
            metadata_options=_Data.MetadataOptionsProperty(
                http_endpoint="enabled",
                http_tokens="required",
                http_put_response_hop_limit=1,
                instance_metadata_tags="enabled",
            ),
            monitoring=_Data.MonitoringProperty(enabled=True),
            instance_initiated_shutdown_behavior="terminate",
            tag_specifications=[_tags(kind, tags) for kind in ("instance", "volume", "network-interface")],
            placement=_Data.PlacementProperty(group_name=placement_group) if placement_group else None,
            capacity_reservation_specification=_reservation(capacity),
            instance_market_options=(
                _Data.InstanceMarketOptionsProperty(market_type="capacity-block")
                if isinstance(capacity, CapacityBlock)
                else None
            ),
        ),
    )


def _interface(
    interface: NetworkInterface, groups: Sequence[str], *, alone: bool
) -> ec2.CfnLaunchTemplate.NetworkInterfaceProperty:
    return _Data.NetworkInterfaceProperty(
        network_card_index=None if alone else interface.card,
        device_index=interface.device,
        interface_type=None if interface.type is InterfaceType.INTERFACE else interface.type.value,
        groups=list(groups),
        delete_on_termination=True,
        # EC2 refuses the key, whatever its value, for a machine with several interfaces.
        associate_public_ip_address=False if alone else None,
    )


def _root_volume(size_gib: int, mibps: int) -> ec2.CfnLaunchTemplate.BlockDeviceMappingProperty:
    return _Data.BlockDeviceMappingProperty(
        device_name=_ROOT_DEVICE,
        ebs=_Data.EbsProperty(
            volume_size=size_gib,
            volume_type="gp3",
            throughput=mibps,
            # gp3 gives a quarter of a MiB/s an operation (EBS user guide, "General Purpose SSD volumes").
            iops=max(_LEAST_IOPS, 4 * mibps),
            encrypted=True,
            delete_on_termination=True,
        ),
    )


def _tags(kind: str, tags: dict[str, str]) -> ec2.CfnLaunchTemplate.TagSpecificationProperty:
    return _Data.TagSpecificationProperty(
        resource_type=kind, tags=[CfnTag(key=key, value=value) for key, value in tags.items()]
    )


def _reservation(capacity: Capacity) -> ec2.CfnLaunchTemplate.CapacityReservationSpecificationProperty | None:
    if isinstance(capacity, OnDemand):
        return None
    target = _Data.CapacityReservationTargetProperty(capacity_reservation_id=capacity.id)
    return _Data.CapacityReservationSpecificationProperty(capacity_reservation_target=target)
