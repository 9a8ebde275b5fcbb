"""How the project's own model pairs are made: `prepare` turns Python sources into tokens, `train` does the rest.

    python -m ddtree_engine.models.training.prepare SOURCES DATA --vocabulary 4096
    python -m ddtree_engine.models.training.train OUT --pair demo-code --data DATA

Each needs about seven minutes on one H200; `train --init-only` writes random weights of the same shapes at once.
"""
