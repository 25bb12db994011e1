"""The control plane of a cluster's JetStream, through nats-py. `wire` carries the copied messages."""
