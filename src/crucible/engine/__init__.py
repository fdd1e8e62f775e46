"""Token ids in, token ids out. No torch, no HTTP, no text."""
