"""What `backend.rollout` is made of: who is decoded (crowd), in which rows (slots), what was drawn (drafts), by which function
of fewer products (decoder, bundles), and how logits become a token (sampler). It never learns.
"""
