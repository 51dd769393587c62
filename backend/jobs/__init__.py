"""Training as a job of Hugging Face: hardware and prices, submitting, and following it into a run folder."""
