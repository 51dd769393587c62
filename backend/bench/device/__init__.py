"""`python -m backend bench device`: what GRPO does on the user's own device, measured on random weights in the shapes of real models."""
