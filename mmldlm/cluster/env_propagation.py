"""Environment variables that each launcher propagates from the head node to the other nodes."""

from __future__ import annotations

import os
import re
from pathlib import Path

PREFIXES = (
    "NCCL_",
    "GLOO_",
    "TORCH",
    "CUDA_",
    "OMP_",
    "MKL_",
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "WANDB_",
    "DS_",
    "DEEPSPEED_",
    "MMLDLM_",
    # Of accelerate, in scripts of the user's own.
    "ACCELERATE_",
    "FSDP_",
    "FI_",
    "UCX_",
    "RDMAV_",
    "TRITON_",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHON",
    "MASTER_",
    "PYTORCH_",
    "KMP_",
    "OPENBLAS_",
    "RAYON_",
    "CUBLAS_",
    "GLIBC_TUNABLES",
    "MALLOC_",
    # Proxies and certificates, for trackers and the hub.
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "ftp_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "FTP_PROXY",
    "NO_PROXY",
    "SSL_CERT_",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GRPC_",
    "TZ",
    "LANG",
    "LC_",
)
# Variables that are passed but not compared with a node's login, because they do not change a
# result.
NOT_COMPARED = ("TZ", "LANG", "LC_")
# Variables of a shell's session, or of an environment that every node has for itself.
_SESSION = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "TERM",
    "COLORTERM",
    "SSH_",
    "DISPLAY",
    "XAUTHORITY",
    "XDG_",
    "DBUS_",
    "LS_COLORS",
    "LSCOLORS",
    "MAIL",
    "HOST",
    "EDITOR",
    "VISUAL",
    "PAGER",
    "PS1",
    "PROMPT",
    "VIRTUAL_ENV",
    "CONDA_",
    "PYENV_",
    "SLURM_",
    "SBATCH_",
    "SRUN_",
    "PBS_",
    "BASH_",
    "ZSH",
    "TMUX",
    "STY",
    "COLUMNS",
    "LINES",
    "LESS",
    "HIST",
    "_",
    "MANPATH",
    "INFOPATH",
    "NVM_",
    "GPG_",
    "SUDO_",
    "WINDOWID",
    "VTE_",
    "GNOME_",
    "KDE_",
)

# deepspeed/launcher/runner.py (0.19.8): EXPORT_ENVS and the additions of its CUDA accelerator;
# CPUs add nothing.
_DEEPSPEED_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX")
_DEEPSPEED_CUDA = ("NCCL",)
DEEPSPEED_EXPORTS = _DEEPSPEED_PREFIXES + _DEEPSPEED_CUDA
# Variables that every launcher sets itself, that are meant for the head alone, or that have no
# effect on a run.
OWN = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "DS_ENV_FILE",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
)
# Without these, ranks use other network interfaces than the user chose and wait for each other.
REQUIRED = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_SOCKET_FAMILY",
    "NCCL_IB_DISABLE",
    "LD_PRELOAD",
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Active within double quotes, and for pdsh.
_SHELL_ACTIVE = re.compile(r'[$`\\"]|%[hnu%]')
# The address of a proxy may contain a password.
_SECRET = (
    "KEY",
    "TOKEN",
    "SECRET",
    "PASSWORD",
    "PROXY",
)


def run_variables() -> dict[str, str]:
    """Return the head's variables that a run needs on every node."""
    return {k: v for k, v in os.environ.items() if k.startswith(PREFIXES) and k not in OWN}


def compared_variables() -> dict[str, str]:
    """Return the run variables that must have the same value on every node."""
    return {k: v for k, v in run_variables().items() if not k.startswith(NOT_COMPARED)}


def names_not_passed() -> list[str]:
    """Return the variables of this shell that ranks on other nodes do not get, without those of a
    session.
    """
    passed = run_variables()
    return sorted(
        k for k in os.environ if k not in passed and k not in OWN and not k.startswith(_SESSION)
    )


def is_secret(name: str) -> bool:
    """Return whether a variable's name marks its value as secret: not to be printed or written to
    a file.
    """
    text = name.upper().replace("TOKENIZERS", "")
    return any(mark in text for mark in _SECRET)


def env_files() -> list[Path]:
    """Return the .deepspeed_env files that DeepSpeed reads, in its order (the later file wins)."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    paths = [Path(folder, name) for folder in (os.path.expanduser("~"), ".")]
    existing = [path for path in paths if path.is_file()]
    return existing[:1] if len(existing) == 2 and existing[0].samefile(existing[1]) else existing


def read_env_file(path: Path) -> tuple[dict[str, str], list[str]]:
    """Read a .deepspeed_env: (variables, problems). Values are taken literally, without quotes
    around them.

    DeepSpeed 0.19.8 pastes each line into a shell line of pdsh on every node, in double quotes if
    it is not plain. A value that a shell or pdsh would change is a problem. `mmldlm launch` passes
    the values in a file instead.
    """
    values, problems = {}, []
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    for line_number, line in enumerate(text.removesuffix("\n").split("\n") if text else [], 1):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not _VARIABLE.fullmatch(name):
            problems.append(
                f"{path}:{line_number}: not NAME=value: DeepSpeed fails on a blank line or a"
                " comment, and a shell would expand another name"
            )
            continue
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        values[name] = value[1:-1] if quoted else value
        if _SHELL_ACTIVE.search(values[name]) or (
            quoted and (value[0] == "'" or re.search(r"\s", value))
        ):
            problems.append(
                f"{path}:{line_number}: the value of {name} changes in the shells between"
                ' DeepSpeed and a rank: write the final value, without $ ` \\ " %h %n %u, and'
                " without quotes around it"
            )
    return values, problems


def propagated_variables(launcher: str, has_gpus: bool) -> dict[str, str] | None:
    """Return the run variables that a launcher propagates; None if it starts ranks in shells on
    the nodes.
    """
    if launcher == "slurm":
        # srun exports everything by default.
        return run_variables()
    if launcher == "torchrun":
        return None
    if launcher == "mpi":
        # mpirun propagates only variables named with -x.
        return {}
    prefixes = _DEEPSPEED_PREFIXES + (_DEEPSPEED_CUDA if has_gpus else ())
    variables = {k: v for k, v in run_variables().items() if k.startswith(prefixes)}
    for path in env_files():
        variables.update(read_env_file(path)[0])
    return variables


def write_env_file(path: Path, names: list[str]) -> list[str]:
    """Add variables of this environment to a .deepspeed_env; return the names that could not be
    written.

    DeepSpeed pastes the values unquoted into a shell line: only plain values are written, and no
    secrets.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    remaining = [
        line for line in lines if "=" in line and line.split("=", 1)[0].strip() not in names
    ]
    refused = []
    for name in names:
        value = os.environ[name]
        if (
            is_secret(name)
            or not value
            or any(not (c.isalnum() or c in "_./:,@%+=^-") for c in value)
            or _SHELL_ACTIVE.search(value)
        ):
            refused.append(name)
        else:
            remaining.append(f"{name}={value}")
    path.write_text("".join(line + "\n" for line in remaining), encoding="utf-8")
    return refused
