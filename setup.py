"""The entry that older tools expect; pyproject.toml describes the package."""

from setuptools import setup

setup()
