"""Sample completions: continuous batching over slots of KV caches, a fused model for decoding, exact filters."""
