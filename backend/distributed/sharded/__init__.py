"""A run whose model is divided among its ranks: all of them compute every pass together.

Rank 0 is the ordinary trainer, with prompts, rewards, event log and files. What it computes with the model it announces to the others first
(`announcements`), which make the same call (`following`): the same passes in the same order. Inside a call all ranks meet wherever the
trainer looks up from its work (`meeting`), so that a pause waits on the CPU and not in a sum on a GPU. Arrays that every rank computes
alike are rank 0's by right: drawn tokens by `Policy.agreed`, gradients by one sum, adapters by a broadcast when they differ in a bit.
"""
