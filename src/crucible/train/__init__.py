"""Training: from token shards to checkpoints. `loop.train` is the whole of it as one function."""
