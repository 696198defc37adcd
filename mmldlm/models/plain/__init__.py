"""The plain transformer: one stream, causal or bidirectional, given a latent in one of three ways
or not at all.
"""
