"""Training from a program: `from backend import train` (docs/library.md). Nothing here imports the engine before it
trains."""
