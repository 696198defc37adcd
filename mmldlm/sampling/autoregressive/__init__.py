"""Text from a causal model: greedy, ancestral, and by beam search, with a cache of keys and
values.
"""
