"""Pages for a browser, each one file that needs no network."""
