"""What parallel decoding costs, by the model's own likelihoods: the information curve, schedules,
exact likelihoods.
"""
