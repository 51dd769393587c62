"""What can be known of run folders without the engine: states, records, notes, comparison, changes of settings, the queue."""
