"""Score in a process of its own, where a user's code can hang, crash or exit without taking the run with it.

process_scorer   the functions of one run (`backend.rewards.scorer`)     client   the reward bench
process          the process that both ask, and its end                  server   what runs in it
wire, answers    what goes to it (anything), and what comes back (JSON, checked field by field)
"""
