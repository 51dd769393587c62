"""Training from a program: `from backend import train` (docs/library.md)."""
