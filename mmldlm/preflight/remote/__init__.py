"""The agent on every node and the ssh session to it."""
