"""mmldlm: one MMDiT that translates between text and sentence embeddings, trained at scale."""

from __future__ import annotations

import os
import sys

# Not from typing, which would be imported before the path is put right below.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from mmldlm.inference.trained_model import TrainedModel

__version__ = "0.2.0"

# `python -m mmldlm.MODULE` puts the working folder first on the path, and the user's own random.py
# there would replace Python's. While the module is searched for, sys.argv[0] is "-m"; this package
# is imported before any of its modules.
if sys.argv[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False):
    _module = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    if _module.split(".")[0] == __name__:
        _folder = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
        # This very package stays the one that is found, also where it is not installed.
        sys.path[:1] = [] if _folder in sys.path[1:] else [_folder]


def heartbeat(step: int) -> None:
    """Report to `mmldlm launch -- SCRIPT` that this rank works; does nothing without it.

    Called once per step on every rank, it lets the watcher end a run that hangs and name the rank
    that the others wait for. Work between two calls (an evaluation, a save) has the time of
    `--heartbeat-timeout`; a call with the same step counts, too.

    Args:
        step: Number of the step, which all ranks count alike.
    """
    if "MMLDLM_LAUNCH" in os.environ:
        from mmldlm.launch.script_heartbeat import reporter

        reporter().beat(step)


def load(
    path: str | Path,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    encoder_dir: str | None = None,
    revision: str | None = None,
) -> TrainedModel:
    """Load a trained model, to write and embed texts, or to caption and draw images.

        model = mmldlm.load("RUN")
        model.decode(model.embed(["A sentence."]))

    Args:
        path: A run (its latest checkpoint), a checkpoint of any engine, a model.pt, or a folder
            written by `mmldlm convert`; or OWNER/NAME of such a folder on the Hugging Face hub,
            of which only data files are downloaded. A path that exists is never asked for there.
            The weights are read, not their moving average.
        device: Device of the model; None: cuda if available, else cpu.
        dtype: Type of the weights; None: fp32.
        encoder_dir: Folder of the encoder of the training data, or the folder that holds it, where
            it is not found otherwise.
        revision: Branch, tag or commit of a model on the hub; None: main.

    Raises:
        UserError: no such folder, model or device, or files that are damaged or do not belong
            together.
    """
    # Inside: `import mmldlm` starts without torch.
    from mmldlm.inference.trained_model import TrainedModel

    return TrainedModel(path, device, dtype, encoder_dir, revision)
