"""What a user supplied, as plain values: text for sentences, paths, files, numbers, YAML and JSON, each read in one place with limits.

What cannot be used raises `Mistake` with a sentence that names it; nothing in here hangs, recurses or allocates by what it reads.
"""
