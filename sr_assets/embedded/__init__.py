"""The platform on one machine: the packaged nats-server, an emulated fleet, the demo."""
