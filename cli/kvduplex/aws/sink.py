"""Where metrics go: CloudWatch, under one namespace and with the same dimensions for all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from kvduplex.aws.metrics import Datum

if TYPE_CHECKING:
    from types_boto3_cloudwatch import CloudWatchClient

__all__ = ["NAMESPACE", "CloudWatchSink", "called"]

NAMESPACE = "kvduplex"
_PASSING = frozenset({"Throttling", "RequestLimitExceeded", "ServiceUnavailable", "InternalFailure"})
_log = logging.getLogger(__name__)


def called(name: str, call: Callable[[], object]) -> bool:
    """Whether a call reached AWS; a refusal is logged and counts as well, unless it may pass by itself."""
    try:
        call()
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "unknown")
        _log.warning("%s refused by AWS: %s", name, code)
        return code not in _PASSING
    except BotoCoreError as error:
        _log.warning("%s not sent: %s", name, type(error).__name__)
        return False
    _log.info("%s told", name)
    return True


class CloudWatchSink:
    """Publishes metrics.

    Args:
        cloudwatch: boto3 client.
        dimensions: Of every metric.
    """

    def __init__(self, cloudwatch: CloudWatchClient, *, dimensions: Mapping[str, str]) -> None:
        self._cloudwatch = cloudwatch
        self._dimensions = [{"Name": name, "Value": value} for name, value in dimensions.items()]

    def publish(self, data: Sequence[Datum]) -> bool:
        """Send metrics; False when they could not be sent, in which case they are dropped."""
        if not data:
            return True
        entries = [
            {
                "MetricName": datum.metric.value,
                "Dimensions": self._dimensions,
                "Unit": datum.unit,
                "Values": list(datum.values),
                "Counts": list(datum.counts),
            }
            for datum in data
        ]
        return called(
            "publish",
            lambda: self._cloudwatch.put_metric_data(Namespace=NAMESPACE, MetricData=entries),  # type: ignore[arg-type]
        )
