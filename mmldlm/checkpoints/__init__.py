"""Checkpoints: the commit protocol of a run, readers and writers of file formats without torch,
resume.
"""
