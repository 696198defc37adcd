"""Ports of this machine. As a script: print a free one."""

from __future__ import annotations

import socket

from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that was free on `host` a moment ago ("" for all interfaces).

    Raises:
        UserError: this machine does not have that address.
    """
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise UserError(
                f"a network interface with the address {host or '0.0.0.0'}, where ranks meet",
                describe_os_error(error),
                "ip addr add 127.0.0.1/8 dev lo; ip link set lo up (a sandbox has to set up its"
                " loopback interface)",
            ) from error
        return probe.getsockname()[1]


def port_owner(port: int) -> dict | None:
    """Return {"pid", "command"} of the process that listens on a TCP port; None if this user
    cannot see it.
    """
    import psutil

    for connection in psutil.net_connections("tcp"):
        is_listener = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        if is_listener and connection.pid is not None:
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                # The process has exited.
                continue
            return {"pid": connection.pid, "command": command.strip()[:160]}
    return None


if __name__ == "__main__":
    print(free_port())
