"""A cluster's JetStream by nats-py: the control plane. `wire` carries what is copied."""
