"""Copy streams between NATS JetStream clusters, sample and track who sends, advise, and answer questions about the fleet."""
