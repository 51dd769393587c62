"""The picker for models and datasets, with downloads."""
