"""Ranks and process groups: environment, heartbeats, failure attribution, error reporting."""
