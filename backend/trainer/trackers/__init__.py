"""Trackers: processes that write a run's event log for csv, tensorboard, trackio or wandb."""
