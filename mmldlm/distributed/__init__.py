"""Ranks: environment, process groups, heartbeats, failure reports."""
