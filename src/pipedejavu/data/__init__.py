"""People's own data: files of text, records or images, read once into a memory-mapped cache.

It knows the form of the samples that a model reads, but neither the model nor the run.
"""
