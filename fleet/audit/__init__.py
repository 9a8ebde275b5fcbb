"""The static audit: do the parts of an environment fit each other, the stack's lock and the host? Nothing is imported,
no GPU is needed."""
