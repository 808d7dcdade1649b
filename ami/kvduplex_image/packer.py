"""The Packer template of an image, as data; `json.dumps` of it is a ``.pkr.json`` file.

Names follow the Amazon plugin's documentation (``amazon-ebs`` builder) and Packer's JSON form of HCL2.
"""

from __future__ import annotations

from typing import Any

from kvduplex_image.recipe import ImageRecipe

__all__ = ["packer_plugins", "packer_template"]

_PLUGIN = {"source": "github.com/hashicorp/amazon", "version": ">= 1.3.0"}
_ON_MACHINE = "/var/tmp/kvduplex-bundle"  # noqa: S108 - on the build machine, which nobody else uses


def packer_plugins() -> dict[str, Any]:
    """The block that ``packer init`` reads; a file of its own, since Packer before 1.7 does not know it."""
    return {"packer": {"required_version": ">= 1.9.0", "required_plugins": {"amazon": _PLUGIN}}}


def packer_template(recipe: ImageRecipe, *, parent_image: str, bundle: str, bundle_sha256: str) -> dict[str, Any]:
    """Describe the build of `recipe`.

    Args:
        recipe: The image.
        parent_image: Id that the recipe's parent resolved to.
        bundle: Path of the bundle, relative to where ``packer build`` runs.
        bundle_sha256: Its digest.
    """
    return {
        "variable": _variables(),
        "source": {"amazon-ebs": {"kvduplex": _source(recipe, parent_image)}},
        "build": [
            {
                "sources": ["source.amazon-ebs.kvduplex"],
                "provisioner": _provisioners(recipe, bundle, bundle_sha256),
                "post-processor": [{"manifest": {"output": "packer-manifest.json", "strip_path": True}}],
            }
        ],
    }


def _variables() -> dict[str, Any]:
    # No defaults: a build in the default network with an open port is nobody's wish.
    return {
        "subnet_id": {
            "type": "string",
            "description": "Private subnet with a way out to the package sources",
        },
        "security_group_id": {"type": "string", "description": "Group without inbound rules"},
        "instance_profile": {"type": "string", "description": "Profile with AmazonSSMManagedInstanceCore"},
    }


def _source(recipe: ImageRecipe, parent_image: str) -> dict[str, Any]:
    tags = {"Name": recipe.name, "kvduplex:flavour": recipe.flavour.value, "kvduplex:version": recipe.version}
    return {
        "region": recipe.region,
        "source_ami": parent_image,
        "instance_type": recipe.instance_type,
        "ami_name": f"{recipe.name}-{{{{timestamp}}}}",
        "ami_description": f"kvduplex {recipe.version}, {recipe.flavour}, from {parent_image}",
        "ami_regions": list(recipe.copy_to),
        "encrypt_boot": True,
        "subnet_id": "${var.subnet_id}",
        "security_group_id": "${var.security_group_id}",
        "iam_instance_profile": "${var.instance_profile}",
        # Through Session Manager, so that no port is open while it builds.
        "communicator": "ssh",
        "ssh_interface": "session_manager",
        "ssh_username": "ubuntu",
        "ssh_timeout": "15m",
        "metadata_options": {"http_endpoint": "enabled", "http_tokens": "required", "http_put_response_hop_limit": 1},
        "imds_support": "v2.0",
        "launch_block_device_mappings": [
            {
                "device_name": "/dev/sda1",
                "volume_type": "gp3",
                "throughput": 250,
                "iops": 3000,
                "volume_size": recipe.volume_gib,
                "encrypted": True,
                "delete_on_termination": True,
            }
        ],
        "tags": tags,
        "run_tags": {**tags, "Name": f"{recipe.name}-build"},
        "snapshot_tags": tags,
    }


def _provisioners(recipe: ImageRecipe, bundle: str, sha256: str) -> list[dict[str, Any]]:
    archive = f"{_ON_MACHINE}.tar.gz"
    unpack = [
        f"echo '{sha256}  {archive}' | sha256sum --check --quiet",
        f"sudo install -d -m 0755 {_ON_MACHINE}",
        f"sudo tar -xzf {archive} -C {_ON_MACHINE} --no-same-owner",
    ]
    layers = [{"shell": {"inline": [f"sudo {_ON_MACHINE}/provision/run.sh {layer}"]}} for layer in recipe.layers]
    manifest = {"source": "/usr/share/kvduplex/manifest.json", "destination": "manifest.json", "direction": "download"}
    return [
        {"shell": {"inline": ["cloud-init status --wait || test $? = 2"]}},
        {"file": {"source": bundle, "destination": archive}},
        {"shell": {"inline": unpack}},
        *layers,
        {"shell": {"inline": ["sudo kvduplex node selftest --image"]}},
        {"file": manifest},
        {"shell": {"inline": [f"sudo {_ON_MACHINE}/provision/run.sh seal", f"sudo rm -rf {_ON_MACHINE} {archive}"]}},
    ]
