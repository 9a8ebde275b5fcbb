"""Proof that a stack's lock works: a resolver only shows that names and versions agree."""
