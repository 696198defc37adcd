"""Images as ids of codes: masked diffusion on their own clock, in place of the noise of continuous
latents.

Its model, noiser, objective and task are subclasses of those of the tasks image_text and
translation, which know nothing of codes. The store's codec makes the ids (mmldlm/data).
"""
