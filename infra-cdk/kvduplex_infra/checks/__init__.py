"""What synthesised templates must hold to do on EC2 what they say; CDK, cfn-lint and cdk-nag do not look for it."""

from kvduplex_infra.checks.assembly import Assembly
from kvduplex_infra.checks.finding import Finding
from kvduplex_infra.checks.inspect import inspect

__all__ = ["Assembly", "Finding", "inspect"]
