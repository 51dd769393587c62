"""The check of several machines before a run: reach each, compare what they have, copy a model, measure their connection."""
