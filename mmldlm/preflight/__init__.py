"""Preflight: will this run start on these hosts, fit in their memory and finish on their disks?

probes/ measure on a node and judge nothing; agent.py runs them there; transport.py reaches the agents; checks/ judge
what came back, one function a check; report.py shows it. docs/preflight.md lists the checks.
"""
