"""DDTree inside SGLang 0.5.11.

The patched wheel imports this package at a handful of seams (see `seams.py`); everything that is DDTree and not a seam
lives here. Nothing in this package is imported by a server that does not ask for `--speculative-algorithm DDTREE`.
"""
