"""GRPO Studio's window. It never loads the engine: of the backend it may enter `backend.spec` only."""
