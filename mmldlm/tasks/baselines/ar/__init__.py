"""Autoregressive language model: p(x) = prod p(x_i | x_<i, z), EOS modelled, exact likelihood."""
