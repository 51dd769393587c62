"""From dataset rows to tokenized prompts, and the preview of both that the window shows."""
