"""Model store, executor, optimizer, data, training loop, checkpoints. Never imports PuLP."""
