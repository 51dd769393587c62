"""Training from a program: `from backend import train` (docs/library.md).

training    `train` and `resume`, in this process      own_functions   reward functions that are objects of the program
trained_run what they return, and raise                rows            datasets that are objects of the program
own_updates an optimizer and a schedule of the program (own_optimizer, own_schedule)
callbacks   what the program is told while it trains

The run is a run like any other: a folder that the window shows and every verb works on. Nothing here imports the engine before it trains.
"""
