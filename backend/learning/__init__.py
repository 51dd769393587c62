"""One rollout's updates: `learner` is the door; micro-batches (cuts), prompts read once for several of them (relay), compiled
gradients (traced), the coefficient of the entropy bonus (bonus).
"""
