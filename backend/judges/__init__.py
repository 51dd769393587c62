"""Rewards that are models: reward models and judges, which score in the trainer's process."""
