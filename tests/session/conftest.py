"""Runs in processes of their own."""

from tests.processes import processes, settings, two_hosts

__all__ = ["processes", "settings", "two_hosts"]
