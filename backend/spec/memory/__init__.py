"""Memory of a run, estimated from settings and model headers before anything is loaded."""
