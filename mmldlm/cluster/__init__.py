"""Hosts, launchers and the environment that they pass on."""
