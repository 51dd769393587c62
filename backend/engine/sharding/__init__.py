"""One model over several machines: each has a part of every layer (tensor parallelism), with adapters beside its part."""
