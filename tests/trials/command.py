"""The `mmldlm` command as a script, for the process that forks commands (tests/support/rank_server.py)."""

from mmldlm.cli import console_main

if __name__ == "__main__":
    console_main()
