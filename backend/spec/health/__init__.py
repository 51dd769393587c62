"""The doctor: rules over a run's metrics that find what goes wrong, with a reason and advice. `watch` applies them as a run goes on."""
