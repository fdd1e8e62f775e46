"""From a checkpoint to an artifact, and proof that the two compute the same."""
