"""What only x86 processors need: a fast BLAS, thread affinity, vectorised exp, small matrix products, swiglu."""
