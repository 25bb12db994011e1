"""A cluster's JetStream by nats-py: the control plane, and what a connection is secured with."""
