"""`export --to trl`: a folder that trains a run's settings with TRL on CUDA machines, without GRPO Studio."""
