"""Preflight: check whether a run will start on its hosts, fit in their memory and finish on their
disks.

runner.py collects the facts of this machine and, through agent.py on every node, those of the
nodes into a Context. checks/ has one file per subject: its probe, and one function per check.
report.py prints the results, receipt.py keeps them. docs/preflight.md lists the checks.
"""
