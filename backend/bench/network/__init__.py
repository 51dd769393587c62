"""What the network costs a run on several machines: sums measured over shaped links between network namespaces, and a model fitted to them."""
