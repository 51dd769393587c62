"""The bundled demo: a model of about a million parameters that adds two-digit numbers half reliably, and sums to train
on.

This package makes the files in `resources/demo/` and measures accuracy. The demo is trained by the ordinary trainer
with an ordinary preset (`resources/presets/demo.yaml`): nothing in the trainer knows of a demo.
"""
