"""Models and decoding loop in plain PyTorch: the oracle for everything else, and the standalone server's core."""
