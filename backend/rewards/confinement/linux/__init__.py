"""What confines a process on Linux: Landlock, a filter of system calls, resource limits."""
