"""Stores from folders of files that other programs wrote."""
