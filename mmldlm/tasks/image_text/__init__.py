"""Images and captions: text from images and images from text, by the model of the translation
task.
"""
