"""A run and the machine under it: memory, GPU errors and what is done after one, sleep, heat, what is used."""
