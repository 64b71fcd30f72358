"""Which experts are chosen: counted, recorded, read."""
