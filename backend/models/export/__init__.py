"""Export of trained weights: written one array at a time, verified by loading them back, moved into place by one rename."""
