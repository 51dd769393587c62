"""What a run's completions.jsonl holds, whatever its size: by step, by filter, by text; compared and exported. No widgets."""
