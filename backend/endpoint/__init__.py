"""An OpenAI-compatible endpoint for the models of this machine."""
