"""The EC2 instance metadata service, version 2 (EC2 user guide, "Access instance metadata")."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from kvduplex.node.errors import MetadataServiceError

__all__ = ["InstanceMetadata"]

_ENDPOINT = "http://169.254.169.254"
_TOKEN_TTL_S = 21_600


class InstanceMetadata:
    """Reads what an instance may know about itself.

    Args:
        endpoint: Base URL of the service; another one only in tests.
        timeout_s: Deadline of one request, in seconds.
    """

    def __init__(self, endpoint: str = _ENDPOINT, *, timeout_s: float = 2.0) -> None:
        self._authority = urlsplit(endpoint).netloc
        self._timeout_s = timeout_s
        self._token: str | None = None

    def region(self) -> str:
        """Region the instance runs in.

        Raises:
            MetadataServiceError: The service does not answer.
        """
        return self._required("placement/region")

    def instance_id(self) -> str:
        """The instance's id.

        Raises:
            MetadataServiceError: The service does not answer.
        """
        return self._required("instance-id")

    def private_address(self) -> str:
        """Private IPv4 address of the primary interface.

        Raises:
            MetadataServiceError: The service does not answer.
        """
        return self._required("local-ipv4")

    def target_lifecycle_state(self) -> str | None:
        """Where Auto Scaling wants the instance, e.g. ``InService`` or ``Terminated``; None outside a group.

        Raises:
            MetadataServiceError: The service does not answer.
        """
        return self._get("autoscaling/target-lifecycle-state")

    def _required(self, path: str) -> str:
        value = self._get(path)
        if value is None:
            raise MetadataServiceError(f"the instance metadata service has no {path}; is this an EC2 instance?")
        return value

    def _get(self, path: str) -> str | None:
        if self._token is None:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
            self._token = self._request("PUT", "/latest/api/token", ttl)
        answer = self._request("GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token or ""})
        if answer is None and path != "instance-id":
            return None
        return answer

    def _request(self, method: str, path: str, headers: dict[str, str]) -> str | None:
        connection = http.client.HTTPConnection(self._authority, timeout=self._timeout_s)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            body = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise MetadataServiceError(
                f"the instance metadata service at {self._authority} does not answer: {error}; off EC2, set region and "
                "engine.advertised_host in the node file"
            ) from error
        finally:
            connection.close()
        if answer.status == http.client.UNAUTHORIZED:
            self._token = None  # expired; the next call asks anew
        return body.strip() if answer.status == http.client.OK else None
