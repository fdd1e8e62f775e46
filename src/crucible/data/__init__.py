"""From text to batches: `sources` yields documents, `prepare` writes them as token `shards`, `loader` reads batches."""
