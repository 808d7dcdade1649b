"""The image stack: an Image Builder pipeline for one flavour, apart from every cluster.

A cluster names the version of an image that it runs; building a new one changes no cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aws_cdk import CfnOutput, DefaultStackSynthesizer, Environment, Fn, Stack, Tags
from aws_cdk import aws_iam as iam
from aws_cdk import aws_imagebuilder as imagebuilder
from constructs import Construct

from kvduplex_image.imagebuilder import Component, components, content_version
from kvduplex_image.recipe import ImageRecipe
from kvduplex_infra.policies import on_everything
from kvduplex_infra.session_manager import SESSION_MANAGER

__all__ = ["Build", "ImageStack"]

_Recipe = imagebuilder.CfnImageRecipe
_Distribution = imagebuilder.CfnDistributionConfiguration


@dataclass(frozen=True, slots=True)
class Build:
    """What an image is built from, as `python -m kvduplex_image bundle` left it.

    Attributes:
        recipe: The image recipe.
        parent_image: Id that its parent resolved to.
        bundle_url: ``s3://BUCKET/KEY`` that the bundle was copied to.
        bundle_sha256: Its digest.
    """

    recipe: ImageRecipe
    parent_image: str
    bundle_url: str
    bundle_sha256: str


class ImageStack(Stack):
    """Components, recipe and pipeline of one flavour; started by hand, since a build costs money.

    Attributes:
        parameter: SSM parameter that the pipeline writes the new id to. Image Builder's own role may write below
            ``/imagebuilder/`` alone (its service-linked role policy).
        role: Role of the machine that builds.
    """

    def __init__(self, scope: Construct, *, build: Build, account: str | None) -> None:
        recipe = build.recipe
        super().__init__(
            scope,
            f"kvduplex-image-{recipe.flavour}",
            env=Environment(account=account, region=recipe.region),
            description=f"kvduplex images of flavour {recipe.flavour}",
            synthesizer=DefaultStackSynthesizer(generate_bootstrap_version_rule=False),
        )
        Tags.of(self).add("kvduplex:flavour", recipe.flavour.value)
        self._recipe = recipe
        self.parameter = f"/imagebuilder/kvduplex/{recipe.flavour}/{recipe.version}/ami"
        parts = components(recipe, bundle_url=build.bundle_url, bundle_sha256=build.bundle_sha256)
        self.role = self._role(build.bundle_url)
        imagebuilder.CfnImagePipeline(
            self,
            "Pipeline",
            name=recipe.name.replace(".", "-"),
            image_recipe_arn=self._image(parts, build.parent_image).attr_arn,
            infrastructure_configuration_arn=self._machine().attr_arn,
            distribution_configuration_arn=self._distribution().attr_arn,
            image_tests_configuration=imagebuilder.CfnImagePipeline.ImageTestsConfigurationProperty(
                image_tests_enabled=True, timeout_minutes=90
            ),
        )
        CfnOutput(self, "Parameter", value=self.parameter)

    def _image(self, parts: Sequence[Component], parent_image: str) -> imagebuilder.CfnImageRecipe:
        made = [
            imagebuilder.CfnComponent(
                self,
                part.name.removeprefix("kvduplex-").title().replace("-", ""),
                name=part.name,
                version=part.version,
                description=part.description,
                platform="Linux",
                data=part.data,
            )
            for part in parts
        ]
        content = "\n".join([parent_image, str(self._recipe.volume_gib), *(f"{p.name} {p.version}" for p in parts)])
        return _Recipe(
            self,
            "Recipe",
            name=f"kvduplex-{self._recipe.flavour}",
            version=content_version(self._recipe.version, content),
            parent_image=parent_image,
            components=[_Recipe.ComponentConfigurationProperty(component_arn=one.attr_arn) for one in made],
            block_device_mappings=[_root(self._recipe.volume_gib)],
        )

    def _role(self, bundle_url: str) -> iam.Role:
        bucket, _, key = bundle_url.removeprefix("s3://").partition("/")
        where = f"{self.region}:{self.account}"
        role = iam.Role(self, "Builder", assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"))
        role.add_to_policy(on_everything("SessionManager", SESSION_MANAGER))
        for sid, actions, arn in (
            ("ReadBundle", ["s3:GetObject"], f"arn:{self.partition}:s3:::{bucket}/{key}"),
            # AWSTOE, the program that runs components, is fetched from Image Builder's own buckets.
            ("ReadBuilder", ["s3:GetObject"], f"arn:{self.partition}:s3:::ec2imagebuilder-*"),
            (
                "ReadComponents",
                ["imagebuilder:GetComponent"],
                f"arn:{self.partition}:imagebuilder:{where}:component/kvduplex-{self._recipe.flavour}-*",
            ),
            (
                "WriteBuildLogs",
                ["logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents"],
                f"arn:{self.partition}:logs:{where}:log-group:/aws/imagebuilder/*",
            ),
        ):
            role.add_to_policy(iam.PolicyStatement(sid=sid, actions=actions, resources=[arn]))
        return role

    def _machine(self) -> imagebuilder.CfnInfrastructureConfiguration:
        profile = iam.CfnInstanceProfile(self, "Profile", roles=[self.role.role_name])
        return imagebuilder.CfnInfrastructureConfiguration(
            self,
            "Machine",
            name=f"kvduplex-{self._recipe.flavour}",
            instance_types=[self._recipe.instance_type],
            # Image Builder takes the name; a GetAtt of the ARN makes it wait for the profile all the same.
            instance_profile_name=Fn.select(1, Fn.split("instance-profile/", profile.attr_arn)),
            instance_metadata_options=imagebuilder.CfnInfrastructureConfiguration.InstanceMetadataOptionsProperty(
                http_tokens="required", http_put_response_hop_limit=1
            ),
            terminate_instance_on_failure=True,
        )

    def _distribution(self) -> imagebuilder.CfnDistributionConfiguration:
        regions = (self._recipe.region, *self._recipe.copy_to)
        return _Distribution(
            self,
            "Distribution",
            name=f"kvduplex-{self._recipe.flavour}",
            distributions=[self._target(region) for region in regions],
        )

    def _target(self, region: str) -> imagebuilder.CfnDistributionConfiguration.DistributionProperty:
        parameter: Any = _Distribution.SsmParameterConfigurationProperty(
            parameter_name=self.parameter, data_type="aws:ec2:image"
        )
        return _Distribution.DistributionProperty(
            region=region,
            # Free-form in CloudFormation's schema, so the CDK does not turn its own names into CloudFormation's.
            ami_distribution_configuration={
                "Name": f"{self._recipe.name}-{{{{ imagebuilder:buildDate }}}}",
                "AmiTags": {"kvduplex:flavour": self._recipe.flavour.value, "kvduplex:version": self._recipe.version},
            },
            ssm_parameter_configurations=[parameter],
        )


def _root(volume_gib: int) -> imagebuilder.CfnImageRecipe.InstanceBlockDeviceMappingProperty:
    return _Recipe.InstanceBlockDeviceMappingProperty(
        device_name="/dev/sda1",
        ebs=_Recipe.EbsInstanceBlockDeviceSpecificationProperty(
            encrypted=True, delete_on_termination=True, volume_size=volume_gib, volume_type="gp3"
        ),
    )
