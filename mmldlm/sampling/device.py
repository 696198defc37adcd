"""Devices of sampling: the one to use, and the one of a model."""

from __future__ import annotations

import torch
from torch import nn

from mmldlm.errors import UserError


def usable_device(name: str | None) -> str:
    """Return the device of --device; by default cuda if available, else cpu.

    Raises:
        UserError: a device that this machine or this build of torch lacks.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        found = f"{name}: not a device of torch"
    else:
        try:
            torch.empty(1, device=device)
            found = f"{name}: a device without memory" if device.type == "meta" else None
        except (
            RuntimeError,
            AssertionError,
            NotImplementedError,
        ) as error:  # depends on why the device is missing
            found = f"{name}: {(str(error).splitlines() or ['not available'])[0]}"
    if found is not None:
        number = torch.cuda.device_count() if torch.cuda.is_available() else 0
        known = f"cpu, or cuda:0 to cuda:{number - 1}" if number else "cpu (torch finds no GPU)"
        check = "`python -c 'import torch; print(torch.version.cuda, torch.cuda.is_available())'`"
        raise UserError(
            f"a --device that this machine has: {known}",
            found,
            "omit --device"
            if number
            else f"omit --device; to find out why no GPU is visible: `nvidia-smi`, {check}",
        )
    return name


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's weights."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
