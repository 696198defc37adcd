"""Launch: preflight, then the launcher, then a watcher that stops the run within seconds when a
part fails.
"""
