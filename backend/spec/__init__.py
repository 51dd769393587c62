"""What a run *is*, without running it: settings, the diary, places, command lines.

Both programs enter this room, so it imports the standard library, yaml and pydantic, and nothing else.
"""
