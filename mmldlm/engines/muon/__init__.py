"""Muon for the matrices of a model: one implementation over the shards that every engine
reports.
"""
