"""Images as ids of codes: masked diffusion on their own clock, in place of the noise of continuous
latents.
"""
