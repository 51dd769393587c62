"""From scored groups to new weights: advantages, batches, algorithms and losses, gradients, optimizer."""
