"""Several machines that train one run: the file that lists them, how they communicate, and the commands that start their processes.

Plain data without mlx, so that the window reads and writes it too. `backend.run.distributed` does the work.
"""
