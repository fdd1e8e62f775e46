"""The trainable transformer, in PyTorch."""
