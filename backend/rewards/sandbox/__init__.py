"""Score in a child process, where a user's code can hang or crash without taking the parent with it."""
