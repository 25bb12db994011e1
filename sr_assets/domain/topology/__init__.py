"""The rules of native mirrors and sources: configuration, server state, drift, plan, links and their graph."""
