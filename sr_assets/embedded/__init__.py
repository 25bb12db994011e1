"""What runs the platform on one machine: the packaged nats-server, the emulated fleet, the demo, the bench.

Not here: what a real deployment uses (`operate`, `cli`).
"""
