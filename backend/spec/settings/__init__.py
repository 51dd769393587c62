"""The fields of `Config`, one module a subject; `backend.spec.config` puts them together."""
