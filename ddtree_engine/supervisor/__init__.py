"""What `ddtree_engine.launch` is made of. Standard library only: it must run, and speak, when the engine cannot."""
