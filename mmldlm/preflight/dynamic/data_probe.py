"""Child process of level 0 that opens the data, because its file system may hang, and counts the
parameters on the model (the one part of level 0 that imports torch); prints a JSON object.

python -m mmldlm.preflight.dynamic.data_probe CONFIG.yaml WORLD_SIZE
"""

from __future__ import annotations

import json
import sys

from mmldlm.errors import UserError


def measure(config, world_size: int) -> dict:
    """Return samples and model sizes, or the errors of engine and data.

    Returns:
        {"engine_error"} and {"data_error"} as {"expected", "found", "fix"} if any; else "samples",
        "fingerprint", "longest" (tokens), "shape", "config" (with what the data decides) and the
        entries of Task.model_sizes.
    """
    from mmldlm.config.task_registry import find_task
    from mmldlm.data.run_data import open_run_data
    from mmldlm.engines.build import check_engine

    found: dict = {}
    try:
        check_engine(config, world_size)
    except UserError as error:
        found["engine_error"] = _to_json(error)
    try:
        data = open_run_data(config)
    except UserError as error:
        return {**found, "data_error": _to_json(error)}
    config, task = data.config, find_task(config.task)
    found["samples"] = {
        "train": len(data.train_lengths),
        "validation": len(data.validation_lengths),
    }
    found["fingerprint"] = data.fingerprint()
    found["longest"] = int(max(data.train_lengths.max(), data.validation_lengths.max()))
    found["shape"] = data.shape()
    found["config"] = config.model_dump(mode="json")
    found.update(task.model_sizes(config, found["longest"]) or {})
    found["single_moment"] = found.get("matrices", 0) if config.optimizer.kind == "muon" else 0
    return found


def _to_json(error: UserError) -> dict[str, str]:
    return {"expected": error.expected, "found": error.found, "fix": error.fix}


def main() -> int:
    """Print the facts of the config file in sys.argv; return the exit code."""
    from mmldlm.config.load import load_config

    path, world_size = sys.argv[1:]
    found = measure(load_config(None, path, []), int(world_size))
    print("\n" + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
