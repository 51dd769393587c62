"""One training run: the loop, its parts, checkpoints, control commands, evaluation, telemetry."""
