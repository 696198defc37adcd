"""Small things that several rooms need, one home each."""
