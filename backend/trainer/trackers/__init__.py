"""Trackers: processes that follow a run's event log and write it for csv, tensorboard, trackio or wandb. The run
knows only how to start them."""
