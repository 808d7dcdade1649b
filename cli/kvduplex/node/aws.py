"""The one door to boto3, which only the ``aws`` extra installs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvduplex.errors import MissingExtraError
from kvduplex.node.errors import AwsError

if TYPE_CHECKING:
    import boto3

__all__ = ["explained", "session"]

_NO_CREDENTIALS = "Sign in (`aws sso login`, `aws configure`), or give the machine an instance profile."
_NO_WAY = "Check the region's name, and that this machine reaches AWS: its proxy, VPC endpoints or NAT."


def session(region: str | None) -> boto3.Session:
    """A boto3 session with bounded waits.

    Raises:
        MissingExtraError: boto3 is not installed.
    """
    try:
        import boto3  # noqa: PLC0415 - a vendor package, imported at its one door
        from botocore.config import Config  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("boto3 is not installed; pip install 'kvduplex[aws]'") from error
    made = boto3.Session(region_name=region)
    # Five seconds to connect, thirty to answer, with retries: a throttled call is no reason to fail a start.
    bounded = Config(connect_timeout=5, read_timeout=30, retries={"mode": "standard", "max_attempts": 5})
    made._session.set_default_client_config(bounded)  # noqa: SLF001 - botocore's own setter, boto3 offers none
    return made


@contextlib.contextmanager
def explained(doing: str, error_class: type[AwsError] = AwsError, *, remedy: str) -> Iterator[None]:
    """Turn botocore's errors inside the block into one that says what was being done and how to go on.

    Raises:
        AwsError: An AWS call inside failed; it is of `error_class`.
    """
    from botocore.exceptions import (  # noqa: PLC0415
        BotoCoreError,
        ClientError,
        HTTPClientError,
        NoCredentialsError,
        PartialCredentialsError,
    )
    from botocore.exceptions import ConnectionError as UnreachableError  # noqa: PLC0415

    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "unknown")
        said = error.response.get("Error", {}).get("Message", "")
        raise error_class(f"{doing}: {error.operation_name} was refused with {code}: {said} {remedy}") from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise error_class(f"{doing}: {error}. {_NO_CREDENTIALS}") from error
    except (UnreachableError, HTTPClientError) as error:
        raise error_class(f"{doing}: {error}. {_NO_WAY}") from error
    except BotoCoreError as error:
        raise error_class(f"{doing}: {error}. {remedy}") from error
