"""The bundled demo: a model of about a million parameters that half knows how to add, and sums to learn from.

Only the making of `resources/demo/` lives here. Training it is the ordinary trainer with an ordinary preset
(`resources/presets/demo.yaml`): nothing in the trainer knows of a demo.
"""
