"""Checks of a host that more than one accelerator backend needs, each a pure function over a `Host`.

A check returns findings and never raises for what it finds; it reads files, runs read-only tools with a deadline, and
imports no vendor package.
"""
