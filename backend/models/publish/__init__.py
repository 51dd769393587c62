"""Publishing a trained model on Hugging Face: its card, the token, and an upload that can be interrupted at any moment."""
