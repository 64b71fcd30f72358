"""Several models behind one address: a process that proxies to one `kt serve` a model."""
