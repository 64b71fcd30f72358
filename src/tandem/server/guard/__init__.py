"""Guards between the network and the routes: keys, origins, sizes, times, clients that leave or do not read."""
