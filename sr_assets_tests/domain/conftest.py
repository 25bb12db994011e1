"""How properties are searched: without a time limit per example, which a busy machine would break. No fixtures."""

from hypothesis import settings

settings.register_profile("house", deadline=None)
settings.load_profile("house")
