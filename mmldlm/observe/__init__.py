"""Logs and statistics of a run, and their readers: console, trackers, plots, health monitor."""
