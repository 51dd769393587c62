"""Widgets of the Chat page: the transcript, the prompt, sampling settings, prompts of the dataset."""
