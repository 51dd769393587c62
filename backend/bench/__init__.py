"""The verb `bench device`: speed, memory and precision of this machine on random models."""
