"""Fixtures of the data room, for tests over several rooms."""

from tests.data.conftest import corpus_file, made_store, need_minilm

__all__ = ["corpus_file", "made_store", "need_minilm"]
