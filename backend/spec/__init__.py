"""What a run *is*, without running it: settings, the diary, places, command lines.

Both programs import this package, so it imports the standard library, yaml and pydantic, and nothing else.
"""
