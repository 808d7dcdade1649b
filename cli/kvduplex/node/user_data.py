"""EC2 user data that puts ``/etc/kvduplex/node.yaml`` on a machine made from the kvduplex image."""

from __future__ import annotations

import yaml

from kvduplex.node.config import NODE_FILE, NodeConfig
from kvduplex.node.document import NodeConfigError, dump_node

__all__ = ["MAX_USER_DATA_BYTES", "render_user_data"]

MAX_USER_DATA_BYTES = 16 * 1024
"""EC2's limit, before base64 (EC2 user guide, "Run commands when you launch an EC2 instance")."""


def render_user_data(config: NodeConfig) -> str:
    """A ``#cloud-config`` document that writes the node file.

    Nothing else is needed: the image's ``kvduplex-node.service`` waits for cloud-init, reads the file and starts
    what the role asks for. The text is plain; EC2 and CloudFormation want it in base64.

    Raises:
        NodeConfigError: The document is larger than EC2 takes.
    """
    document = {
        "write_files": [
            {"path": NODE_FILE, "owner": "root:kvduplex", "permissions": "0640", "content": dump_node(config)},
        ],
    }
    text = "#cloud-config\n" + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1000)
    if (size := len(text.encode())) > MAX_USER_DATA_BYTES:
        raise NodeConfigError(
            f"user data of cluster {config.cluster}, role {config.role}: {size} bytes, EC2 takes at most "
            f"{MAX_USER_DATA_BYTES}; shorten engine.options or router.options"
        )
    return text
