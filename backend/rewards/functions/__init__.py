"""The reward functions that ship with the program, and the answer and mathematics parsing that they share."""
