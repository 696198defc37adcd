"""Preflight: check whether a run will start on its hosts, fit in their memory and finish on their
disks.

probes/ measure on a node, remote/ runs them there over ssh, collect.py puts the facts into a
Context, checks/ evaluates them (one function per check), report.py prints the results.
docs/preflight.md lists the checks.
"""
