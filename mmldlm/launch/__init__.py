"""Launch: preflight, then the launcher, then a watcher that ends the whole run in seconds when a part of it dies."""
