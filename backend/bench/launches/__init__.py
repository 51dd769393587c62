"""Launches of one decoding step on Metal, counted on any machine: trace the step, fuse as mlx.compile does, apply Metal's rules."""
