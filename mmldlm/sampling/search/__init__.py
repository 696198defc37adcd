"""Texts chosen by the embedding that they have: a judge in the loop of sampling."""
