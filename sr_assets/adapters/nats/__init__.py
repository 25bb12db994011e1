"""A cluster's JetStream through nats-py: the control plane. `wire` carries the copied messages."""
