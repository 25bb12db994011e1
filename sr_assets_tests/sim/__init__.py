"""A deterministic simulation: JetStream, the network, clocks and processes from one seed, and the platform unchanged in it."""
