"""What makes a laptop enough: the packaged nats-server, the emulated fleet, the demo."""
