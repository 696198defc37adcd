"""Stop signals while a command of the package runs."""

from __future__ import annotations

import os
import signal


def test_stop_signals_act_like_ctrl_c_in_a_command(tmp_path, monkeypatch, capsys):
    from mmldlm import cli
    from mmldlm.commands import verify_data

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # a background job of a shell ignores SIGINT
        monkeypatch.setattr(
            verify_data, "main", lambda args, number=number: os.kill(os.getpid(), number)
        )
        assert cli.main(["verify-data", str(tmp_path)]) == 1
        assert capsys.readouterr().err == "interrupted\n"
