"""Probes: measurements on a node. A probe returns JSON values without an evaluation, and undoes
its changes.

PROBES: name -> (function of the request's arguments, time limit in seconds). Standard library
only, so that an agent starts in a tenth of a second.
"""

from mmldlm.preflight.probes import gpu, network, processes, storage, system

PROBES = {
    "identity": (system.identity, 5),
    "versions": (system.versions, 10),
    "code": (system.code, 10),
    "limits": (system.limits, 5),
    "temporary": (system.temporary, 10),
    "memory": (system.memory, 5),
    "environment": (system.environment, 5),
    "network": (network.network, 30),
    "resolve": (network.resolve, 30),
    "gpus": (gpu.gpus, 20),
    "processes": (processes.processes, 5),
    "locks": (processes.locks, 5),
    "caches": (processes.caches, 5),
    "data": (storage.data, 20),
    "checkpoints": (storage.checkpoints, 15),
}
