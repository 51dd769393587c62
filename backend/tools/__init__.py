"""Tools and environments: functions that a model may call in its completions."""
