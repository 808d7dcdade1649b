"""An AWS that runs here: moto's server, and the few resource types it lacks that our stacks use.

Run as a program, ``python moto_aws.py PORT``: prints ``ready`` once it listens, and serves until its input ends.
"""

from __future__ import annotations

import sys
from typing import Any

from moto.core.common_models import CloudFormationModel
from moto.elbv2.models import FakeTargetGroup
from moto.kms.models import kms_backends  # noqa: F401 - loaded before its key is replaced
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from moto.secretsmanager.models import secretsmanager_backends
from moto.ssm.models import Parameter


class _Kept:
    """A resource that is accepted and kept as its properties."""

    kind = ""
    attributes: dict[str, str] = {}  # noqa: RUF012 - replaced, never changed

    def __init__(self, name: str, properties: dict[str, Any]) -> None:
        self.name = name
        self.properties = properties

    @property
    def physical_resource_id(self) -> str:
        return self.name

    @classmethod
    def has_cfn_attr(cls, attr: str) -> bool:
        return attr in cls.attributes

    def get_cfn_attribute(self, attribute_name: str) -> str:
        return self.attributes[attribute_name]

    @staticmethod
    def cloudformation_name_type() -> str:
        return ""

    @classmethod
    def cloudformation_type(cls) -> str:
        return cls.kind

    @classmethod
    def create_from_cloudformation_json(cls, name: str, body: dict[str, Any], *_: Any, **__: Any) -> Any:
        return cls(name, body.get("Properties", {}))

    @classmethod
    def update_from_cloudformation_json(cls, original_resource: Any, *_: Any, **__: Any) -> Any:
        return original_resource

    @classmethod
    def delete_from_cloudformation_json(cls, *_: Any) -> None:
        return None


class _Secret(_Kept):
    """A secret of moto's own, with a value of the length asked for."""

    kind = "AWS::SecretsManager::Secret"

    @classmethod
    def create_from_cloudformation_json(
        cls, name: str, body: dict[str, Any], account_id: str, region_name: str, **_: Any
    ) -> Any:
        wanted = body["Properties"]["GenerateSecretString"]
        backend = secretsmanager_backends[account_id][region_name]
        secret, _version = backend._add_secret(name, secret_string="k" * wanted["PasswordLength"])
        return cls(secret.arn, body["Properties"])


class _Parameter(_Kept):
    """A parameter of moto's own, without its tags: moto expects their other form."""

    kind = "AWS::SSM::Parameter"

    @classmethod
    def create_from_cloudformation_json(
        cls, name: str, body: dict[str, Any], account_id: str, region_name: str, **_: Any
    ) -> Any:
        properties = {key: value for key, value in body["Properties"].items() if key != "Tags"}
        return Parameter.create_from_cloudformation_json(name, {"Properties": properties}, account_id, region_name)


def _register(kind: str, attributes: dict[str, str] | None = None, *, base: type[_Kept] = _Kept) -> None:
    # Moto knows a type by being a direct subclass of its base, in a module whose second part names the service.
    members = {"kind": kind, "attributes": attributes or {}, "__module__": "stubs.cloudformation"}
    for name in vars(_Kept).keys() | vars(base).keys():
        if (not name.startswith("__") and name not in members) or name == "__init__":
            members[name] = base.__dict__.get(name, _Kept.__dict__.get(name))
    type(kind.replace("::", ""), (CloudFormationModel,), members)


def _register_all() -> None:
    for kind in (
        "AWS::AutoScaling::ScheduledAction",
        "AWS::Budgets::Budget",
        "AWS::EC2::PlacementGroup",
        "AWS::EC2::SecurityGroupEgress",
        "AWS::ElastiCache::User",
        "AWS::ElastiCache::UserGroup",
        "AWS::S3::BucketPolicy",
        "AWS::SNS::TopicPolicy",
    ):
        _register(kind)
    _register("AWS::CloudWatch::Alarm", {"Arn": "arn:aws:cloudwatch:us-east-2:123456789012:alarm:kept"})
    _register("AWS::ElastiCache::ServerlessCache", {"Endpoint.Address": "valkey.local", "Endpoint.Port": "6379"})
    _register("AWS::SecretsManager::Secret", base=_Secret)
    _register("AWS::SSM::Parameter", base=_Parameter)
    # Moto has keys, and stumbles over their tags in templates; the last class of a type is the one it uses.
    _register("AWS::KMS::Key", {"Arn": "arn:aws:kms:us-east-2:123456789012:key/kept"})


def _teach_target_groups() -> None:
    """Give moto's target groups the one attribute that metrics name them by."""

    def attribute(self: FakeTargetGroup, name: str) -> str:
        if name != "TargetGroupFullName":
            raise AttributeError(name)
        return str(self.arn).rpartition(":")[2]

    FakeTargetGroup.has_cfn_attr = classmethod(lambda _cls, attr: attr == "TargetGroupFullName")  # type: ignore[assignment,method-assign]
    FakeTargetGroup.get_cfn_attribute = attribute  # type: ignore[attr-defined]


def main() -> None:
    """Serve on the port given until standard input ends."""
    _register_all()
    _teach_target_groups()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1]), verbose=False)
    server.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
