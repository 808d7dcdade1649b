"""Turns failed checks into the one error that stops a start."""

from __future__ import annotations

from collections.abc import Iterable

from kvduplex.errors import PreflightError
from kvduplex_transfer.interface import Finding, Severity

__all__ = ["refuse_failures"]


def refuse_failures(findings: Iterable[Finding]) -> None:
    """Return when no finding is a failure.

    Raises:
        PreflightError: Lists every failure with its cause and its remedy.
    """
    failures = [finding for finding in findings if finding.severity is Severity.FAIL]
    if failures:
        raise PreflightError("\n".join(["nothing was started:", *map(_paragraph, failures)]))


def _paragraph(finding: Finding) -> str:
    lines = [f"- {finding.check}: {finding.seen}; expected: {finding.expected}"]
    lines += [f"  {finding.why}."] if finding.why else []
    return "\n".join([*lines, f"  To mend it: {finding.fix}"])
