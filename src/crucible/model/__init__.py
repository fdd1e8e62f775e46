"""The trainable transformer, in PyTorch. Everything else about a model follows from its `ModelConfig`."""
