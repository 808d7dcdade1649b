"""Workloads as data: conversations with arrival times, turns, gaps and shared content."""
