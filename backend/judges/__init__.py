"""Rewards that are models: reward models and judges, which score in the trainer's process.

    model_reward   the protocol, and entries of `reward_functions` that are models
    reward_model   sequence classification with one label

The modules that load a model import mlx; the others do not.
"""
