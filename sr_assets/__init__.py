"""Copy streams between JetStream clusters, sample and track who sends, advise, answer questions about the fleet."""
